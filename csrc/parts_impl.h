// Building blocks of the codecs in codec_impl.h, which includes this file: maxima and ranges, scales, and conversions
// between numbers and the bytes of codes.

#include "vector_impl.h"

static inline Bits32 largest_magnitude(const float* v, std::size_t m) {
  Bits32 largest = 0;
  for (std::size_t i = 0; i < m; ++i) {
    const Bits32 bits = to_bits(v[i]) & kMagnitude;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// An integer that orders like the float: NaN is beyond infinity on both sides, and -0 below +0.
static inline std::int32_t ordered(float x) {
  const auto bits = static_cast<std::int32_t>(to_bits(x));
  return bits ^ ((bits >> 31) & 0x7FFFFFFF);
}

static inline float from_ordered(std::int32_t key) {
  return from_bits(static_cast<Bits32>(key ^ ((key >> 31) & 0x7FFFFFFF)));
}

static inline void find_range(const float* v, std::size_t m, std::int32_t range[2]) {
  std::int32_t low = range[0], high = range[1];
  for (std::size_t i = 0; i < m; ++i) {
    const std::int32_t key = ordered(v[i]);
    low = key < low ? key : low;
    high = key > high ? key : high;
  }
  range[0] = low;
  range[1] = high;
}

#if defined(COMMLIB_WITH_AVX512)
// The same for values in registers.
static inline Bits32 largest_magnitude(const Lanes (&v)[kRegisters]) {
  const __m512i magnitude = _mm512_set1_epi32(kMagnitude);
  __m512i largest[2] = {_mm512_set1_epi32(0), _mm512_set1_epi32(0)};
  for (std::size_t k = 0; k < kRegisters; ++k) {
    largest[k % 2] = _mm512_max_epi32(largest[k % 2], _mm512_and_si512(_mm512_castps_si512(v[k]), magnitude));
  }
  return static_cast<Bits32>(_mm512_reduce_max_epi32(_mm512_max_epi32(largest[0], largest[1])));
}

static inline void find_range(const Lanes (&v)[kRegisters], std::int32_t range[2]) {
  const __m512i magnitude = _mm512_set1_epi32(kMagnitude);
  __m512i low = _mm512_set1_epi32(range[0]), high = _mm512_set1_epi32(range[1]);
  for (std::size_t k = 0; k < kRegisters; ++k) {
    const __m512i bits = _mm512_castps_si512(v[k]);
    const __m512i key = _mm512_xor_si512(bits, _mm512_and_si512(_mm512_srai_epi32(bits, 31), magnitude));
    low = _mm512_min_epi32(low, key);
    high = _mm512_max_epi32(high, key);
  }
  range[0] = _mm512_reduce_min_epi32(low);
  range[1] = _mm512_reduce_max_epi32(high);
}
#endif

static inline Bits32 magnitude_of_range(const std::int32_t range[2]) {
  const Bits32 low = to_bits(from_ordered(range[0])) & kMagnitude, high = to_bits(from_ordered(range[1])) & kMagnitude;
  return low > high ? low : high;
}

static inline void store_scale(Byte* at, Bits16 bits) {
  std::memcpy(at, &bits, sizeof bits);
}

static inline float load_scale(const Byte* at) {
  Bits16 bits;
  std::memcpy(&bits, at, sizeof bits);
  return bf16_value(bits);
}

static inline float load_float(const Byte* at) {
  float x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

static inline bool is_finite_number(float x) {
  return (to_bits(x) & kMagnitude) < kInfinityBits;
}

// out[i] = value(i), or += with kAdds. If no NaN can occur (`is_plain`), values need not be made canonical.
template <bool kAdds, class Value>
static inline void put_values(std::size_t m, float* out, bool is_plain, const Value& value) {
  if constexpr (kAdds) {
    for (std::size_t i = 0; i < m; ++i) out[i] += value(i);
  } else if (is_plain) {
    for (std::size_t i = 0; i < m; ++i) out[i] = value(i);
  } else {
    for (std::size_t i = 0; i < m; ++i) out[i] = canonical(value(i));
  }
}

// Encodes a block whose scale is 0 (no values) or NaN (non-finite values). Returns whether the value is not NaN.
template <bool kDecodes>
static inline bool fill_block(float value, std::size_t m, std::size_t code_bytes, Byte* codes, float* decoded) {
  std::memset(codes, 0, code_bytes);
  if constexpr (kDecodes) {
    for (std::size_t i = 0; i < m; ++i) decoded[i] = value;
  }
  return value == value;
}

// --- from and to the bytes of the codes ------------------------------------------------------------------------------

// `codes` holds one code per number, with room for a byte's codes past the end of a short block. With fewer than 8
// bits, 8 / kBits runs of the block share bytes.
template <int kBits>
static inline void store_codes(Bits32* codes, std::size_t m, Byte* to) {
  if constexpr (kBits == 8) {
    narrow(codes, m, to);
  } else {
    constexpr std::size_t kPerByte = 8 / kBits;
    const std::size_t stride = (m + kPerByte - 1) / kPerByte;
    for (std::size_t i = m; i < kPerByte * stride; ++i) codes[i] = 0;
    for (std::size_t k = 1; k < kPerByte; ++k) {
      for (std::size_t j = 0; j < stride; ++j) codes[j] |= codes[k * stride + j] << (k * kBits);
    }
    narrow(codes, stride, to);
  }
}

// put_values of the value of each code.
template <int kBits, std::size_t kBlock, bool kAdds, class Value>
static inline void put_codes(const Byte* codes, std::size_t m, float* out, bool is_plain, const Value& value) {
  alignas(64) Bits32 wide[kBits == 8 ? kBlock : kBlock * kBits / 8];
  const Bits32* const from = wide;
  if constexpr (kBits == 8) {
    widen(codes, m, wide);
    put_values<kAdds>(m, out, is_plain, [=](std::size_t i) { return value(static_cast<int>(from[i])); });
  } else {
    constexpr std::size_t kPerByte = 8 / kBits;
    constexpr Bits32 kMask = (1u << kBits) - 1;
    const std::size_t stride = (m + kPerByte - 1) / kPerByte;
    widen(codes, stride, wide);
    for (std::size_t k = 0; k < kPerByte && k * stride < m; ++k) {
      const std::size_t run = m - k * stride < stride ? m - k * stride : stride;
      put_values<kAdds>(run, out + k * stride, is_plain,
                        [=](std::size_t j) { return value(static_cast<int>(from[j] >> (k * kBits) & kMask)); });
    }
  }
}

// Computes the codes of v * factor and, with kDecodes, their decoded values times `back`.
template <class Format, int kBits, std::size_t kBlock, bool kDecodes>
static inline void round_all(const float* v, std::size_t m, float factor, float back, Byte* to, float* decoded) {
  alignas(64) Bits32 codes[kBlock + 8];
  for (std::size_t i = 0; i < m; ++i) {
    const SmallRounding rounded = round_to_small_float<Format>(v[i] * factor);
    codes[i] = static_cast<Bits32>(rounded.code);
    if constexpr (kDecodes) decoded[i] = rounded.value * back;
  }
  store_codes<kBits>(codes, m, to);
}
