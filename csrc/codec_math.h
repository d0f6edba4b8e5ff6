// The arithmetic of the codecs, for one element or one block's parameters: the same source for every CPU instruction
// set and for CUDA (NVRTC compiles it without any header of the standard library). docs/reference/wire_format.md
// defines it.
//
// Included by codec_impl.h inside the namespace of an instruction set, and by the CUDA kernels; hence no #include here.
// No function has branches that depend on data, so that loops vectorize.
//
// [Note: exactness] No operation may be contracted (-ffp-contract=off, -fmad=false), and denormals are kept.

#if defined(__CUDACC__)
#define COMMLIB_MATH static __device__ __forceinline__
#else
#define COMMLIB_MATH static inline
#endif

using Bits32 = unsigned int;
using Bits16 = unsigned short;
using Byte = unsigned char;
static_assert(sizeof(Bits32) == 4 && sizeof(Bits16) == 2, "the types of the wire");

constexpr Bits32 kMagnitude = 0x7FFFFFFFu;
constexpr Bits32 kInfinityBits = 0x7F800000u;
constexpr Bits32 kQuietNanBits = 0x7FC00000u;
constexpr Bits32 kTinyBits = 0x0D800000u;         // 2^-100
constexpr Bits32 kWidestRangeBits = 0x7F000000u;  // 2^127
constexpr Bits16 kNanScale = 0x7FC0u;
constexpr Byte kNanExponent = 0xFFu;

#if defined(__CUDACC__)
COMMLIB_MATH Bits32 to_bits(float x) {
  return __float_as_uint(x);
}
COMMLIB_MATH float from_bits(Bits32 bits) {
  return __uint_as_float(bits);
}
#else
COMMLIB_MATH Bits32 to_bits(float x) {
  Bits32 bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
}
COMMLIB_MATH float from_bits(Bits32 bits) {
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
}
#endif

COMMLIB_MATH float canonical(float x) {
  return x == x ? x : from_bits(kQuietNanBits);
}

// Returns the smallest bf16 that is at least `x`, which is finite and not negative.
COMMLIB_MATH Bits16 bf16_up(float x) {
  return static_cast<Bits16>((to_bits(x) + 0xFFFFu) >> 16);
}

COMMLIB_MATH Bits16 bf16_nearest(float x) {
  const Bits32 bits = to_bits(x);
  return static_cast<Bits16>(x == x ? (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16 : kNanScale);
}

COMMLIB_MATH float bf16_value(Bits16 bits) {
  return from_bits(static_cast<Bits32>(bits) << 16);
}

// --- integer codes ---------------------------------------------------------------------------------------------------

// Adding 1.5 * 2^23 leaves an integer in the low bits of the sum, rounded to nearest even by the adder itself.
constexpr float kRounder = 12582912.0f;
constexpr Bits32 kRounderBits = 0x4B400000u;

// rint(y), as an int; |y| <= 2^21.
COMMLIB_MATH int round_to_int(float y) {
  return static_cast<int>(to_bits(y + kRounder) - kRounderBits);
}

// rint(y) as a float, for any magnitude.
COMMLIB_MATH float round_float(float y) {
  const float magnitude = from_bits(to_bits(y) & kMagnitude);
  const float rounded = (magnitude + 8388608.0f) - 8388608.0f;
  return magnitude < 8388608.0f ? from_bits(to_bits(rounded) | (to_bits(y) & ~kMagnitude)) : y;
}

// floor(y), as an int; |y| <= 2^21. If rounding to nearest exceeds y, subtracts one.
COMMLIB_MATH int floor_to_int(float y) {
  const float sum = y + kRounder;
  const int nearest = static_cast<int>(to_bits(sum) - kRounderBits);
  return nearest - ((sum - kRounder) > y ? 1 : 0);
}

COMMLIB_MATH int clamp(int q, int low, int high) {
  return q < low ? low : (q > high ? high : q);
}

// --- small floats ----------------------------------------------------------------------------------------------------

// A float of 1 + E + kMantissa bits whose smallest normal number is 2^kMinExponent.
template <int kMantissaBits, int kSmallestExponent, int kLargest, int kMostExponent, int kFirstNan, bool kInfinite,
          int kSign>
struct SmallFloat {
  static constexpr int kMantissa = kMantissaBits;
  static constexpr int kMinExponent = kSmallestExponent;
  static constexpr int kLargestCode = kLargest;       // the largest finite number, without its sign
  static constexpr int kMaxExponent = kMostExponent;  // exponent of that number
  static constexpr int kNanFrom = kFirstNan;          // codes from here on are NaN
  static constexpr bool kHasInfinity = kInfinite;     // if so, infinity is the code before the first NaN
  static constexpr int kSignBit = kSign;
};
using E4M3 = SmallFloat<3, -6, 0x7E, 8, 0x7F, false, 7>;
using E5M2 = SmallFloat<2, -14, 0x7B, 15, 0x7D, true, 7>;
using E2M1 = SmallFloat<1, 0, 0x7, 2, 0x8, false, 3>;

COMMLIB_MATH float power_of_two(int exponent) {  // -126..127
  return from_bits(static_cast<Bits32>(exponent + 127) << 23);
}

struct SmallRounding {
  int code;
  float value;  // decoded value of the code
};

// Returns the number of the format nearest to `y` (finite), ties to even, saturating.
template <class Format>
COMMLIB_MATH SmallRounding round_to_small_float(float y) {
  constexpr int kShift = 23 - Format::kMantissa, kLeast = (Format::kMinExponent + 127) << 23;
  constexpr int kFraction = 1 << Format::kMantissa;
  constexpr float kMost = static_cast<float>((Format::kLargestCode & (kFraction - 1)) | kFraction) *
                          static_cast<float>(1 << (Format::kMaxExponent - Format::kMantissa));
  const Bits32 magnitude = to_bits(y) & kMagnitude, sign = to_bits(y) & ~kMagnitude;
  const int raw_exponent = static_cast<int>(magnitude & kInfinityBits);
  const int exponent = raw_exponent < kLeast ? kLeast : raw_exponent;
  // The adder rounds at the last kept bit: add 1.5 * 2^23 of that bit. It is passed at most 2^(kMantissa + 1) times.
  const int rounder = exponent + (kShift << 23 | 0x400000);
  const float sum = from_bits(magnitude) + from_bits(static_cast<Bits32>(rounder));
  const int code = ((exponent - kLeast) >> kShift) + (static_cast<int>(to_bits(sum)) - rounder);
  const float value = sum - from_bits(static_cast<Bits32>(rounder));
  const int saturated = code > Format::kLargestCode ? Format::kLargestCode : code;
  const float largest = value > kMost ? kMost : value;
  return {saturated | static_cast<int>(sign >> (31 - Format::kSignBit)), from_bits(to_bits(largest) | sign)};
}

// Returns the code nearest to `y` (finite), ties to even, saturating.
template <class Format>
COMMLIB_MATH int small_float_code(float y) {
  return round_to_small_float<Format>(y).code;
}

// Returns the number of a code; NaN is the positive one without payload.
template <class Format>
COMMLIB_MATH float small_float_value(int code) {
  constexpr int kShift = 23 - Format::kMantissa, kMask = (1 << Format::kSignBit) - 1;
  constexpr Bits32 kLeast = static_cast<Bits32>(Format::kMinExponent + 127) << 23;
  const int magnitude = code & kMask;
  // Avoid denormal intermediates, which cost processors a hundred cycles: a code without exponent is read 2^min too
  // large.
  const bool is_small = magnitude < 1 << Format::kMantissa;
  const Bits32 bits = (static_cast<Bits32>(magnitude) << kShift) + (is_small ? kLeast : kLeast - (1u << 23));
  const float number = from_bits(bits) - (is_small ? from_bits(kLeast) : 0.0f);
  float value = from_bits(to_bits(number) | static_cast<Bits32>(code >> Format::kSignBit & 1) << 31);
  if constexpr (Format::kHasInfinity) {
    const Bits32 sign = static_cast<Bits32>(code >> Format::kSignBit & 1) << 31;
    value = magnitude == Format::kNanFrom - 1 ? from_bits(kInfinityBits | sign) : value;
  }
  if constexpr (Format::kNanFrom <= kMask) value = magnitude >= Format::kNanFrom ? from_bits(kQuietNanBits) : value;
  return value;
}

// --- random numbers --------------------------------------------------------------------------------------------------

struct Words {
  Bits32 word[4];
};

COMMLIB_MATH Words philox(Bits32 c0, Bits32 c1, Bits32 c2, Bits32 c3, Bits32 k0, Bits32 k1) {
  for (int round = 0; round < 10; ++round) {
    const unsigned long long first = 0xD2511F53ull * c0, second = 0xCD9E8D57ull * c2;
    const Bits32 n0 = static_cast<Bits32>(second >> 32) ^ c1 ^ k0, n2 = static_cast<Bits32>(first >> 32) ^ c3 ^ k1;
    c1 = static_cast<Bits32>(second);
    c3 = static_cast<Bits32>(first);
    c0 = n0;
    c2 = n2;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}
