// The block loops of the codecs, written once. Each kernels_<isa>.cpp includes this file inside its own namespace,
// after codec_math.h and convert_impl.h (whose notes on includes apply here too).
//
// A codec is a struct with the constants of its shape, and
//     encode<kDecodes>(values, m, u, minima, scale, codes, decoded)
//         encodes one block; u is null for rounding to nearest. With kDecodes, writes the decoded values to `decoded`,
//         which is cheaper while the codes are still in registers. Returns whether all of them are known to be finite.
//     decode<kAdds>(codes, scale, minima, m, out)
//         with kAdds, adds to `out`; NaN results may have any sign and payload.
//     Reader(codes, scale, minima)(i), optional, for codecs that use lanes
//         returns the kLanes values of a whole block from i on; NaN may have any sign and payload. `added_to` adds them
//         to a sum, faster, but only if has_exact_products(s). Sums and decode-add then stay in registers.
//     encode_lanes(values, minima, scale, codes), optional with a Reader, if registers hold a whole block
//         encodes that block, rounded to nearest.
// where m is the number of elements. Everything else (casts, error feedback, sums) is built from encode and decode,
// block by block, in the first-level cache.

#include "parts_impl.h"

struct SignedByteReader {
  const Byte* codes;
  float s;
  SignedByteReader(const Byte* at, const Byte* scale, const Byte*) : codes(at), s(load_scale(scale)) {}
  inline Lanes operator()(std::size_t i) const { return lanes_of_signed_bytes(codes + i) * s; }
  inline Lanes added_to(Lanes sum, std::size_t i) const {
    return add_product(sum, lanes_of_signed_bytes(codes + i), s);
  }
};

template <int kCodeBits, int kLevels, std::size_t kBlockSize>
struct Integer {
  static constexpr std::size_t kBlock = kBlockSize, kBits = kCodeBits, kScaleBytes = 2, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;
  static constexpr Bits32 kZero = kCodeBits == 8 ? 0 : 1 << (kCodeBits - 1);
  using Reader = std::conditional_t<kCodeBits == 8, SignedByteReader, void>;

  static inline Bits16 scale_of(Bits32 largest) {
    if (largest < kTinyBits) return 0;
    return largest >= kWidestRangeBits ? kNanScale : bf16_up(from_bits(largest) / static_cast<float>(kLevels));
  }

  // Every element then has the value of the scale, 0 or NaN, and every code is 0.
  static inline bool has_one_value(Bits16 scale) { return scale == 0 || scale == kNanScale; }

#if defined(COMMLIB_WITH_AVX512)
  static inline void encode_lanes(const Lanes (&v)[kRegisters], Byte*, Byte* scale, Byte* codes) {
    const Bits16 bits = scale_of(largest_magnitude(v));
    store_scale(scale, bits);
    if (has_one_value(bits)) {
      std::memset(codes, 0, kBlock);
      return;
    }
    const float inverse = 1.0f / bf16_value(bits);
    for (std::size_t k = 0; k < kRegisters; ++k) store_lowest_bytes(codes + k * kLanes, v[k] * inverse + kRounder);
  }
#endif

  template <bool kDecodes>
  static inline bool encode(const float* v, std::size_t m, const float* u, Byte*, Byte* scale, Byte* codes,
                            float* decoded) {
    const Bits16 bits = scale_of(largest_magnitude(v, m));
    store_scale(scale, bits);
    const float s = bf16_value(bits);
    if (has_one_value(bits)) return fill_block<kDecodes>(s, m, (m * kBits + 7) / 8, codes, decoded);
    const float inverse = 1.0f / s;
    if (kCodeBits == 8 && u == nullptr) {  // simple enough to be vectorized well from floats to bytes
      for (std::size_t i = 0; i < m; ++i) {
        const float sum = v[i] * inverse + kRounder;
        codes[i] = static_cast<Byte>(to_bits(sum));  // the lowest byte of kRounderBits is 0
        if constexpr (kDecodes) decoded[i] = (sum - kRounder) * s;
      }
      return true;
    }
    alignas(64) Bits32 wide[kBlock + 8];
    if (u == nullptr) {  // |v * inverse| exceeds kLevels only by rounding errors: no clamping needed
      for (std::size_t i = 0; i < m; ++i) {
        const float sum = v[i] * inverse + kRounder;
        wide[i] = to_bits(sum) - kRounderBits + kZero;
        if constexpr (kDecodes) decoded[i] = (sum - kRounder) * s;
      }
    } else {
      for (std::size_t i = 0; i < m; ++i) {
        const int q = clamp(floor_to_int(v[i] * inverse + u[i]), -kLevels, kLevels);
        wide[i] = static_cast<Bits32>(q) + kZero;
        if constexpr (kDecodes) decoded[i] = static_cast<float>(q) * s;
      }
    }
    store_codes<kCodeBits>(wide, m, codes);
    return true;
  }

  template <bool kAdds>
  static inline void decode(const Byte* codes, const Byte* scale, const Byte*, std::size_t m, float* out) {
    const float s = load_scale(scale);
    const bool is_plain = is_finite_number(s);
    if constexpr (kCodeBits == 8) {
      put_values<kAdds>(m, out, is_plain,
                        [=](std::size_t i) { return static_cast<float>(static_cast<std::int8_t>(codes[i])) * s; });
    } else {
      put_codes<kCodeBits, kBlock, kAdds>(codes, m, out, is_plain,
                                          [=](int q) { return static_cast<float>(q - static_cast<int>(kZero)) * s; });
    }
  }
};

struct MinMax {
  static constexpr std::size_t kBlock = 256, kBits = 8, kScaleBytes = 2, kMinimumBytes = 4;
  static constexpr bool kIsOneBlock = false;

  struct Parameters {
    float minimum = 0.0f, inverse = 0.0f;  // without an inverse, every element is `minimum`, which may be NaN
    Bits16 scale = 0;

    explicit Parameters(const std::int32_t range[2]) {
      const Bits32 largest = magnitude_of_range(range);
      const float spread = from_ordered(range[1]) - from_ordered(range[0]);
      if (largest >= kWidestRangeBits || spread > from_bits(kWidestRangeBits)) {
        minimum = from_bits(kQuietNanBits);
        scale = kNanScale;
      } else if (largest >= kTinyBits) {
        minimum = from_ordered(range[0]) + 0.0f;
        if (spread < from_bits(kTinyBits)) return;
        scale = bf16_up(spread / 255.0f);
        inverse = 1.0f / bf16_value(scale);
      }
    }

    void store(Byte* minima, Byte* to) const {
      std::memcpy(minima, &minimum, sizeof minimum);
      store_scale(to, scale);
    }
  };

#if defined(COMMLIB_WITH_AVX512)
  static inline void encode_lanes(const Lanes (&v)[kRegisters], Byte* minima, Byte* scale, Byte* codes) {
    std::int32_t range[2] = {INT32_MAX, INT32_MIN};
    find_range(v, range);
    const Parameters parameters(range);
    parameters.store(minima, scale);
    if (parameters.inverse == 0.0f) {
      std::memset(codes, 0, kBlock);
      return;
    }
    const float minimum = parameters.minimum, inverse = parameters.inverse;
    for (std::size_t k = 0; k < kRegisters; ++k) {
      store_lowest_bytes(codes + k * kLanes, (v[k] - minimum) * inverse + kRounder);
    }
  }
#endif

  template <bool kDecodes>
  static inline bool encode(const float* v, std::size_t m, const float* u, Byte* minima, Byte* scale, Byte* codes,
                            float* decoded) {
    std::int32_t range[2] = {INT32_MAX, INT32_MIN};
    find_range(v, m, range);
    const Parameters parameters(range);
    parameters.store(minima, scale);
    const float minimum = parameters.minimum, inverse = parameters.inverse, s = bf16_value(parameters.scale);
    if (inverse == 0.0f) return fill_block<kDecodes>(minimum, m, m, codes, decoded);
    if (u == nullptr) {  // (v - minimum) * inverse exceeds 255 only by rounding errors: no clamping needed
      for (std::size_t i = 0; i < m; ++i) {
        const float sum = (v[i] - minimum) * inverse + kRounder;
        codes[i] = static_cast<Byte>(to_bits(sum));  // the lowest byte of kRounderBits is 0
        if constexpr (kDecodes) decoded[i] = minimum + (sum - kRounder) * s;
      }
      return true;
    }
    alignas(64) Bits32 wide[kBlock];
    for (std::size_t i = 0; i < m; ++i) {
      const int q = clamp(floor_to_int((v[i] - minimum) * inverse + u[i]), 0, 255);
      wide[i] = static_cast<Bits32>(q);
      if constexpr (kDecodes) decoded[i] = minimum + static_cast<float>(q) * s;
    }
    store_codes<8>(wide, m, codes);
    return true;
  }

  struct Reader {
    const Byte* codes;
    float s, minimum;
    Reader(const Byte* at, const Byte* scale, const Byte* minima)
        : codes(at), s(load_scale(scale)), minimum(load_float(minima)) {}
    inline Lanes operator()(std::size_t i) const { return minimum + lanes_of_bytes(codes + i) * s; }
    inline Lanes added_to(Lanes sum, std::size_t i) const {
      return sum + add_product(same_lanes(minimum), lanes_of_bytes(codes + i), s);
    }
  };

  template <bool kAdds>
  static inline void decode(const Byte* codes, const Byte* scale, const Byte* minima, std::size_t m, float* out) {
    const float s = load_scale(scale), minimum = load_float(minima);
    put_values<kAdds>(m, out, is_finite_number(s) && is_finite_number(minimum),
                      [=](std::size_t i) { return minimum + static_cast<float>(codes[i]) * s; });
  }
};

// `range_of_blocks` finds its parameters over the whole chunk. They are stored before the codes are computed.
struct Bagua {
  static constexpr std::size_t kBlock = 256, kBits = 8, kScaleBytes = 0, kMinimumBytes = 8;
  static constexpr bool kIsOneBlock = true;

  struct Levels {
    float s, upper, lower;
  };

  static inline Levels levels(const Byte* minima) {
    const float minimum = load_float(minima), maximum = load_float(minima + 4);
    const float s = 255.0f / ((maximum - minimum) + 1e-7f), upper = round_float(maximum * s);
    return {s, upper, upper - 255.0f};
  }

  template <bool kDecodes>
  static inline bool encode(const float* v, std::size_t m, const float*, Byte* minima, Byte*, Byte* codes,
                            float* decoded) {
    const Levels l = levels(minima);
    const float minimum = load_float(minima);
    if (minimum != minimum) return fill_block<kDecodes>(from_bits(kQuietNanBits), m, m, codes, decoded);
    alignas(64) Bits32 wide[kBlock];
    for (std::size_t i = 0; i < m; ++i) {
      const float level = round_float(v[i] * l.s), least = level < l.upper ? level : l.upper;
      const float q = least - l.lower, clamped = q < 0.0f ? 0.0f : (q > 255.0f ? 255.0f : q);
      const int code = round_to_int(clamped);
      wide[i] = static_cast<Bits32>(code);
      if constexpr (kDecodes) decoded[i] = (static_cast<float>(code) + l.lower) / l.s;
    }
    store_codes<8>(wide, m, codes);
    return true;
  }

  template <bool kAdds>
  static inline void decode(const Byte* codes, const Byte*, const Byte* minima, std::size_t m, float* out) {
    const Levels l = levels(minima);
    put_values<kAdds>(m, out, false, [=](std::size_t i) { return (static_cast<float>(codes[i]) + l.lower) / l.s; });
  }
};

struct OneBit {
  static constexpr std::size_t kBlock = 512, kBits = 1, kScaleBytes = 2, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;

  template <std::size_t kHalf>
  static inline void fold_halves(float* t) {
    for (std::size_t i = 0; i < kHalf; ++i) t[i] += t[i + kHalf];
    if constexpr (kHalf > 1) fold_halves<kHalf / 2>(t);
  }

  static inline float sum_of_magnitudes(const float* v, std::size_t m) {
    alignas(64) float fold[kBlock];
    if (m == kBlock) {
      for (std::size_t i = 0; i < kBlock / 2; ++i) {
        fold[i] = from_bits(to_bits(v[i]) & kMagnitude) + from_bits(to_bits(v[i + kBlock / 2]) & kMagnitude);
      }
      fold_halves<kBlock / 4>(fold);
    } else {
      for (std::size_t i = 0; i < m; ++i) fold[i] = from_bits(to_bits(v[i]) & kMagnitude);
      for (std::size_t i = m; i < kBlock; ++i) fold[i] = 0.0f;
      fold_halves<kBlock / 2>(fold);
    }
    return fold[0];
  }

  template <bool kDecodes>
  static inline bool encode(const float* v, std::size_t m, const float*, Byte*, Byte* scale, Byte* codes,
                            float* decoded) {
    const float sum = sum_of_magnitudes(v, m);
    // No element is larger than the sum, so most blocks need no second check.
    if (to_bits(sum) >= kWidestRangeBits &&
        (to_bits(sum) >= kInfinityBits || largest_magnitude(v, m) >= kWidestRangeBits)) {
      store_scale(scale, kNanScale);
      return fill_block<kDecodes>(from_bits(kQuietNanBits), m, (m + 7) / 8, codes, decoded);
    }
    const Bits16 bits = bf16_nearest(sum / static_cast<float>(m));
    store_scale(scale, bits);
    std::size_t i = 0;
    for (; i + 16 <= m; i += 16) {
      const auto signs = static_cast<Bits16>(signs_of_16(v + i));
      std::memcpy(codes + i / 8, &signs, sizeof signs);
    }
    for (; i < m; i += 8) {
      int byte = 0;
      for (std::size_t k = 0; k < 8 && i + k < m; ++k) byte |= static_cast<int>(to_bits(v[i + k]) >> 31) << k;
      codes[i / 8] = static_cast<Byte>(byte);
    }
    if constexpr (kDecodes) {
      const Bits32 s = to_bits(bf16_value(bits));
      for (std::size_t k = 0; k < m; ++k) decoded[k] = from_bits(s | (to_bits(v[k]) & ~kMagnitude));
    }
    return true;
  }

  template <bool kAdds>
  static inline void decode(const Byte* codes, const Byte* scale, const Byte*, std::size_t m, float* out) {
    const Bits32 s = to_bits(load_scale(scale));
    const bool is_plain = (s & kMagnitude) <= kInfinityBits;
    const std::size_t whole = m / 32 * 32;
    for (std::size_t i = 0; i < whole; i += 32) {
      Bits32 word;
      std::memcpy(&word, codes + i / 8, sizeof word);
      put_values<kAdds>(32, out + i, is_plain, [=](std::size_t k) { return from_bits(s ^ ((word >> k) << 31)); });
    }
    if (m != kBlock) {  // always false for whole blocks, but compilers warn otherwise
      put_values<kAdds>(m - whole, out + whole, is_plain, [=](std::size_t k) {
        return from_bits(s ^ static_cast<Bits32>(codes[(whole + k) / 8] >> (k % 8)) << 31);
      });
    }
  }
};

template <class Format>
struct Float8 {
  static constexpr std::size_t kBlock = 128, kBits = 8, kScaleBytes = 2, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;

  template <bool kDecodes>
  static inline bool encode(const float* v, std::size_t m, const float*, Byte*, Byte* scale, Byte* codes,
                            float* decoded) {
    const Bits32 largest = largest_magnitude(v, m);
    if (largest < kTinyBits || largest >= kWidestRangeBits) {
      store_scale(scale, largest < kTinyBits ? 0 : kNanScale);
      return fill_block<kDecodes>(largest < kTinyBits ? 0.0f : from_bits(kQuietNanBits), m, m, codes, decoded);
    }
    const Bits16 bits = bf16_up(from_bits(largest) / small_float_value<Format>(Format::kLargestCode));
    store_scale(scale, bits);
    round_all<Format, 8, kBlock, kDecodes>(v, m, 1.0f / bf16_value(bits), bf16_value(bits), codes, decoded);
    return true;
  }

  template <bool kAdds>
  static inline void decode(const Byte* codes, const Byte* scale, const Byte*, std::size_t m, float* out) {
    const float s = load_scale(scale);
    put_codes<8, kBlock, kAdds>(codes, m, out, false, [=](int code) { return small_float_value<Format>(code) * s; });
  }
};

template <class Format, int kCodeBits>
struct Microscaling {
  static constexpr std::size_t kBlock = 32, kBits = kCodeBits, kScaleBytes = 1, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;

  template <bool kDecodes>
  static inline bool encode(const float* v, std::size_t m, const float*, Byte*, Byte* scale, Byte* codes,
                            float* decoded) {
    const Bits32 largest = largest_magnitude(v, m);
    if (largest < kTinyBits || largest >= kWidestRangeBits) {
      *scale = largest < kTinyBits ? 0 : kNanExponent;
      const float value = largest < kTinyBits ? 0.0f : from_bits(kQuietNanBits);
      return fill_block<kDecodes>(value, m, (m * kBits + 7) / 8, codes, decoded);
    }
    const int exponent = static_cast<int>(largest >> 23) - 127 - Format::kMaxExponent;
    *scale = static_cast<Byte>(exponent + 127);
    const float factor = power_of_two(-exponent), back = power_of_two(exponent);
    round_all<Format, kCodeBits, kBlock, kDecodes>(v, m, factor, back, codes, decoded);
    return true;
  }

  template <bool kAdds>
  static inline void decode(const Byte* codes, const Byte* scale, const Byte*, std::size_t m, float* out) {
    const Bits32 bits = *scale == 0 ? 0x400000u : static_cast<Bits32>(*scale) << 23;
    const float factor = from_bits(*scale == kNanExponent ? kQuietNanBits : bits);
    const bool is_plain = Format::kNanFrom >= 1 << Format::kSignBit && is_finite_number(factor);
    put_codes<kCodeBits, kBlock, kAdds>(codes, m, out, is_plain,
                                        [=](int code) { return small_float_value<Format>(code) * factor; });
  }
};

template <class Format>
struct Cast16 {
  static constexpr std::size_t kBlock = 256, kBits = 16, kScaleBytes = 0, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;

  template <bool kDecodes>
  static inline bool encode(const float* v, std::size_t m, const float*, Byte*, Byte*, Byte* codes, float* decoded) {
    for (std::size_t i = 0; i < m; ++i) {
      const std::uint16_t half = Format::store(v[i]);
      std::memcpy(codes + 2 * i, &half, sizeof half);
      if constexpr (kDecodes) decoded[i] = Format::load(half);
    }
    return false;  // large values become infinite
  }

  template <bool kAdds>
  static inline void decode(const Byte* codes, const Byte*, const Byte*, std::size_t m, float* out) {
    put_values<kAdds>(m, out, false, [=](std::size_t i) {
      std::uint16_t half;
      std::memcpy(&half, codes + 2 * i, sizeof half);
      return Format::load(half);
    });
  }
};

#include "codec_loops.h"
