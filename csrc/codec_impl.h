// The block loops of the codecs, written once; each kernels_<isa>.cpp includes this file inside its own namespace,
// after codec_math.h and convert_impl.h (whose notes on includes apply here too).
//
// A codec is a struct with the constants of its shape, and
//     encode(values, m, u, minima, scale, codes)    one block; u is null for rounding to nearest
//     decode(codes, scale, minima, m, out)
// where m is the number of elements. Everything else (casts, error feedback, sums) is made of these two, block by
// block, in the first-level cache.

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

// --- codes of fewer than 8 bits: 8 / kBits runs of the block share bytes ---------------------------------------------

template <int kBits>
static inline void pack_codes(const Byte* values, std::size_t m, Byte* codes) {
  constexpr std::size_t kPerByte = 8 / kBits;
  const std::size_t stride = (m + kPerByte - 1) / kPerByte;
  for (std::size_t j = 0; j < stride; ++j) {
    int packed = 0;
    for (std::size_t k = 0; k < kPerByte; ++k) packed |= values[k * stride + j] << (k * kBits);  // zeros past the end
    codes[j] = static_cast<Byte>(packed);
  }
}

template <int kBits>
static inline void unpack_codes(const Byte* codes, std::size_t m, Byte* values) {
  constexpr std::size_t kPerByte = 8 / kBits;
  const std::size_t stride = (m + kPerByte - 1) / kPerByte;
  for (std::size_t k = 0; k < kPerByte; ++k) {
    for (std::size_t j = 0; j < stride; ++j) {
      values[k * stride + j] = static_cast<Byte>((codes[j] >> (k * kBits)) & ((1 << kBits) - 1));
    }
  }
}

// --- the codecs ------------------------------------------------------------------------------------------------------

template <int kCodeBits, int kLevels, std::size_t kBlockSize>
struct Integer {
  static constexpr std::size_t kBlock = kBlockSize, kBits = kCodeBits, kScaleBytes = 2, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;
  static constexpr int kZero = kCodeBits == 8 ? 0 : 1 << (kCodeBits - 1);

  static inline void encode(const float* v, std::size_t m, const float* u, Byte*, Byte* scale, Byte* codes) {
    const Bits32 largest = largest_magnitude(v, m);
    if (largest < kTinyBits || largest >= kWidestRangeBits) {
      store_scale(scale, largest < kTinyBits ? 0 : kNanScale);
      std::memset(codes, 0, (m * kBits + 7) / 8);
      return;
    }
    const Bits16 bits = bf16_up(from_bits(largest) / static_cast<float>(kLevels));
    store_scale(scale, bits);
    const float inverse = 1.0f / bf16_value(bits);
    if constexpr (kCodeBits == 8) {
      quantize(v, m, u, inverse, codes);
    } else {
      Byte values[kBlock + 8] = {};
      quantize(v, m, u, inverse, values);
      pack_codes<kCodeBits>(values, m, codes);
    }
  }

  static inline void quantize(const float* v, std::size_t m, const float* u, float inverse, Byte* out) {
    if (u == nullptr) {  // |v * inverse| exceeds kLevels by rounding errors at most: nothing to clamp
      for (std::size_t i = 0; i < m; ++i) out[i] = static_cast<Byte>(round_to_int(v[i] * inverse) + kZero);
    } else {
      for (std::size_t i = 0; i < m; ++i) {
        out[i] = static_cast<Byte>(clamp(floor_to_int(v[i] * inverse + u[i]), -kLevels, kLevels) + kZero);
      }
    }
  }

  static inline void decode(const Byte* codes, const Byte* scale, const Byte*, std::size_t m, float* out) {
    const float s = load_scale(scale);
    if constexpr (kCodeBits == 8) {
      for (std::size_t i = 0; i < m; ++i) {
        out[i] = canonical(static_cast<float>(static_cast<std::int8_t>(codes[i])) * s);
      }
    } else {
      Byte values[kBlock + 8];
      unpack_codes<kCodeBits>(codes, m, values);
      for (std::size_t i = 0; i < m; ++i) out[i] = canonical(static_cast<float>(values[i] - kZero) * s);
    }
  }
};

struct MinMax {
  static constexpr std::size_t kBlock = 256, kBits = 8, kScaleBytes = 2, kMinimumBytes = 4;
  static constexpr bool kIsOneBlock = false;

  static inline void encode(const float* v, std::size_t m, const float* u, Byte* minima, Byte* scale, Byte* codes) {
    std::int32_t range[2] = {INT32_MAX, INT32_MIN};
    find_range(v, m, range);
    const Bits32 largest = magnitude_of_range(range);
    const float spread = from_ordered(range[1]) - from_ordered(range[0]);
    float minimum = from_ordered(range[0]) + 0.0f, inverse = 0.0f;
    Bits16 bits = 0;
    if (largest >= kWidestRangeBits || spread > from_bits(kWidestRangeBits)) {
      minimum = from_bits(kQuietNanBits);
      bits = kNanScale;
    } else if (largest < kTinyBits) {
      minimum = 0.0f;
    } else if (spread >= from_bits(kTinyBits)) {
      bits = bf16_up(spread / 255.0f);
      inverse = 1.0f / bf16_value(bits);
    }
    std::memcpy(minima, &minimum, sizeof minimum);
    store_scale(scale, bits);
    if (inverse == 0.0f) {
      std::memset(codes, 0, m);
    } else if (u == nullptr) {
      for (std::size_t i = 0; i < m; ++i) {
        codes[i] = static_cast<Byte>(clamp(round_to_int((v[i] - minimum) * inverse), 0, 255));
      }
    } else {
      for (std::size_t i = 0; i < m; ++i) {
        codes[i] = static_cast<Byte>(clamp(floor_to_int((v[i] - minimum) * inverse + u[i]), 0, 255));
      }
    }
  }

  static inline void decode(const Byte* codes, const Byte* scale, const Byte* minima, std::size_t m, float* out) {
    const float s = load_scale(scale), minimum = load_float(minima);
    for (std::size_t i = 0; i < m; ++i) out[i] = canonical(minimum + static_cast<float>(codes[i]) * s);
  }
};

// Its parameters are found by `range_of_blocks` over the whole chunk and stored before the codes are made.
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

  static inline void encode(const float* v, std::size_t m, const float*, Byte* minima, Byte*, Byte* codes) {
    const Levels l = levels(minima);
    const float minimum = load_float(minima);
    if (minimum != minimum) {
      std::memset(codes, 0, m);
      return;
    }
    for (std::size_t i = 0; i < m; ++i) {
      const float level = round_float(v[i] * l.s), least = level < l.upper ? level : l.upper;
      const float q = least - l.lower;
      codes[i] = static_cast<Byte>(round_to_int(q < 0.0f ? 0.0f : (q > 255.0f ? 255.0f : q)));
    }
  }

  static inline void decode(const Byte* codes, const Byte*, const Byte* minima, std::size_t m, float* out) {
    const Levels l = levels(minima);
    for (std::size_t i = 0; i < m; ++i) out[i] = canonical((static_cast<float>(codes[i]) + l.lower) / l.s);
  }
};

struct OneBit {
  static constexpr std::size_t kBlock = 512, kBits = 1, kScaleBytes = 2, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;

  static inline void encode(const float* v, std::size_t m, const float*, Byte*, Byte* scale, Byte* codes) {
    float fold[kBlock];
    for (std::size_t i = 0; i < m; ++i) fold[i] = from_bits(to_bits(v[i]) & kMagnitude);
    for (std::size_t i = m; i < kBlock; ++i) fold[i] = 0.0f;
    for (std::size_t half = kBlock / 2; half > 0; half /= 2) {
      for (std::size_t i = 0; i < half; ++i) fold[i] += fold[i + half];
    }
    const Bits32 sum = to_bits(fold[0]);
    if (sum >= kInfinityBits || largest_magnitude(v, m) >= kWidestRangeBits) {
      store_scale(scale, kNanScale);
      std::memset(codes, 0, (m + 7) / 8);
      return;
    }
    store_scale(scale, bf16_nearest(fold[0] / static_cast<float>(m)));
    std::size_t i = 0;
    for (; i + 32 <= m; i += 32) {
      Bits32 word = 0;
      for (std::size_t k = 0; k < 32; ++k) word |= (to_bits(v[i + k]) >> 31) << k;
      std::memcpy(codes + i / 8, &word, sizeof word);
    }
    for (; i < m; i += 8) {
      int byte = 0;
      for (std::size_t k = 0; k < 8 && i + k < m; ++k) byte |= static_cast<int>(to_bits(v[i + k]) >> 31) << k;
      codes[i / 8] = static_cast<Byte>(byte);
    }
  }

  static inline void decode(const Byte* codes, const Byte* scale, const Byte*, std::size_t m, float* out) {
    const Bits32 s = to_bits(load_scale(scale));
    std::size_t i = 0;
    for (; i + 32 <= m; i += 32) {
      Bits32 word;
      std::memcpy(&word, codes + i / 8, sizeof word);
      for (std::size_t k = 0; k < 32; ++k) out[i + k] = canonical(from_bits(s ^ ((word >> k) << 31)));
    }
    for (; i < m; ++i) out[i] = canonical(from_bits(s ^ static_cast<Bits32>(codes[i / 8] >> (i % 8)) << 31));
  }
};

template <class Format>
struct Float8 {
  static constexpr std::size_t kBlock = 128, kBits = 8, kScaleBytes = 2, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;

  static inline void encode(const float* v, std::size_t m, const float*, Byte*, Byte* scale, Byte* codes) {
    const Bits32 largest = largest_magnitude(v, m);
    if (largest < kTinyBits || largest >= kWidestRangeBits) {
      store_scale(scale, largest < kTinyBits ? 0 : kNanScale);
      std::memset(codes, 0, m);
      return;
    }
    const Bits16 bits = bf16_up(from_bits(largest) / small_float_value<Format>(Format::kLargestCode));
    store_scale(scale, bits);
    const float inverse = 1.0f / bf16_value(bits);
    for (std::size_t i = 0; i < m; ++i) codes[i] = static_cast<Byte>(small_float_code<Format>(v[i] * inverse));
  }

  static inline void decode(const Byte* codes, const Byte* scale, const Byte*, std::size_t m, float* out) {
    const float s = load_scale(scale);
    for (std::size_t i = 0; i < m; ++i) out[i] = canonical(small_float_value<Format>(codes[i]) * s);
  }
};

template <class Format, int kCodeBits>
struct Microscaling {
  static constexpr std::size_t kBlock = 32, kBits = kCodeBits, kScaleBytes = 1, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;

  static inline void encode(const float* v, std::size_t m, const float*, Byte*, Byte* scale, Byte* codes) {
    const Bits32 largest = largest_magnitude(v, m);
    if (largest < kTinyBits || largest >= kWidestRangeBits) {
      *scale = largest < kTinyBits ? 0 : kNanExponent;
      std::memset(codes, 0, (m * kBits + 7) / 8);
      return;
    }
    const int exponent = static_cast<int>(largest >> 23) - 127 - Format::kMaxExponent;
    *scale = static_cast<Byte>(exponent + 127);
    const float factor = power_of_two(-exponent);
    Byte values[kBlock + 8] = {};
    for (std::size_t i = 0; i < m; ++i) values[i] = static_cast<Byte>(small_float_code<Format>(v[i] * factor));
    if constexpr (kCodeBits == 8) {
      std::memcpy(codes, values, m);
    } else {
      pack_codes<kCodeBits>(values, m, codes);
    }
  }

  static inline void decode(const Byte* codes, const Byte* scale, const Byte*, std::size_t m, float* out) {
    const Bits32 bits = *scale == 0 ? 0x400000u : static_cast<Bits32>(*scale) << 23;
    const float factor = from_bits(*scale == kNanExponent ? kQuietNanBits : bits);
    Byte values[kBlock + 8];
    if constexpr (kCodeBits == 8) {
      std::memcpy(values, codes, m);
    } else {
      unpack_codes<kCodeBits>(codes, m, values);
    }
    for (std::size_t i = 0; i < m; ++i) out[i] = canonical(small_float_value<Format>(values[i]) * factor);
  }
};

template <class Format>
struct Cast16 {
  static constexpr std::size_t kBlock = 256, kBits = 16, kScaleBytes = 0, kMinimumBytes = 0;
  static constexpr bool kIsOneBlock = false;

  static inline void encode(const float* v, std::size_t m, const float*, Byte*, Byte*, Byte* codes) {
    for (std::size_t i = 0; i < m; ++i) {
      const std::uint16_t half = Format::store(v[i]);
      std::memcpy(codes + 2 * i, &half, sizeof half);
    }
  }

  static inline void decode(const Byte* codes, const Byte*, const Byte*, std::size_t m, float* out) {
    for (std::size_t i = 0; i < m; ++i) {
      std::uint16_t half;
      std::memcpy(&half, codes + 2 * i, sizeof half);
      out[i] = canonical(Format::load(half));
    }
  }
};

#include "codec_loops.h"
