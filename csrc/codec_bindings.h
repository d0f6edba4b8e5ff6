// Python bindings of the block codecs.
#pragma once

#include <pybind11/pybind11.h>

namespace commlib {

void bind_codecs(pybind11::module_& module);

}  // namespace commlib
