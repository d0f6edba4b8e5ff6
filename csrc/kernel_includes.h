// Everything that convert_impl.h and codec_impl.h need, included by each kernels_<isa>.cpp before it names its
// instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "codec.h"
#include "kernels.h"
#include "sparse.h"

// Says that no iteration of the next loop reads what another one writes (in and out may be the same address).
#if defined(__clang__)
#define COMMLIB_INDEPENDENT_ITERATIONS _Pragma("clang loop vectorize(assume_safety)")
#else
#define COMMLIB_INDEPENDENT_ITERATIONS _Pragma("GCC ivdep")
#endif

// What is done once for each tile: a call and what it saves and restores would take a tenth of the time of a tile.
#define COMMLIB_INLINE __attribute__((always_inline)) static inline

#if defined(__x86_64__)
#include <immintrin.h>
#define COMMLIB_X86 1
#elif defined(__aarch64__)
#define COMMLIB_ARM64 1
#endif
