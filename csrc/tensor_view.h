// Reads a torch tensor's address, type and shape without libtorch and without calling Python.
//
// [Note: tensor exchange]
// torch 2.10 and later publish a table of C functions on the tensor class, the DLPack C exchange interface
// (`torch.Tensor.__dlpack_c_exchange_api__`). Its layout is a stable C interface with its own standard, so the
// extension neither includes nor links torch. Reading the same fields through Python (data_ptr, numel, dtype, device,
// is_contiguous) takes about ten times as long, and a step may pack thousands of tensors.
#pragma once

#include <Python.h>

#include <cstddef>

#include "kernels.h"

namespace commlib {

// Sets the class of tensors, the capsule with its table, and the method that returns whether a tensor is a negated
// view. Must be called once before `read_tensor`. Throws std::runtime_error if the table has another major version or
// lacks the required function.
void bind_tensor_type(PyObject* tensor_type, PyObject* exchange_capsule, PyObject* is_neg);

struct TensorView {
  void* data;         // null if there are no elements
  std::size_t count;  // number of elements
};

struct ByteView {
  void* data;
  std::size_t nbytes;
};

struct ValuesView {
  void* data;
  std::size_t count;  // number of elements
  DType type;
};

struct RowsView {
  void* data;
  std::size_t count, nbytes;  // number of rows, bytes of each
};

// Each sets `view` and returns true if `object` is a contiguous CPU tensor of its kind. They leave no Python error set
// and require the GIL.
bool read_tensor(PyObject* object, DType dtype, TensorView* view);  // of type `dtype`
bool read_bytes(PyObject* object, ByteView* view);                  // of any non-complex type
bool read_values(PyObject* object, ValuesView* view);               // of any `DType`
bool read_rows(PyObject* object, RowsView* view);                   // of unsigned 8-bit integers and two dimensions
bool read_uint8(PyObject* object, ByteView* view);                  // of unsigned 8-bit integers

}  // namespace commlib
