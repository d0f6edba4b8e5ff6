// NEON is part of every AArch64, so no target region is needed here. The name is shared with the other files.
#include "kernel_includes.h"

namespace commlib {

#if defined(COMMLIB_ARM64)
namespace neon {
// clang-format off: the order matters
#include "codec_math.h"
#include "convert_impl.h"
#include "codec_impl.h"
#include "sparse_impl.h"
// clang-format on
}  // namespace neon

const Kernels* neon_kernels() {
  static const CodecKernels codecs = neon::make_codec_kernels();
  static const SparseKernels sparse = neon::make_sparse_kernels();
  static const Kernels kernels = neon::make_kernels("neon", &codecs, &sparse);
  return &kernels;
}
#else
const Kernels* neon_kernels() {
  return nullptr;
}
#endif

}  // namespace commlib
