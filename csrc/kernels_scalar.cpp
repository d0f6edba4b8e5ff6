// The kernels for the compiler's base instruction set, which any machine of the architecture supports.
#include "kernel_includes.h"

namespace commlib {
namespace scalar {
// clang-format off: the order matters
#include "codec_math.h"
#include "convert_impl.h"
#include "codec_impl.h"
#include "sparse_impl.h"
// clang-format on
}  // namespace scalar

const Kernels* scalar_kernels() {
  static const CodecKernels codecs = scalar::make_codec_kernels();
  static const SparseKernels sparse = scalar::make_sparse_kernels();
  static const Kernels kernels = scalar::make_kernels("scalar", &codecs, &sparse);
  return &kernels;
}

}  // namespace commlib
