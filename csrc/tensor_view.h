// Reads a torch tensor's address, type and shape without libtorch and without calling Python.
//
// [Note: tensor exchange]
// torch 2.10 and later publish a table of C functions on the tensor class, the DLPack C exchange interface
// (`torch.Tensor.__dlpack_c_exchange_api__`). Its layout is a stable C interface of its own standard, so the extension
// neither includes nor links torch. Asking Python for the same facts (data_ptr, numel, dtype, device, is_contiguous)
// takes about ten times as long, and a step may pack thousands of tensors.
#pragma once

#include <Python.h>

#include <cstddef>

#include "kernels.h"

namespace commlib {

// Names the class of tensors, the capsule with its table, and the method that says whether a tensor is a negated view.
// Must be called once before `read_tensor`.
// Throws std::runtime_error if the table is of another major version or lacks the function that is needed.
void bind_tensor_type(PyObject* tensor_type, PyObject* exchange_capsule, PyObject* is_neg);

struct TensorView {
  void* data;         // null where there are no elements
  std::size_t count;  // of elements
};

struct ByteView {
  void* data;
  std::size_t nbytes;
};

struct ValuesView {
  void* data;
  std::size_t count;  // of elements
  DType type;
};

struct RowsView {
  void* data;
  std::size_t count, nbytes;  // of rows, and of each
};

// Return true and set `view` if `object` is a contiguous CPU tensor: of type `dtype`, of any type but a complex one, of
// any `DType`, or a matrix of bytes. Leave no Python error behind. Need the GIL.
bool read_tensor(PyObject* object, DType dtype, TensorView* view);
bool read_bytes(PyObject* object, ByteView* view);
bool read_values(PyObject* object, ValuesView* view);
bool read_rows(PyObject* object, RowsView* view);
// The same for a tensor of unsigned 8-bit integers.
bool read_uint8(PyObject* object, ByteView* view);

}  // namespace commlib
