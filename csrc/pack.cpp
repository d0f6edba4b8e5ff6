#include "pack.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <stdexcept>

#include "float_env.h"

namespace commlib {
namespace {

const char* dtype_name(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return "float32";
    case DType::kBFloat16:
      return "bfloat16";
    case DType::kFloat16:
      return "float16";
    case DType::kFloat64:
      return "float64";
  }
  return "unknown";
}

// True where multiplying by 1 / value rounds exactly as dividing by it: powers of two whose reciprocal is normal.
bool has_exact_reciprocal(double value, int max_exponent) {
  int exponent;
  return std::abs(std::frexp(value, &exponent)) == 0.5 && std::abs(exponent - 1) <= max_exponent;
}

void check_slots(std::vector<Slot> slots) {
  std::sort(slots.begin(), slots.end(), [](const Slot& a, const Slot& b) { return a.offset < b.offset; });
  std::size_t end = 0;
  for (const Slot& slot : slots) {
    if (slot.count == 0) continue;
    if (slot.offset < end) throw std::invalid_argument("two tensors share elements of the flat buffer");
    end = slot.offset + slot.count;
  }
}

bool overlaps(std::uintptr_t a, std::size_t a_bytes, std::uintptr_t b, std::size_t b_bytes) {
  return a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

void check_pair(DType src, DType dst) {
  if (active_kernels().divide[static_cast<int>(src)][static_cast<int>(dst)]) return;
  throw std::invalid_argument(std::string("there is no kernel from ") + dtype_name(src) + " to " + dtype_name(dst));
}

Divisor::Divisor(double value, DType src) {
  const bool is_double = src == DType::kFloat64;
  const double divisor = is_double ? value : static_cast<double>(static_cast<float>(value));
  if (!std::isfinite(divisor) || divisor == 0.0) {
    throw std::invalid_argument("the divisor must be finite and not zero, got " + std::to_string(value));
  }
  multiplies_ = has_exact_reciprocal(divisor, is_double ? 1022 : 126);
  operand_ = multiplies_ ? 1.0 / divisor : divisor;
  is_one_ = divisor == 1.0;
}

void Divisor::convert(void* dst, DType dst_type, const void* src, DType src_type, std::size_t count) const {
  if (is_one_ && dst_type == src_type) {
    if (dst != src) std::memcpy(dst, src, count * element_bytes(src_type));
    return;
  }
  const auto& table = multiplies_ ? active_kernels().multiply : active_kernels().divide;
  table[static_cast<int>(src_type)][static_cast<int>(dst_type)](dst, src, count, operand_);
}

PackPlan::PackPlan(std::vector<Slot> slots, DType src_type, DType dst_type)
    : slots_(std::move(slots)), src_type_(src_type), dst_type_(dst_type) {
  check_pair(src_type, dst_type);
  check_slots(slots_);
  for (const Slot& slot : slots_) extent_ = std::max(extent_, slot.offset + slot.count);
}

std::size_t PackPlan::find_overlap(const void* dst, const void* const* srcs) const {
  const auto base = reinterpret_cast<std::uintptr_t>(dst);
  const std::size_t src_bytes = element_bytes(src_type_), dst_bytes = element_bytes(dst_type_);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    const auto src = reinterpret_cast<std::uintptr_t>(srcs[i]);
    if (src == 0 || slots_[i].count == 0) continue;
    if (!overlaps(src, slots_[i].count * src_bytes, base, extent_ * dst_bytes)) continue;
    if (src_type_ != dst_type_ || src != base + slots_[i].offset * dst_bytes) return i;
  }
  return slots_.size();
}

void PackPlan::pack(void* dst, const void* const* srcs, double divisor) const {
  const ExactFloatScope exact;
  const Divisor exact_divisor(divisor, src_type_);
  const std::size_t dst_bytes = element_bytes(dst_type_);
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i].count == 0) continue;
    char* place = static_cast<char*>(dst) + slots_[i].offset * dst_bytes;
    if (srcs[i]) {
      exact_divisor.convert(place, dst_type_, srcs[i], src_type_, slots_[i].count);
    } else {
      std::memset(place, 0, slots_[i].count * dst_bytes);
    }
  }
}

}  // namespace commlib
