// Arguments of the codecs' bindings: tensors and numbers, read from Python objects.
// A tensor or a number that does not fit raises ValueError. Python then raises the error that names it.
#pragma once

#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <stdexcept>

#include "kernels.h"
#include "tensor_view.h"

namespace commlib {

namespace py = pybind11;

constexpr std::size_t kPayloadAlignment = 16;

[[noreturn]] inline void refuse() {
  throw std::invalid_argument("a tensor or a number does not fit");
}

// A contiguous stretch of memory that a kernel reads or writes.
struct Memory {
  const void* data;
  std::size_t nbytes;
};

inline void check_apart(const Memory& first, const Memory& second) {
  if (overlap(first.data, first.nbytes, second.data, second.nbytes)) refuse();
}

inline float number(double value, bool may_be_zero = true) {
  const double magnitude = std::abs(value);
  if (!(magnitude <= std::numeric_limits<float>::max()) || (!may_be_zero && magnitude < 0x1p-149)) refuse();
  return static_cast<float>(value);
}

inline ValuesView values_of(py::handle object) {
  ValuesView view;
  if (!read_values(object.ptr(), &view)) refuse();
  return view;
}

inline Memory memory_of(const ValuesView& view) {
  return {view.data, view.count * element_bytes(view.type)};
}

// The address of `numel` fp32 elements.
inline float* state_of(py::handle object, std::size_t numel) {
  TensorView view;
  if (!read_tensor(object.ptr(), DType::kFloat32, &view) || view.count != numel) refuse();
  return static_cast<float*>(view.data);
}

inline void check_alignment(const void* data) {
  if (reinterpret_cast<std::uintptr_t>(data) % kPayloadAlignment != 0) refuse();
}

// The address of a payload buffer of `nbytes`.
inline std::uint8_t* payload_of(py::handle object, std::size_t nbytes) {
  ByteView view;
  if (!read_uint8(object.ptr(), &view) || view.nbytes != nbytes) refuse();
  check_alignment(view.data);
  return static_cast<std::uint8_t*>(view.data);
}

// Error feedback: None, or an object with a residual of `numel` elements that does not overlap the other tensors.
struct Feedback {
  float* residual = nullptr;
  float beta = 1.0f, gamma = 1.0f;

  Feedback(py::handle feedback, std::size_t numel, const Memory& source, const Memory& out) {
    if (feedback.is_none()) return;
    residual = state_of(feedback.attr("residual"), numel);
    const Memory own = {residual, numel * sizeof(float)};
    check_apart(own, source);
    check_apart(own, out);
    beta = number(py::cast<double>(feedback.attr("beta")));
    gamma = number(py::cast<double>(feedback.attr("gamma")));
  }
};

// Consecutive payloads of one chunk, and the divisor of their sum.
struct Payloads {
  const std::uint8_t* data;
  std::size_t count, nbytes;
  float divisor;

  Payloads(py::handle object, std::size_t expected_bytes, double by) : divisor(number(by, false)) {
    RowsView view;
    if (!read_rows(object.ptr(), &view) || view.count == 0 || view.nbytes != expected_bytes) refuse();
    check_alignment(view.data);
    data = static_cast<const std::uint8_t*>(view.data);
    count = view.count;
    nbytes = view.nbytes;
  }

  Memory memory() const { return {data, count * nbytes}; }
};

}  // namespace commlib
