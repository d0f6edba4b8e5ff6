// The kernels for the compiler's base instruction set: any machine of the architecture runs them.
#include "kernel_includes.h"

namespace commlib {
namespace scalar {
#include "convert_impl.h"
}  // namespace scalar

const Kernels* scalar_kernels() {
  static const Kernels kernels = scalar::make_kernels("scalar");
  return &kernels;
}

}  // namespace commlib
