// Gathers many tensors into one flat buffer, multiplied by a factor on the way.
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

// Where each of a list of tensors lies in a flat buffer. Made once, used every step.
class PackPlan {
 public:
  // Throws std::invalid_argument if slots overlap.
  PackPlan(std::vector<Slot> slots, DType type);

  std::size_t size() const { return slots_.size(); }
  DType type() const { return type_; }
  std::size_t count(std::size_t index) const { return slots_[index].count; }
  // The number of elements that the flat buffer must have.
  std::size_t extent() const { return extent_; }

  // Where the tensor's slot begins in the flat buffer that begins at `dst`.
  const void* place(const void* dst, std::size_t index) const;

  // The index of a source that overlaps the buffer elsewhere than exactly in its own place, or size() if there is none.
  std::size_t find_overlap(const void* dst, const void* const* srcs) const;

  // Fills the slots of `dst` from `srcs`, each multiplied by `factor`; a null source fills its slot with zeros.
  void pack(void* dst, const void* const* srcs, double factor) const;

 private:
  std::vector<Slot> slots_;
  DType type_;
  std::size_t extent_ = 0;
};

}  // namespace commlib
