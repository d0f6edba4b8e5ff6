// Common device code: vector accesses, tensor dtypes, warps, and random numbers.
//
// NVRTC compiles these files without any header but codec_math.h; tests/cuda_emulation compiles them for the CPU.
#pragma once

#include "codec_math.h"

#define COMMLIB_DEVICE static __device__ __forceinline__

using Size = unsigned long long;

constexpr int kWarp = 32;
constexpr int kWarpsPerBlock = 8;  // of threads; equal to the constant in commlib/kernels/cuda_args.py
constexpr int kThreads = kWarp * kWarpsPerBlock;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

COMMLIB_DEVICE bool is_aligned(const void* address, Size nbytes) {
  return reinterpret_cast<Size>(address) % nbytes == 0;
}

COMMLIB_DEVICE bool is_finite(float x) {
  return (to_bits(x) & kMagnitude) < kInfinityBits;
}

// Stores of 16 and 8 bytes to device memory. In inline assembly, because the compiler splits a float4 store if the
// other branch stores its elements one by one.
#if defined(__CUDACC__)
COMMLIB_DEVICE void store_vector(float* to, float a, float b, float c, float d) {
  const Size address = __cvta_generic_to_global(to);
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(a), "f"(b), "f"(c), "f"(d) : "memory");
}
COMMLIB_DEVICE void store_vector(double* to, double a, double b) {
  const Size address = __cvta_generic_to_global(to);
  asm volatile("st.global.v2.f64 [%0], {%1, %2};" ::"l"(address), "d"(a), "d"(b) : "memory");
}
COMMLIB_DEVICE void store_vector(void* to, Bits32 a, Bits32 b) {
  const Size address = __cvta_generic_to_global(to);
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(a), "r"(b) : "memory");
}
#else
COMMLIB_DEVICE void store_vector(float* to, float a, float b, float c, float d) {
  *reinterpret_cast<float4*>(to) = make_float4(a, b, c, d);
}
COMMLIB_DEVICE void store_vector(double* to, double a, double b) {
  *reinterpret_cast<double2*>(to) = make_double2(a, b);
}
COMMLIB_DEVICE void store_vector(void* to, Bits32 a, Bits32 b) {
  *reinterpret_cast<uint2*>(to) = make_uint2(a, b);
}
#endif

// --- types of tensors: one element, or four neighbors at once if their address is a multiple of kVectorBytes ---------

struct Float32 {
  using Storage = float;
  static constexpr Size kVectorBytes = 16;
  COMMLIB_DEVICE float load(float x) { return x; }
  COMMLIB_DEVICE float store(float x) { return canonical(x); }
  COMMLIB_DEVICE void load4(const float* from, float* v) {
    const float4 x = *reinterpret_cast<const float4*>(from);
    v[0] = x.x, v[1] = x.y, v[2] = x.z, v[3] = x.w;
  }
  COMMLIB_DEVICE void store4(float* to, const float* v) {
    store_vector(to, store(v[0]), store(v[1]), store(v[2]), store(v[3]));
  }
};

struct Float64 {
  using Storage = double;
  static constexpr Size kVectorBytes = 16;
  COMMLIB_DEVICE float load(double x) { return static_cast<float>(x); }
  COMMLIB_DEVICE double store(float x) {
    // A cast may keep or change the bits of a NaN: write them.
    return x == x ? static_cast<double>(x) : __longlong_as_double(0x7FF8000000000000ll);
  }
  COMMLIB_DEVICE void load4(const double* from, float* v) {
    const double2 a = *reinterpret_cast<const double2*>(from), b = *reinterpret_cast<const double2*>(from + 2);
    v[0] = load(a.x), v[1] = load(a.y), v[2] = load(b.x), v[3] = load(b.y);
  }
  COMMLIB_DEVICE void store4(double* to, const float* v) {
    store_vector(to, store(v[0]), store(v[1]));
    store_vector(to + 2, store(v[2]), store(v[3]));
  }
};

// Four 16-bit floats in 8 bytes; `Half` converts one.
template <class Half>
struct Vector16 {
  using Storage = Bits16;
  static constexpr Size kVectorBytes = 8;
  COMMLIB_DEVICE void load4(const Bits16* from, float* v) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    v[0] = Half::load(static_cast<Bits16>(x.x)), v[1] = Half::load(static_cast<Bits16>(x.x >> 16));
    v[2] = Half::load(static_cast<Bits16>(x.y)), v[3] = Half::load(static_cast<Bits16>(x.y >> 16));
  }
  COMMLIB_DEVICE void store4(Bits16* to, const float* v) {
    const Bits32 low = Half::store(v[0]) | static_cast<Bits32>(Half::store(v[1])) << 16;
    const Bits32 high = Half::store(v[2]) | static_cast<Bits32>(Half::store(v[3])) << 16;
    store_vector(to, low, high);
  }
};

struct BFloat16 : Vector16<BFloat16> {
  COMMLIB_DEVICE float load(Bits16 x) { return bf16_value(x); }
  COMMLIB_DEVICE Bits16 store(float x) { return bf16_nearest(x); }
};

struct Float16 : Vector16<Float16> {
#if defined(__CUDACC__)
  COMMLIB_DEVICE float load(Bits16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
  }
  COMMLIB_DEVICE Bits16 store(float x) {
    Bits16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
    return x == x ? y : static_cast<Bits16>(0x7E00u);
  }
#else
  COMMLIB_DEVICE float load(Bits16 x) {
    _Float16 y;
    __builtin_memcpy(&y, &x, sizeof y);
    return static_cast<float>(y);
  }
  COMMLIB_DEVICE Bits16 store(float x) {
    const auto y = static_cast<_Float16>(x);
    Bits16 bits;
    __builtin_memcpy(&bits, &y, sizeof bits);
    return x == x ? bits : static_cast<Bits16>(0x7E00u);
  }
#endif
};

// --- warps -----------------------------------------------------------------------------------------------------------

// sm_80 has an instruction that replaces the five shuffles of earlier architectures.
#if (defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800) || defined(COMMLIB_EMULATE_REDUX)
#define COMMLIB_HAS_REDUX 1
#else
#define COMMLIB_HAS_REDUX 0
#endif

// Maximum over each run of kLanes lanes. All lanes of the warp must call it.
template <int kLanes>
COMMLIB_DEVICE Bits32 largest_of_lanes(Bits32 x) {
#if COMMLIB_HAS_REDUX
  if constexpr (kLanes == kWarp) {
    return __reduce_max_sync(kAllLanes, x);
  } else
#endif
  {
#pragma unroll
    for (int distance = kLanes / 2; distance > 0; distance /= 2) {
      const Bits32 other = __shfl_xor_sync(kAllLanes, x, distance);
      x = other > x ? other : x;
    }
    return x;
  }
}

// Flips the sign bit so that signed integers are ordered like unsigned ones.
COMMLIB_DEVICE int largest_of_warp(int x) {
  return static_cast<int>(largest_of_lanes<kWarp>(static_cast<Bits32>(x) ^ 0x80000000u) ^ 0x80000000u);
}

// An integer that orders like the float: NaN is beyond infinity on both sides, and -0 below +0.
COMMLIB_DEVICE int ordered(float x) {
  const int bits = static_cast<int>(to_bits(x));
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

COMMLIB_DEVICE float from_ordered(int key) {
  return from_bits(static_cast<Bits32>(key ^ ((key >> 31) & 0x7FFFFFFF)));
}

// --- random numbers --------------------------------------------------------------------------------------------------

// A range of a tensor whose elements have consecutive global offsets.
struct Segment {
  Size start;   // first element in the tensor
  Size offset;  // global offset of that element
};

struct Random {
  const Segment* segments;  // ascending, the first starts at 0; null for a single segment
  Size num_segments;
  Size offset;  // of element 0
  Bits32 key[2];
  Bits32 step;
  Bits32 stage_and_rank;
};

COMMLIB_DEVICE Words random_words(const Random& random, Size counter) {
  return philox(static_cast<Bits32>(counter), static_cast<Bits32>(counter >> 32), random.step, random.stage_and_rank,
                random.key[0], random.key[1]);
}

// Calls fill(global offset, count, done) for each run of the tensor's elements `start` to `start + m` with consecutive
// global offsets; `done` is the number of elements before it. Uniform over the lanes of a warp.
template <class Fill>
COMMLIB_DEVICE void for_segments(const Random& random, Size start, int m, const Fill& fill) {
  if (random.num_segments <= 1) return fill(random.offset + start, m, 0);
  Size low = 0, high = random.num_segments;  // the last segment that starts at or before `start`
  while (high - low > 1) {
    const Size middle = (low + high) / 2;
    if (random.segments[middle].start <= start) {
      low = middle;
    } else {
      high = middle;
    }
  }
  for (int done = 0; done < m; ++low) {
    const Segment segment = random.segments[low];
    const Size end = low + 1 < random.num_segments ? random.segments[low + 1].start : ~Size{0};
    const Size at = start + static_cast<Size>(done), left = static_cast<Size>(m - done);
    const int count = static_cast<int>(end - at < left ? end - at : left);
    fill(segment.offset + (at - segment.start), count, done);
    done += count;
  }
}
