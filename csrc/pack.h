// Gathers many tensors into one flat buffer, multiplied by a factor.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "kernels.h"

namespace commlib {

// One tensor's place in the flat buffer, in elements.
struct Slot {
  std::size_t offset;
  std::size_t count;
};

// The slots of a list of tensors in a flat buffer. Created once and used in every step.
class PackPlan {
 public:
  // Throws std::invalid_argument if slots overlap.
  PackPlan(std::vector<Slot> slots, DType type);

  std::size_t size() const { return slots_.size(); }
  DType type() const { return type_; }
  std::size_t count(std::size_t index) const { return slots_[index].count; }
  // The minimum number of elements of the flat buffer.
  std::size_t extent() const { return extent_; }

  // The start of the tensor's slot in the flat buffer at `dst`.
  const void* place(const void* dst, std::size_t index) const;

  // The index of a source that overlaps the buffer outside of its own slot, or size() without one.
  std::size_t find_overlap(const void* dst, const void* const* srcs) const;

  // Fills the slots of `dst` from `srcs`, each multiplied by `factor`; a null source fills its slot with zeros.
  void pack(void* dst, const void* const* srcs, double factor) const;

 private:
  std::vector<Slot> slots_;
  DType type_;
  std::size_t extent_ = 0;
};

}  // namespace commlib
