// The Python face of the kernels, for commlib/kernels/native.py alone: it checks every tensor whose address it hands
// over. All kernels run without the GIL.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>

#include "codec_bindings.h"
#include "pack.h"
#include "tensor_view.h"

namespace py = pybind11;

namespace commlib {
namespace {

void* to_pointer(std::uintptr_t address) {
  return reinterpret_cast<void*>(address);
}

PackPlan make_plan(const std::vector<std::size_t>& offsets, const std::vector<std::size_t>& counts, int type) {
  std::vector<Slot> slots;
  slots.reserve(counts.size());
  for (std::size_t i = 0; i < counts.size(); ++i) slots.push_back({offsets.at(i), counts[i]});
  return PackPlan(std::move(slots), static_cast<DType>(type));
}

// Returns -1, or the index of the first source that is not what the plan needs: nothing was written then. `None` stands
// for zeros.
std::int64_t pack(const PackPlan& plan, std::uintptr_t dst, const py::list& srcs, double factor) {
  if (srcs.size() != plan.size()) throw std::invalid_argument("the number of sources is not the plan's");
  std::vector<const void*> pointers(plan.size(), nullptr);
  for (std::size_t i = 0; i < plan.size(); ++i) {
    PyObject* src = PyList_GET_ITEM(srcs.ptr(), static_cast<Py_ssize_t>(i));
    if (src != Py_None && !read_tensor(src, plan.type(), plan.count(i), &pointers[i])) {
      return static_cast<std::int64_t>(i);
    }
  }
  const py::gil_scoped_release released;
  const std::size_t overlap = plan.find_overlap(to_pointer(dst), pointers.data());
  if (overlap != plan.size()) return static_cast<std::int64_t>(overlap);
  plan.pack(to_pointer(dst), pointers.data(), factor);
  return -1;
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
  commlib::bind_codecs(module);
  py::class_<commlib::PackPlan>(module, "PackPlan")
      .def(py::init(&commlib::make_plan), py::arg("offsets"), py::arg("counts"), py::arg("type"))
      .def_property_readonly("extent", &commlib::PackPlan::extent)
      .def("pack", &commlib::pack, py::arg("dst"), py::arg("srcs"), py::arg("factor"));
}
