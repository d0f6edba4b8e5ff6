#include "kernel_includes.h"

// The region runs to the end of the file: templates are instantiated there.
#if defined(COMMLIB_X86) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#elif defined(COMMLIB_X86)
#pragma GCC target("avx2")
#endif

namespace commlib {

#if defined(COMMLIB_X86)
namespace avx2 {
#include "convert_impl.h"
}  // namespace avx2

const Kernels* avx2_kernels() {
  static const Kernels kernels = avx2::make_kernels("avx2");
  return &kernels;
}
#else
const Kernels* avx2_kernels() {
  return nullptr;
}
#endif

}  // namespace commlib

#if defined(COMMLIB_X86) && defined(__clang__)
#pragma clang attribute pop
#endif
