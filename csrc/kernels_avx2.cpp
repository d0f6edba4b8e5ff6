#include "kernel_includes.h"

#if defined(COMMLIB_X86)
#define COMMLIB_WITH_AVX2  // codec and sparse loops may use its intrinsics
#endif

// The region extends to the end of the file, because templates are instantiated there.
#if defined(COMMLIB_X86) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#elif defined(COMMLIB_X86)
#pragma GCC target("avx2,fma")
#endif

namespace commlib {

#if defined(COMMLIB_X86)
namespace avx2 {
// clang-format off: the order matters
#include "codec_math.h"
#include "convert_impl.h"
#include "codec_impl.h"
#include "sparse_impl.h"
// clang-format on
}  // namespace avx2

const Kernels* avx2_kernels() {
  static const CodecKernels codecs = avx2::make_codec_kernels();
  static const SparseKernels sparse = avx2::make_sparse_kernels();
  static const Kernels kernels = avx2::make_kernels("avx2", &codecs, &sparse);
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
