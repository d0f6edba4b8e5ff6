#include "kernel_includes.h"

#if defined(COMMLIB_X86)
#define COMMLIB_WITH_AVX512  // codec and sparse loops may use its intrinsics
#endif

// The region extends to the end of the file, because templates are instantiated there.
#if defined(COMMLIB_X86) && defined(COMMLIB_EMULATED_AVX512)  // scripts/emulate_avx512, by GCC
#include COMMLIB_EMULATED_AVX512
#pragma GCC target("avx2")
#elif defined(COMMLIB_X86) && defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2"))), apply_to = function)
#elif defined(COMMLIB_X86)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2")
#endif

namespace commlib {

#if defined(COMMLIB_X86)
namespace avx512 {
// clang-format off: the order matters
#include "codec_math.h"
#include "convert_impl.h"
#include "codec_impl.h"
#include "sparse_impl.h"
// clang-format on
}  // namespace avx512

const Kernels* avx512_kernels() {
  static const CodecKernels codecs = avx512::make_codec_kernels();
  static const SparseKernels sparse = avx512::make_sparse_kernels();
  static const Kernels kernels = avx512::make_kernels("avx512", &codecs, &sparse);
  return &kernels;
}
#else
const Kernels* avx512_kernels() {
  return nullptr;
}
#endif

}  // namespace commlib

#if defined(COMMLIB_X86) && defined(__clang__) && !defined(COMMLIB_EMULATED_AVX512)
#pragma clang attribute pop
#endif
