// The block codecs for a warp that holds a tile in its registers.
//
// [Note: a tile] kBlock elements are held by kLanes lanes of a warp; a tile is the data of a whole warp. A lane has
// kRuns runs of four neighbors: number 4 * r + i is element r * kRunStride + 4 * t + i of the block, where t is the
// lane's index among the kLanes. So memory is always accessed in contiguous vectors, and elements whose codes share a
// byte are in one lane (docs/reference/wire_format.md puts codes that are kRunStride apart into one byte).
//
// A codec has the constants of its shape and
//     analyse(v, m, t)       returns the parameters of a block of m elements, whose other places hold +0
//     code(v, u, parameters) returns the code of one element; u is the random number, or 0 to round to nearest
//     value(code, parameters) returns the value of a code
//     load(scale, minimum)   returns the parameters for decoding
#pragma once

#include "device.h"

struct Parameters {
  float scale;
  float inverse;
  float minimum;
  Bits16 scale_bits;
  bool has_codes;  // otherwise all codes are 0
};

template <int kBlockSize, int kNumRuns, int kCodeBits, int kScale, int kMinimum>
struct Shape {
  static constexpr int kBlock = kBlockSize, kRuns = kNumRuns, kBits = kCodeBits;
  static constexpr int kScaleBytes = kScale, kMinimumBytes = kMinimum;
  static constexpr int kPerLane = 4 * kRuns, kLanes = kBlock / kPerLane, kRunStride = kBlock / kRuns;
  static constexpr int kTile = kWarp * kPerLane, kBlocksPerTile = kTile / kBlock;
  static constexpr int kCodeBytes = kBlock * kBits / 8;
  static constexpr bool kIsOneBlock = false;
};

template <class Codec>
COMMLIB_DEVICE Bits32 largest_magnitude(const float* v) {
  Bits32 largest = 0;
#pragma unroll
  for (int i = 0; i < Codec::kPerLane; ++i) {
    const Bits32 bits = to_bits(v[i]) & kMagnitude;
    largest = bits > largest ? bits : largest;
  }
  return largest_of_lanes<Codec::kLanes>(largest);
}

// The smallest and the largest value as ordered integers; initially empty.
struct Range {
  int low = 0x7FFFFFFF, high = -0x7FFFFFFF - 1;
};

COMMLIB_DEVICE void widen(Range& range, int low, int high) {
  range.low = low < range.low ? low : range.low;
  range.high = high > range.high ? high : range.high;
}

COMMLIB_DEVICE Range range_of_warp(const Range& range) {
  Range all;
  all.low = ~largest_of_warp(~range.low);
  all.high = largest_of_warp(range.high);
  return all;
}

// Returns the parameters of a block with the largest magnitude `largest` and codes up to `levels`.
COMMLIB_DEVICE Parameters scaled(Bits32 largest, float levels) {
  Parameters p = {};
  p.has_codes = largest >= kTinyBits && largest < kWidestRangeBits;
  p.scale_bits = p.has_codes ? bf16_up(from_bits(largest) / levels) : (largest < kTinyBits ? Bits16{0} : kNanScale);
  p.scale = bf16_value(p.scale_bits);
  p.inverse = 1.0f / p.scale;  // unused without codes
  return p;
}

COMMLIB_DEVICE Parameters with_scale(Bits16 bits) {
  Parameters p = {};
  p.scale = bf16_value(bits);
  return p;
}

template <int kCodeBits, int kLevels, int kBlockSize, int kNumRuns>
struct Integer : Shape<kBlockSize, kNumRuns, kCodeBits, 2, 0> {
  static constexpr int kZero = kCodeBits == 8 ? 0 : 1 << (kCodeBits - 1);

  COMMLIB_DEVICE Parameters analyse(const float* v, int, int) {
    return scaled(largest_magnitude<Integer>(v), static_cast<float>(kLevels));
  }

  template <bool kIsRandom>
  COMMLIB_DEVICE int code(float v, float u, const Parameters& p) {
    const float y = v * p.inverse;
    const int q = kIsRandom ? clamp(floor_to_int(y + u), -kLevels, kLevels) : round_to_int(y);
    return p.has_codes ? q + kZero : 0;
  }

  COMMLIB_DEVICE float value(int code, const Parameters& p) {
    const int q = kCodeBits == 8 ? static_cast<signed char>(code) : code - kZero;
    return canonical(static_cast<float>(q) * p.scale);
  }

  COMMLIB_DEVICE Parameters load(Bits16 scale, float) { return with_scale(scale); }
};

struct MinMax : Shape<256, 2, 8, 2, 4> {
  COMMLIB_DEVICE Parameters analyse(const float* v, int m, int t) {
    Range own;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (i / 4 * kRunStride + 4 * t + i % 4 < m) widen(own, ordered(v[i]), ordered(v[i]));
    }
    const Range range = range_of_warp(own);
    const float low = from_ordered(range.low), high = from_ordered(range.high);
    const Bits32 a = to_bits(low) & kMagnitude, b = to_bits(high) & kMagnitude;
    const Bits32 largest = a > b ? a : b;
    const float spread = high - low;
    Parameters p = {};
    p.minimum = low + 0.0f;
    if (largest >= kWidestRangeBits || spread > from_bits(kWidestRangeBits)) {
      p.minimum = from_bits(kQuietNanBits);
      p.scale_bits = kNanScale;
    } else if (largest < kTinyBits) {
      p.minimum = 0.0f;
    } else if (spread >= from_bits(kTinyBits)) {
      p.scale_bits = bf16_up(spread / 255.0f);
      p.has_codes = true;
    }
    p.scale = bf16_value(p.scale_bits);
    p.inverse = 1.0f / p.scale;
    return p;
  }

  template <bool kIsRandom>
  COMMLIB_DEVICE int code(float v, float u, const Parameters& p) {
    const float y = (v - p.minimum) * p.inverse;
    const int q = clamp(kIsRandom ? floor_to_int(y + u) : round_to_int(y), 0, 255);
    return p.has_codes ? q : 0;
  }

  COMMLIB_DEVICE float value(int code, const Parameters& p) {
    return canonical(p.minimum + static_cast<float>(code) * p.scale);
  }

  COMMLIB_DEVICE Parameters load(Bits16 scale, float minimum) {
    Parameters p = with_scale(scale);
    p.minimum = minimum;
    return p;
  }
};

// `scale` is s, `inverse` u and `minimum` l of docs/reference/wire_format.md. The whole chunk shares them.
struct Bagua : Shape<256, 2, 8, 0, 8> {
  static constexpr bool kIsOneBlock = true;

  COMMLIB_DEVICE Parameters load_bounds(float minimum, float maximum) {
    Parameters p = {};
    p.scale = 255.0f / ((maximum - minimum) + 1e-7f);
    p.inverse = round_float(maximum * p.scale);
    p.minimum = p.inverse - 255.0f;
    p.has_codes = minimum == minimum;
    return p;
  }

  template <bool kIsRandom>
  COMMLIB_DEVICE int code(float v, float, const Parameters& p) {
    const float level = round_float(v * p.scale), least = level < p.inverse ? level : p.inverse;
    const float q = least - p.minimum;
    return p.has_codes ? round_to_int(q < 0.0f ? 0.0f : (q > 255.0f ? 255.0f : q)) : 0;
  }

  COMMLIB_DEVICE float value(int code, const Parameters& p) {
    return canonical((static_cast<float>(code) + p.minimum) / p.scale);
  }
};

struct OneBit : Shape<512, 4, 1, 2, 0> {
  COMMLIB_DEVICE Parameters analyse(const float* v, int m, int) {
    float t[8];
    // The folds at 256 and 128 are within a lane, those from 64 to 4 between lanes, the last two within a lane.
#pragma unroll
    for (int i = 0; i < 8; ++i)
      t[i] = from_bits(to_bits(v[i]) & kMagnitude) + from_bits(to_bits(v[i + 8]) & kMagnitude);
#pragma unroll
    for (int i = 0; i < 4; ++i) t[i] = t[i] + t[i + 4];
#pragma unroll
    for (int distance = kWarp / 2; distance > 0; distance /= 2) {
#pragma unroll
      for (int i = 0; i < 4; ++i) t[i] = t[i] + __shfl_xor_sync(kAllLanes, t[i], distance);
    }
    const float sum = (t[0] + t[2]) + (t[1] + t[3]);
    const Bits32 largest = largest_magnitude<OneBit>(v);
    Parameters p = {};
    p.has_codes = to_bits(sum) < kInfinityBits && largest < kWidestRangeBits;
    p.scale_bits = p.has_codes ? bf16_nearest(sum / static_cast<float>(m > 0 ? m : 1)) : kNanScale;
    p.scale = bf16_value(p.scale_bits);
    return p;
  }

  template <bool kIsRandom>
  COMMLIB_DEVICE int code(float v, float, const Parameters& p) {
    return p.has_codes ? static_cast<int>(to_bits(v) >> 31) : 0;
  }

  COMMLIB_DEVICE float value(int code, const Parameters& p) {
    return canonical(from_bits(to_bits(p.scale) ^ static_cast<Bits32>(code) << 31));
  }

  COMMLIB_DEVICE Parameters load(Bits16 scale, float) { return with_scale(scale); }
};

// Codes are low-bit floats, multiplied by the scale.
template <class Format, int kBlockSize, int kCodeBits, int kScale>
struct FloatCodes : Shape<kBlockSize, 2, kCodeBits, kScale, 0> {
  template <bool kIsRandom>
  COMMLIB_DEVICE int code(float v, float, const Parameters& p) {
    return p.has_codes ? small_float_code<Format>(v * p.inverse) : 0;
  }

  COMMLIB_DEVICE float value(int code, const Parameters& p) {
    return canonical(small_float_value<Format>(code) * p.scale);
  }
};

template <class Format>
struct Float8 : FloatCodes<Format, 128, 8, 2> {
  COMMLIB_DEVICE Parameters analyse(const float* v, int, int) {
    return scaled(largest_magnitude<Float8>(v), small_float_value<Format>(Format::kLargestCode));
  }

  COMMLIB_DEVICE Parameters load(Bits16 scale, float) { return with_scale(scale); }
};

template <class Format, int kCodeBits>
struct Microscaling : FloatCodes<Format, 32, kCodeBits, 1> {
  COMMLIB_DEVICE Parameters analyse(const float* v, int, int) {
    const Bits32 largest = largest_magnitude<Microscaling>(v);
    const bool has_codes = largest >= kTinyBits && largest < kWidestRangeBits;
    const int exponent = static_cast<int>(largest >> 23) - 127 - Format::kMaxExponent;
    const int byte = has_codes ? exponent + 127 : (largest < kTinyBits ? 0 : kNanExponent);
    Parameters p = load(static_cast<Bits16>(byte), 0.0f);
    p.scale_bits = static_cast<Bits16>(byte);
    p.inverse = power_of_two(has_codes ? -exponent : 0);
    p.has_codes = has_codes;
    return p;
  }

  COMMLIB_DEVICE Parameters load(Bits16 byte, float) {
    const Bits32 bits = byte == 0 ? 0x400000u : static_cast<Bits32>(byte) << 23;
    Parameters p = {};
    p.scale = from_bits(byte == kNanExponent ? kQuietNanBits : bits);
    return p;
  }
};

template <class Half>
struct Cast16 : Shape<256, 2, 16, 0, 0> {
  COMMLIB_DEVICE Parameters analyse(const float*, int, int) { return {}; }

  template <bool kIsRandom>
  COMMLIB_DEVICE int code(float v, float, const Parameters&) {
    return Half::store(v);
  }

  COMMLIB_DEVICE float value(int code, const Parameters&) { return canonical(Half::load(static_cast<Bits16>(code))); }

  COMMLIB_DEVICE Parameters load(Bits16, float) { return {}; }
};

using Int8 = Integer<8, 127, 256, 2>;
using Int4 = Integer<4, 7, 128, 2>;
using Int2 = Integer<2, 1, 128, 4>;
using Fp8E4M3 = Float8<E4M3>;
using Fp8E5M2 = Float8<E5M2>;
using MxFp8 = Microscaling<E4M3, 8>;
using MxFp4 = Microscaling<E2M1, 4>;
using CastBFloat16 = Cast16<BFloat16>;
using CastFloat16 = Cast16<Float16>;
