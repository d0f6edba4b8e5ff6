#include "kernel_includes.h"

// The region runs to the end of the file: templates are instantiated there.
#if defined(COMMLIB_X86) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2"))), apply_to = function)
#elif defined(COMMLIB_X86)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2")
#endif

namespace commlib {

#if defined(COMMLIB_X86)
namespace avx512 {
#include "convert_impl.h"
}  // namespace avx512

const Kernels* avx512_kernels() {
  static const Kernels kernels = avx512::make_kernels("avx512");
  return &kernels;
}
#else
const Kernels* avx512_kernels() {
  return nullptr;
}
#endif

}  // namespace commlib

#if defined(COMMLIB_X86) && defined(__clang__)
#pragma clang attribute pop
#endif
