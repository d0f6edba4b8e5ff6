// Primitives that compilers do not generate well: each is written for the instruction sets that have an instruction for
// it, and once in portable form. Included by codec_impl.h.

// Makes the calling thread's non-temporal stores visible to other threads.
static inline void finish_streams() {
#if defined(COMMLIB_X86)
  _mm_sfence();
#endif
}

// Copies with non-temporal stores if the addresses allow it, which avoids reading lines that do not fit into a cache
// before writing them. `src` is aligned to 64 bytes.
static inline void stream_copy(void* dst, const void* src, std::size_t nbytes) {
  auto* to = static_cast<Byte*>(dst);
  const auto* from = static_cast<const Byte*>(src);
  std::size_t done = 0;
#if defined(COMMLIB_X86)
  const auto address = reinterpret_cast<std::uintptr_t>(dst);
#if defined(COMMLIB_WITH_AVX512)
  if (address % 64 == 0) {
    for (; done + 64 <= nbytes; done += 64) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(to + done), _mm512_load_si512(from + done));
    }
  }
#elif defined(COMMLIB_WITH_AVX2)
  if (address % 32 == 0) {
    for (; done + 32 <= nbytes; done += 32) {
      _mm256_stream_si256(reinterpret_cast<__m256i*>(to + done),
                          _mm256_load_si256(reinterpret_cast<const __m256i*>(from + done)));
    }
  }
#endif
  if (address % 16 == 0) {
    for (; done + 16 <= nbytes; done += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + done),
                       _mm_load_si128(reinterpret_cast<const __m128i*>(from + done)));
    }
  }
#endif
  std::memcpy(to + done, from + done, nbytes - done);
}

// Prefetches the cache lines `distance` bytes, by default a page, after the `nbytes` at `at`, into the first- or
// second-level cache (kPrefetchesToFirstCache). Non-temporal prefetches (prefetchnta) made sums take two to four times
// as long (Intel Xeon). Addresses beyond the end may be prefetched and are therefore computed as integers. Always
// inlined: GCC considers a function that only prefetches to have no effect, and drops its calls.
COMMLIB_INLINE void prefetch_behind(const void* at, std::size_t nbytes, std::size_t distance = 4096) {
  constexpr std::size_t kLine = 64;
  const std::uintptr_t begin = reinterpret_cast<std::uintptr_t>(at) + distance;
  if (kPrefetchesToFirstCache) {
    for (std::size_t i = 0; i < nbytes; i += kLine) __builtin_prefetch(reinterpret_cast<const void*>(begin + i), 0, 3);
  } else {
    for (std::size_t i = 0; i < nbytes; i += kLine) __builtin_prefetch(reinterpret_cast<const void*>(begin + i), 0, 2);
  }
}

// Returns the signs of 16 numbers, with that of the first in bit 0.
static inline unsigned signs_of_16(const float* v) {
#if defined(COMMLIB_WITH_AVX512)
  return _mm512_movepi32_mask(_mm512_loadu_si512(v));
#elif defined(COMMLIB_WITH_AVX2)
  return static_cast<unsigned>(_mm256_movemask_ps(_mm256_loadu_ps(v))) |
         static_cast<unsigned>(_mm256_movemask_ps(_mm256_loadu_ps(v + 8))) << 8;
#else
  unsigned signs = 0;
  for (unsigned k = 0; k < 16; ++k) signs |= (to_bits(v[k]) >> 31) << k;
  return signs;
#endif
}

// --- several numbers at once -----------------------------------------------------------------------------------------
//
// For loops that compilers vectorize poorly: Lanes are as many floats as a register holds, with the operators of
// floats. kRegisters is the number of them that may be in use at once. For instruction sets without intrinsics, a lane
// is one float, and vectorization is left to the compiler.
//
// [Note: exact products] add_product is a fused instruction where one exists, which rounds once instead of twice. So it
// may be used only if the product is exact in float: an 8-bit code times a bf16, denormal or not, that is too small to
// overflow.

static inline bool has_exact_products(float scale) {
  return (to_bits(scale) & kMagnitude) < 0x7B800000u;  // 2^120; NaN compares false
}

#if defined(COMMLIB_WITH_AVX512)
constexpr std::size_t kLanes = 16, kRegisters = 16;
using Lanes = __m512;
static inline Lanes same_lanes(float x) {
  return _mm512_set1_ps(x);
}
static inline Lanes load_lanes(const float* at) {
  return _mm512_loadu_ps(at);
}
static inline void store_lanes(float* at, Lanes x) {
  _mm512_storeu_ps(at, x);
}
static inline Lanes add_product(Lanes sum, Lanes a, float b) {
  return _mm512_fmadd_ps(a, same_lanes(b), sum);
}
static inline Lanes canonical_lanes(Lanes x) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), x, same_lanes(from_bits(kQuietNanBits)));
}
static inline Lanes lanes_of_bytes(const Byte* at) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
static inline Lanes lanes_of_signed_bytes(const Byte* at) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at))));
}
// Stores the lowest byte of each number.
static inline void store_lowest_bytes(Byte* at, Lanes x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(at), _mm512_cvtepi32_epi8(_mm512_castps_si512(x)));
}
#elif defined(COMMLIB_WITH_AVX2)
constexpr std::size_t kLanes = 8, kRegisters = 8;
using Lanes = __m256;
static inline Lanes same_lanes(float x) {
  return _mm256_set1_ps(x);
}
static inline Lanes load_lanes(const float* at) {
  return _mm256_loadu_ps(at);
}
static inline void store_lanes(float* at, Lanes x) {
  _mm256_storeu_ps(at, x);
}
static inline Lanes add_product(Lanes sum, Lanes a, float b) {
  return _mm256_fmadd_ps(a, same_lanes(b), sum);
}
static inline Lanes canonical_lanes(Lanes x) {
  return _mm256_blendv_ps(x, same_lanes(from_bits(kQuietNanBits)), _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}
static inline Lanes lanes_of_bytes(const Byte* at) {
  return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
static inline Lanes lanes_of_signed_bytes(const Byte* at) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at))));
}
#else
constexpr std::size_t kLanes = 1, kRegisters = 1;
using Lanes = float;
static inline Lanes same_lanes(float x) {
  return x;
}
static inline Lanes load_lanes(const float* at) {
  return *at;
}
static inline void store_lanes(float* at, Lanes x) {
  *at = x;
}
static inline Lanes add_product(Lanes sum, Lanes a, float b) {
  return sum + a * b;
}
static inline Lanes canonical_lanes(Lanes x) {
  return canonical(x);
}
static inline Lanes lanes_of_bytes(const Byte* at) {
  return static_cast<float>(*at);
}
static inline Lanes lanes_of_signed_bytes(const Byte* at) {
  return static_cast<float>(static_cast<std::int8_t>(*at));
}
#endif

// [Note: two widths] Compilers vectorize a loop over one width well, and one over bytes and floats badly. So loops
// compute codes as 32-bit numbers, and these two functions change the width.

// to[i] = the lowest byte of from[i]
static inline void narrow(const Bits32* from, std::size_t count, Byte* to) {
  std::size_t i = 0;
#if defined(COMMLIB_WITH_AVX512)
  for (; i + 16 <= count; i += 16) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(_mm512_loadu_si512(from + i)));
  }
#elif defined(COMMLIB_WITH_AVX2)
  const __m256i mask = _mm256_set1_epi32(0xFF);
  for (; i + 16 <= count; i += 16) {
    const auto* at = reinterpret_cast<const __m256i*>(from + i);
    const __m256i low = _mm256_and_si256(_mm256_loadu_si256(at), mask);
    const __m256i high = _mm256_and_si256(_mm256_loadu_si256(at + 1), mask);
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(low, high), 0xD8);
    const __m128i bytes = _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), bytes);
  }
#endif
  for (; i < count; ++i) to[i] = static_cast<Byte>(from[i]);
}

static inline void widen(const Byte* from, std::size_t count, Bits32* to) {
  std::size_t i = 0;
#if defined(COMMLIB_WITH_AVX512)
  for (; i + 16 <= count; i += 16) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    _mm512_storeu_si512(to + i, _mm512_cvtepu8_epi32(bytes));
  }
#elif defined(COMMLIB_WITH_AVX2)
  for (; i + 8 <= count; i += 8) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i), _mm256_cvtepu8_epi32(bytes));
  }
#endif
  for (; i < count; ++i) to[i] = from[i];
}

// to[i] = from[i] / 2^16
static inline void fractions(const std::uint16_t* from, std::size_t count, float* to) {
  std::size_t i = 0;
#if defined(COMMLIB_WITH_AVX512)
  for (; i + 16 <= count; i += 16) {
    const __m256i numbers = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i));
    const __m512 floats = _mm512_cvtepi32_ps(_mm512_cvtepu16_epi32(numbers));
    _mm512_storeu_ps(to + i, _mm512_mul_ps(floats, _mm512_set1_ps(0x1.0p-16f)));
  }
#elif defined(COMMLIB_WITH_AVX2)
  for (; i + 8 <= count; i += 8) {
    const __m128i numbers = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i));
    const __m256 floats = _mm256_cvtepi32_ps(_mm256_cvtepu16_epi32(numbers));
    _mm256_storeu_ps(to + i, _mm256_mul_ps(floats, _mm256_set1_ps(0x1.0p-16f)));
  }
#endif
  for (; i < count; ++i) to[i] = static_cast<float>(static_cast<int>(from[i])) * 0x1.0p-16f;
}

// --- Philox for runs of counters -------------------------------------------------------------------------------------
//
// Compilers do not recognize that a 32 by 32 bit product is 64 bits with one instruction for every second lane, so this
// is written out: a counter's words are in the low halves of 64-bit lanes, whose upper halves hold leftover product
// bits.

#if defined(COMMLIB_WITH_AVX512)
constexpr std::size_t kPhiloxLanes = 8;
using PhiloxLanes = __m512i;
static inline PhiloxLanes low_products(PhiloxLanes a, PhiloxLanes b) {
  return _mm512_mul_epu32(a, b);
}
static inline PhiloxLanes all_lanes(std::uint64_t word) {
  return _mm512_set1_epi64(static_cast<long long>(word));
}
static inline PhiloxLanes upper_halves(PhiloxLanes a) {
  return _mm512_srli_epi64(a, 32);
}
static inline PhiloxLanes exclusive_or(PhiloxLanes a, PhiloxLanes b, PhiloxLanes c) {
  return _mm512_ternarylogic_epi64(a, b, c, 0x96);
}
static inline PhiloxLanes lanes_from(std::uint64_t first) {
  return _mm512_add_epi64(all_lanes(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
}
// Stores the four words of each counter, one counter after another.
static inline void store_words(PhiloxLanes w0, PhiloxLanes w1, PhiloxLanes w2, PhiloxLanes w3, std::uint16_t* out) {
  constexpr __mmask16 kOdd = 0xAAAA;
  const __m512i first = _mm512_mask_blend_epi32(kOdd, w0, _mm512_slli_epi64(w1, 32));
  const __m512i second = _mm512_mask_blend_epi32(kOdd, w2, _mm512_slli_epi64(w3, 32));
  const __m512i low = _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), high = _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15);
  _mm512_storeu_si512(out, _mm512_permutex2var_epi64(first, low, second));
  _mm512_storeu_si512(out + 32, _mm512_permutex2var_epi64(first, high, second));
}
#elif defined(COMMLIB_WITH_AVX2)
constexpr std::size_t kPhiloxLanes = 4;
using PhiloxLanes = __m256i;
static inline PhiloxLanes low_products(PhiloxLanes a, PhiloxLanes b) {
  return _mm256_mul_epu32(a, b);
}
static inline PhiloxLanes all_lanes(std::uint64_t word) {
  return _mm256_set1_epi64x(static_cast<long long>(word));
}
static inline PhiloxLanes upper_halves(PhiloxLanes a) {
  return _mm256_srli_epi64(a, 32);
}
static inline PhiloxLanes exclusive_or(PhiloxLanes a, PhiloxLanes b, PhiloxLanes c) {
  return _mm256_xor_si256(_mm256_xor_si256(a, b), c);
}
static inline PhiloxLanes lanes_from(std::uint64_t first) {
  return _mm256_add_epi64(all_lanes(first), _mm256_setr_epi64x(0, 1, 2, 3));
}
static inline void store_words(PhiloxLanes w0, PhiloxLanes w1, PhiloxLanes w2, PhiloxLanes w3, std::uint16_t* out) {
  constexpr int kOdd = 0xAA;
  const __m256i first = _mm256_blend_epi32(w0, _mm256_slli_epi64(w1, 32), kOdd);
  const __m256i second = _mm256_blend_epi32(w2, _mm256_slli_epi64(w3, 32), kOdd);
  const __m256i even = _mm256_unpacklo_epi64(first, second), odd = _mm256_unpackhi_epi64(first, second);
  auto* to = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(to, _mm256_permute2x128_si256(even, odd, 0x20));
  _mm256_storeu_si256(to + 1, _mm256_permute2x128_si256(even, odd, 0x31));
}
#else
constexpr std::size_t kPhiloxLanes = 1;
#endif

// Writes the words of `count` counters from `first` on, as 16-bit numbers in order (each word's low half first). Writes
// whole groups of kPhiloxLanes counters.
static inline void philox_run(const Random& random, std::uint64_t first, std::size_t count, std::uint16_t* out) {
#if defined(COMMLIB_WITH_AVX512) || defined(COMMLIB_WITH_AVX2)
  const PhiloxLanes first_factor = all_lanes(0xD2511F53u), second_factor = all_lanes(0xCD9E8D57u);
  PhiloxLanes keys[20];
  for (Bits32 round = 0; round < 10; ++round) {
    keys[2 * round] = all_lanes(random.key[0] + round * 0x9E3779B9u);
    keys[2 * round + 1] = all_lanes(random.key[1] + round * 0xBB67AE85u);
  }
#endif
  for (std::size_t i = 0; i < count; i += kPhiloxLanes, out += 8 * kPhiloxLanes) {
    const std::uint64_t counter = first + i;
#if defined(COMMLIB_WITH_AVX512) || defined(COMMLIB_WITH_AVX2)
    PhiloxLanes c0 = lanes_from(counter), c1 = upper_halves(c0);
    PhiloxLanes c2 = all_lanes(random.step), c3 = all_lanes(random.stage_and_rank);
    for (int round = 0; round < 10; ++round) {
      const PhiloxLanes product = low_products(c0, first_factor), other = low_products(c2, second_factor);
      c0 = exclusive_or(upper_halves(other), c1, keys[2 * round]);
      c2 = exclusive_or(upper_halves(product), c3, keys[2 * round + 1]);
      c1 = other;
      c3 = product;
    }
    store_words(c0, c1, c2, c3, out);
#else
    const Words words = philox(static_cast<Bits32>(counter), static_cast<Bits32>(counter >> 32), random.step,
                               random.stage_and_rank, random.key[0], random.key[1]);
    for (std::size_t w = 0; w < 4; ++w) {
      out[2 * w] = static_cast<std::uint16_t>(words.word[w]);
      out[2 * w + 1] = static_cast<std::uint16_t>(words.word[w] >> 16);
    }
#endif
  }
}
