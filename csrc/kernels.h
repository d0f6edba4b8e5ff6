// The table of kernels that every instruction set provides, and the choice between them at run time.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

namespace commlib {

// The numbers are part of the Python crossing (commlib/kernels/native.py).
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };
inline constexpr int kNumDTypes = 4;

inline constexpr std::size_t element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Writes `count` elements to `dst`: each element of `src` times `factor`. `dst` and `src` are the same address or do
// not overlap.
using ScaleFn = void (*)(void* dst, const void* src, std::size_t count, double factor);

struct CodecKernels;   // codec.h
struct SparseKernels;  // sparse.h

struct Kernels {
  const char* name;
  ScaleFn scale[kNumDTypes];
  const CodecKernels* codecs;
  const SparseKernels* sparse;
};

// Whether requests for memory that is read soon are for the first cache; else they are for the second. Found out here,
// as processors differ: on AMD Zen 5 those for the second made encoding with feedback take up to 1.5 times as long as
// those for the first, on Zen 4 those for the first up to twice as long, and so sums.
extern const bool kPrefetchesToFirstCache;

// Each in a file of its own; null where the compiler's target has no such instruction set.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

// Names of the instruction sets that this machine runs, the best first.
std::vector<std::string> supported_isas();

// The table in use: the best one, until `select_isa` says otherwise.
const Kernels& active_kernels();

// Throws std::invalid_argument if this machine does not run `name`.
void select_isa(const std::string& name);

}  // namespace commlib
