#include "pack.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "float_env.h"

namespace commlib {
namespace {

void check_slots(std::vector<Slot> slots) {
  std::sort(slots.begin(), slots.end(), [](const Slot& a, const Slot& b) { return a.offset < b.offset; });
  std::size_t end = 0;
  for (const Slot& slot : slots) {
    if (slot.count == 0) continue;
    if (slot.offset < end) throw std::invalid_argument("two tensors share elements of the flat buffer");
    end = slot.offset + slot.count;
  }
}

}  // namespace

static void scale_into(void* dst, const void* src, DType type, std::size_t count, double factor) {
  if (factor != 1.0) {
    active_kernels().scale[static_cast<int>(type)](dst, src, count, factor);
  } else if (dst != src) {
    std::memcpy(dst, src, count * element_bytes(type));
  }
}

PackPlan::PackPlan(std::vector<Slot> slots, DType type) : slots_(std::move(slots)), type_(type) {
  check_slots(slots_);
  for (const Slot& slot : slots_) extent_ = std::max(extent_, slot.offset + slot.count);
}

const void* PackPlan::place(const void* dst, std::size_t index) const {
  return static_cast<const char*>(dst) + slots_[index].offset * element_bytes(type_);
}

std::size_t PackPlan::find_overlap(const void* dst, const void* const* srcs) const {
  const std::size_t bytes = element_bytes(type_);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (srcs[i] == nullptr || slots_[i].count == 0) continue;
    if (!overlap(srcs[i], slots_[i].count * bytes, dst, extent_ * bytes)) continue;
    if (srcs[i] != place(dst, i)) return i;
  }
  return slots_.size();
}

void PackPlan::pack(void* dst, const void* const* srcs, double factor) const {
  const ExactFloatScope exact;
  const std::size_t bytes = element_bytes(type_);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].count == 0) continue;
    char* place = static_cast<char*>(dst) + slots_[i].offset * bytes;
    if (srcs[i]) {
      scale_into(place, srcs[i], type_, slots_[i].count, factor);
    } else {
      std::memset(place, 0, slots_[i].count * bytes);
    }
  }
}

}  // namespace commlib
