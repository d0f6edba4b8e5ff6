// Everything that convert_impl.h and codec_impl.h need, included by each kernels_<isa>.cpp before it selects its
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "codec.h"
#include "kernels.h"
#include "sparse.h"

// Asserts that no iteration of the next loop reads values that another one writes (in and out may be the same address).
#if defined(__clang__)
#define COMMLIB_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define COMMLIB_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

// For functions called once per tile: a call with its saved registers would take a tenth of the time of a tile.
#define COMMLIB_INLINE __attribute__((always_inline)) static inline

#if defined(__x86_64__)
#include <immintrin.h>
#define COMMLIB_X86 1
#elif defined(__aarch64__)
#define COMMLIB_ARM64 1
#endif
