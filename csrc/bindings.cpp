// Python bindings of the kernels, used only by commlib/kernels/native.py. They read and check tensors themselves. All
// kernels run without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "codec_bindings.h"
#include "heartbeat.h"
#include "pack.h"
#include "tensor_view.h"

namespace py = pybind11;

namespace commlib {
namespace {

PackPlan make_plan(const std::vector<std::size_t>& offsets, const std::vector<std::size_t>& counts, int type) {
  std::vector<Slot> slots;
  slots.reserve(counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) slots.push_back({offsets.at(i), counts[i]});
  return PackPlan(std::move(slots), static_cast<DType>(type));
}

// Returns whether `factor` is finite in the arithmetic of a kernel of this type.
bool is_usable(double factor, DType type) {
  const bool is_double = type == DType::kFloat64;
  return std::abs(factor) <= (is_double ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max());
}

// Returns -1 on success. Otherwise nothing was written, and the result is the index of the first source that does not
// match the plan, or the number of sources for any other error. `None` stands for zeros.
std::int64_t pack(const PackPlan& plan, py::handle dst, const py::list& srcs, double factor) {
  const auto others = static_cast<std::int64_t>(plan.size());
  TensorView flat;
  if (srcs.size() != plan.size() || !is_usable(factor, plan.type())) return others;
  if (!read_tensor(dst.ptr(), plan.type(), &flat) || flat.count < plan.extent()) return others;
  std::vector<const void*> pointers(plan.size(), nullptr);
  for (std::size_t i = 0; i < plan.size(); ++i) {
    PyObject* object = PyList_GET_ITEM(srcs.ptr(), static_cast<Py_ssize_t>(i));
    if (object == Py_None) continue;
    TensorView src;
    if (!read_tensor(object, plan.type(), &src) || src.count != plan.count(i)) return static_cast<std::int64_t>(i);
    pointers[i] = src.data;
  }
  const py::gil_scoped_release released;
  const std::size_t overlap = plan.find_overlap(flat.data, pointers.data());
  if (overlap != plan.size()) return static_cast<std::int64_t>(overlap);
  plan.pack(flat.data, pointers.data(), factor);
  return -1;
}

// Returns whether every tensor is its slot of `dst`. Tensors without elements always match.
bool are_in_place(const PackPlan& plan, py::handle dst, const py::list& tensors) {
  TensorView flat;
  if (tensors.size() != plan.size() || !read_tensor(dst.ptr(), plan.type(), &flat) || flat.count < plan.extent()) {
    return false;
  }
  for (std::size_t i = 0; i < plan.size(); ++i) {
    TensorView view;
    PyObject* object = PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i));
    if (!read_tensor(object, plan.type(), &view) || view.count != plan.count(i)) return false;
    if (view.count != 0 && view.data != plan.place(flat.data, i)) return false;
  }
  return true;
}

// Copies the bytes of the tensors, one after another, into `flat` or out of it. If a tensor is not contiguous or not on
// the CPU, or `flat` is too small, writes nothing and returns false.
bool copy_bytes(py::handle flat, const py::list& tensors, bool gathers) {
  ByteView all;
  if (!read_bytes(flat.ptr(), &all)) return false;
  std::vector<ByteView> parts(tensors.size());
  std::size_t nbytes = 0;
  for (std::size_t i = 0; i < parts.size(); ++i) {
    if (!read_bytes(PyList_GET_ITEM(tensors.ptr(), static_cast<Py_ssize_t>(i)), &parts[i])) return false;
    nbytes += parts[i].nbytes;
  }
  if (nbytes > all.nbytes) return false;
  const py::gil_scoped_release released;
  char* place = static_cast<char*>(all.data);
  for (const ByteView& part : parts) {
    if (part.nbytes == 0) continue;
    std::memmove(gathers ? place : part.data, gathers ? part.data : place, part.nbytes);
    place += part.nbytes;
  }
  return true;
}

}  // namespace
}  // namespace commlib

PYBIND11_MODULE(_native, module) {
  module.doc() =
      "The compiled kernels of commlib. Use them through commlib.kernels.native, which checks its arguments.";
  module.def("supported_isas", &commlib::supported_isas);
  module.def("isa", [] { return std::string(commlib::active_kernels().name); });
  module.def("select_isa", &commlib::select_isa, py::arg("name"));
  module.def(
      "bind_tensor_type",
      [](py::handle tensor_type, py::handle exchange_capsule, py::handle is_neg) {
        commlib::bind_tensor_type(tensor_type.ptr(), exchange_capsule.ptr(), is_neg.ptr());
      },
      py::arg("tensor_type"), py::arg("exchange_capsule"), py::arg("is_neg"));
  module.def("copy_bytes", &commlib::copy_bytes, py::arg("flat"), py::arg("tensors"), py::arg("gathers"));
  commlib::bind_codecs(module);
  py::class_<commlib::PackPlan>(module, "PackPlan")
      .def(py::init(&commlib::make_plan), py::arg("offsets"), py::arg("counts"), py::arg("type"))
      .def_property_readonly("extent", &commlib::PackPlan::extent)
      .def("are_in_place", &commlib::are_in_place, py::arg("dst"), py::arg("tensors"))
      .def("pack", &commlib::pack, py::arg("dst"), py::arg("srcs"), py::arg("factor"));
  py::class_<commlib::Heartbeat>(module, "Heartbeat")
      .def(py::init<int, double>(), py::arg("fd"), py::arg("interval_s"))
      .def(
          "send",
          [](commlib::Heartbeat& heartbeat, const py::bytes& data, double timeout_s) {
            char* bytes = nullptr;
            Py_ssize_t size = 0;
            PyBytes_AsStringAndSize(data.ptr(), &bytes, &size);
            const py::gil_scoped_release released;
            return heartbeat.send(bytes, static_cast<std::size_t>(size), timeout_s);
          },
          py::arg("data"), py::arg("timeout_s"))
      .def("close", &commlib::Heartbeat::close, py::call_guard<py::gil_scoped_release>());
}
