// NEON is part of every AArch64, so no target region is needed here; the name is what the other files share.
#include "kernel_includes.h"

namespace commlib {

#if defined(COMMLIB_ARM64)
namespace neon {
#include "convert_impl.h"
}  // namespace neon

const Kernels* neon_kernels() {
  static const Kernels kernels = neon::make_kernels("neon");
  return &kernels;
}
#else
const Kernels* neon_kernels() {
  return nullptr;
}
#endif

}  // namespace commlib
