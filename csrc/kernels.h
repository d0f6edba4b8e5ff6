// The table of kernels that every instruction set provides, and its selection at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace commlib {

// The numbers are used by the Python side (commlib/kernels/native.py).
enum class DType : int { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kFloat64 = 3 };
inline constexpr int kNumDTypes = 4;

inline constexpr std::size_t element_bytes(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

// Whether two ranges of memory share a byte.
inline bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto first = reinterpret_cast<std::uintptr_t>(a), second = reinterpret_cast<std::uintptr_t>(b);
  return first < second + b_bytes && second < first + a_bytes;
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

// Whether prefetches target the first-level cache; otherwise they target the second-level cache. Determined at load
// time, because processors differ. On AMD Zen 5, second-level prefetches made encoding with feedback take up to 1.5
// times as long; on Zen 4, first-level prefetches made it and sums take up to twice as long.
extern const bool kPrefetchesToFirstCache;

// Each is defined in a file of its own; null if the compiler's target does not have the instruction set.
const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

// Names of the instruction sets that this machine supports, the best first.
std::vector<std::string> supported_isas();

// The active table: the best one, unless `select_isa` selected another.
const Kernels& active_kernels();

// Throws std::invalid_argument if this machine does not support `name`.
void select_isa(const std::string& name);

}  // namespace commlib
