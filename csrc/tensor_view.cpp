#include "tensor_view.h"

#include <cstdint>
#include <stdexcept>
#include <string>

namespace commlib {
namespace {

// The parts of DLPack 1.x that are used here, with the layout of the standard.
struct ExchangeVersion {
  std::uint32_t major;
  std::uint32_t minor;
};

struct ExchangedTensor {
  void* data;
  std::int32_t device_type;
  std::int32_t device_id;
  std::int32_t num_dims;
  std::uint8_t type_code;
  std::uint8_t type_bits;
  std::uint16_t type_lanes;
  std::int64_t* shape;
  std::int64_t* strides;
  std::uint64_t byte_offset;
};

using ReadFn = int (*)(void* object, ExchangedTensor* out);

struct ExchangeTable {
  ExchangeVersion version;
  ExchangeTable* previous;
  void* allocate;
  void* export_managed;
  void* import_managed;
  ReadFn read;
  void* current_stream;
};

constexpr std::uint32_t kMajorVersion = 1;
constexpr std::int32_t kCpu = 1;
constexpr std::int32_t kPinnedCpu = 3;
constexpr std::uint8_t kUnsigned = 1;
constexpr std::uint8_t kFloat = 2;
constexpr std::uint8_t kBFloat = 4;
constexpr std::uint8_t kComplex = 5;

PyTypeObject* tensor_class = nullptr;
PyObject* is_neg_method = nullptr;
ReadFn read_function = nullptr;

bool has_type(const ExchangedTensor& tensor, DType dtype) {
  const std::uint8_t code = dtype == DType::kBFloat16 ? kBFloat : kFloat;
  return tensor.type_code == code && tensor.type_bits == 8 * element_bytes(dtype) && tensor.type_lanes == 1;
}

bool is_uint8(const ExchangedTensor& tensor) {
  return tensor.type_code == kUnsigned && tensor.type_bits == 8 && tensor.type_lanes == 1;
}

std::size_t size_of(const ExchangedTensor& tensor) {
  std::size_t size = 1;
  for (int dim = 0; dim < tensor.num_dims; ++dim) size *= static_cast<std::size_t>(tensor.shape[dim]);
  return size;
}

bool is_contiguous(const ExchangedTensor& tensor) {
  std::int64_t expected = 1;
  for (int dim = tensor.num_dims - 1; dim >= 0; --dim) {
    if (tensor.shape[dim] != 1 && tensor.strides[dim] != expected) return false;
    expected *= tensor.shape[dim];
  }
  return true;
}

// The imaginary part of a conjugate is stored without its sign, which the table does not report. Its stride is two, so
// only a single element of it counts as contiguous. Only then is a Python call needed.
bool is_negated(PyObject* object) {
  PyObject* answer = PyObject_CallFunctionObjArgs(is_neg_method, object, nullptr);
  if (!answer) PyErr_Clear();
  Py_XDECREF(answer);
  return answer != Py_False;
}

// If `object` is a contiguous CPU tensor of any type, sets the outputs and returns true.
bool read_any(PyObject* object, ExchangedTensor* tensor, TensorView* view) {
  if (!read_function || !PyObject_TypeCheck(object, tensor_class)) return false;
  if (read_function(object, tensor) != 0) {
    PyErr_Clear();
    return false;
  }
  if (tensor->device_type != kCpu && tensor->device_type != kPinnedCpu) return false;
  *view = {nullptr, size_of(*tensor)};
  if (view->count == 0) return true;
  if (view->count == 1 && is_negated(object)) return false;
  view->data = static_cast<char*>(tensor->data) + tensor->byte_offset;
  return tensor->data && is_contiguous(*tensor);
}

}  // namespace

void bind_tensor_type(PyObject* tensor_type, PyObject* exchange_capsule, PyObject* is_neg) {
  auto* table = static_cast<ExchangeTable*>(PyCapsule_GetPointer(exchange_capsule, "dlpack_exchange_api"));
  if (!table) PyErr_Clear();
  while (table && table->version.major > kMajorVersion) table = table->previous;
  if (!PyType_Check(tensor_type) || !table || table->version.major != kMajorVersion || !table->read) {
    throw std::runtime_error("the tensor class has no DLPack 1 exchange table that reads tensors");
  }
  // Kept for the lifetime of the process, like the extension.
  Py_INCREF(tensor_type);
  Py_INCREF(is_neg);
  tensor_class = reinterpret_cast<PyTypeObject*>(tensor_type);
  is_neg_method = is_neg;
  read_function = table->read;
}

bool read_tensor(PyObject* object, DType dtype, TensorView* view) {
  ExchangedTensor tensor;
  return read_any(object, &tensor, view) && has_type(tensor, dtype);
}

bool read_values(PyObject* object, ValuesView* view) {
  ExchangedTensor tensor;
  TensorView elements;
  if (!read_any(object, &tensor, &elements)) return false;
  for (int type = 0; type < kNumDTypes; ++type) {
    *view = {elements.data, elements.count, static_cast<DType>(type)};
    if (has_type(tensor, view->type)) return true;
  }
  return false;
}

bool read_rows(PyObject* object, RowsView* view) {
  ExchangedTensor tensor;
  TensorView elements;
  if (!read_any(object, &tensor, &elements) || !is_uint8(tensor) || tensor.num_dims != 2) return false;
  *view = {elements.data, static_cast<std::size_t>(tensor.shape[0]), static_cast<std::size_t>(tensor.shape[1])};
  return true;
}

bool read_uint8(PyObject* object, ByteView* view) {
  ExchangedTensor tensor;
  TensorView elements;
  if (!read_any(object, &tensor, &elements)) return false;
  *view = {elements.data, elements.count};
  return is_uint8(tensor);
}

bool read_bytes(PyObject* object, ByteView* view) {
  ExchangedTensor tensor;
  TensorView elements;
  if (!read_any(object, &tensor, &elements)) return false;
  const std::size_t bits = std::size_t{tensor.type_bits} * tensor.type_lanes;
  *view = {elements.data, elements.count * bits / 8};
  return tensor.type_code != kComplex && bits % 8 == 0;  // a conjugate is stored without its sign
}

}  // namespace commlib
