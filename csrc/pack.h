// Gathers many tensors into one flat buffer, divided and cast on the way.
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

// Division by a constant: exact, and by multiplication where that gives the same bits (powers of two).
class Divisor {
 public:
  // Throws std::invalid_argument if `value`, as the kernels compute with it, is zero or not finite.
  Divisor(double value, DType src);

  void convert(void* dst, DType dst_type, const void* src, DType src_type, std::size_t count) const;

 private:
  double operand_;
  bool multiplies_;
  bool is_one_;
};

// Where each of a list of tensors lies in a flat buffer. Made once, used every step.
class PackPlan {
 public:
  // Throws std::invalid_argument if slots overlap or the pair of types has no kernel.
  PackPlan(std::vector<Slot> slots, DType src_type, DType dst_type);

  std::size_t size() const { return slots_.size(); }
  DType src_type() const { return src_type_; }
  std::size_t count(std::size_t index) const { return slots_[index].count; }
  // The number of elements that the flat buffer must have.
  std::size_t extent() const { return extent_; }

  // The index of a source that overlaps the buffer elsewhere than exactly in its own place, or size() if there is none.
  std::size_t find_overlap(const void* dst, const void* const* srcs) const;

  // Fills the slots of `dst` from `srcs`, each divided by `divisor`; a null source fills its slot with zeros.
  void pack(void* dst, const void* const* srcs, double divisor) const;

 private:
  std::vector<Slot> slots_;
  DType src_type_;
  DType dst_type_;
  std::size_t extent_ = 0;
};

// Throws std::invalid_argument, naming the two types, if there is no kernel from `src` to `dst`.
void check_pair(DType src, DType dst);

}  // namespace commlib
