// The random Hadamard rotation, compiled once per instruction set; included after codec_impl.h.

// Sets signs[i] to 0 or the sign bit, for the `m` elements from global offset `offset` on.
static inline void fill_sign_run(const Random& random, std::uint64_t offset, std::size_t m, Bits32* signs) {
  alignas(64) Bits32 made[128];
  for (std::size_t done = 0; done < m;) {
    const std::uint64_t counter = (offset + done) / 128;
    const Words words = philox(static_cast<Bits32>(counter), static_cast<Bits32>(counter >> 32), random.step,
                               random.stage_and_rank, random.key[0], random.key[1]);
    for (std::size_t w = 0; w < 4; ++w) {
      for (std::size_t k = 0; k < 32; ++k) made[32 * w + k] = words.word[w] >> k << 31;
    }
    const std::size_t skip = (offset + done) % 128, count = m - done < 128 - skip ? m - done : 128 - skip;
    std::memcpy(signs + done, made + skip, count * sizeof(Bits32));
    done += count;
  }
}

// Pairs that are closer than the register width: each element becomes its partner plus itself, or minus itself if it is
// the second one. This is bitwise equal to the sum or difference.
#if defined(COMMLIB_WITH_AVX512)
template <int kHalf>
static inline __m512 partners(__m512 t) {
  if constexpr (kHalf == 1) return _mm512_permute_ps(t, 0xB1);
  if constexpr (kHalf == 2) return _mm512_permute_ps(t, 0x4E);
  if constexpr (kHalf == 4) return _mm512_shuffle_f32x4(t, t, 0xB1);
  if constexpr (kHalf == 8) return _mm512_shuffle_f32x4(t, t, 0x4E);
}
template <int kHalf>
static inline __m512 butterfly(__m512 t) {
  constexpr auto kSecond = static_cast<__mmask16>(kHalf == 1   ? 0xAAAA
                                                  : kHalf == 2 ? 0xCCCC
                                                  : kHalf == 4 ? 0xF0F0
                                                               : 0xFF00);
  return _mm512_mask_sub_ps(_mm512_add_ps(partners<kHalf>(t), t), kSecond, partners<kHalf>(t), t);
}
// h = 1, 2, 4 and 8.
static inline void near_butterflies(float* t, std::size_t length) {
  for (std::size_t i = 0; i < length; i += 16) {
    const __m512 x = butterfly<2>(butterfly<1>(_mm512_loadu_ps(t + i)));
    _mm512_storeu_ps(t + i, butterfly<8>(butterfly<4>(x)));
  }
}
#elif defined(COMMLIB_WITH_AVX2)
template <int kHalf>
static inline __m256 butterfly(__m256 t) {
  __m256 partners = t;
  if constexpr (kHalf == 1) partners = _mm256_permute_ps(t, 0xB1);
  if constexpr (kHalf == 2) partners = _mm256_permute_ps(t, 0x4E);
  if constexpr (kHalf == 4) partners = _mm256_permute2f128_ps(t, t, 1);
  constexpr int kSecond = kHalf == 1 ? 0xAA : kHalf == 2 ? 0xCC : 0xF0;
  return _mm256_blend_ps(_mm256_add_ps(partners, t), _mm256_sub_ps(partners, t), kSecond);
}
#endif

template <std::size_t kHalf>
static inline void butterflies(float* t, std::size_t length) {
  for (std::size_t i = 0; i < length; i += 2 * kHalf) {
    for (std::size_t j = i; j < i + kHalf; ++j) {
      const float a = t[j], b = t[j + kHalf];
      t[j] = a + b;
      t[j + kHalf] = a - b;
    }
  }
}

#if !defined(COMMLIB_WITH_AVX512)
// h = 1, 2, 4 and 8.
static inline void near_butterflies(float* t, std::size_t length) {
#if defined(COMMLIB_WITH_AVX2)
  for (std::size_t i = 0; i < length; i += 8) {
    _mm256_storeu_ps(t + i, butterfly<4>(butterfly<2>(butterfly<1>(_mm256_loadu_ps(t + i)))));
  }
#else
  butterflies<1>(t, length);
  butterflies<2>(t, length);
  butterflies<4>(t, length);
#endif
  butterflies<8>(t, length);
}
#endif

template <std::size_t kLength>
static inline void transform(float* t) {
  if constexpr (kLength >= 16) {
    near_butterflies(t, kLength);
  } else {
    if constexpr (kLength >= 2) butterflies<1>(t, kLength);
    if constexpr (kLength >= 4) butterflies<2>(t, kLength);
    if constexpr (kLength >= 8) butterflies<4>(t, kLength);
  }
  if constexpr (kLength >= 32) butterflies<16>(t, kLength);
  if constexpr (kLength >= 64) butterflies<32>(t, kLength);
  if constexpr (kLength >= 128) butterflies<64>(t, kLength);
  if constexpr (kLength >= 256) butterflies<128>(t, kLength);
  constexpr float kScales[] = {1.0f,           0x1.6a09e6p-1f, 0x1p-1f,        0x1.6a09e6p-2f, 0x1p-2f,
                               0x1.6a09e6p-3f, 0x1p-3f,        0x1.6a09e6p-4f, 0x1p-4f};
  constexpr std::size_t kPower = kLength == 1     ? 0
                                 : kLength == 2   ? 1
                                 : kLength == 4   ? 2
                                 : kLength == 8   ? 3
                                 : kLength == 16  ? 4
                                 : kLength == 32  ? 5
                                 : kLength == 64  ? 6
                                 : kLength == 128 ? 7
                                                  : 8;
  for (std::size_t i = 0; i < kLength; ++i) t[i] *= kScales[kPower];
}

// Transforms the rest of a chunk, in pieces whose lengths are the powers of two of its length, the largest first.
static inline void transform_rest(float* t, std::size_t m) {
  if (m & 128) transform<128>(t), t += 128;
  if (m & 64) transform<64>(t), t += 64;
  if (m & 32) transform<32>(t), t += 32;
  if (m & 16) transform<16>(t), t += 16;
  if (m & 8) transform<8>(t), t += 8;
  if (m & 4) transform<4>(t), t += 4;
  if (m & 2) transform<2>(t), t += 2;
  if (m & 1) transform<1>(t);
}

static void rotate_pieces(const RotateJob& job, std::size_t begin, std::size_t end) {
  alignas(64) float t[kRotationPiece];
  alignas(64) Bits32 signs[kRotationPiece];
  for (std::size_t piece = begin; piece < end; ++piece) {
    const std::size_t at = piece * kRotationPiece, m = elements_of(piece, kRotationPiece, job.numel);
    for_segments(*job.random, at, m, [&](std::uint64_t offset, std::size_t count, std::size_t done) {
      fill_sign_run(*job.random, offset, count, signs + done);
    });
    const float* x = job.x + at;
    if (job.is_inverse) {
      std::memcpy(t, x, m * sizeof(float));
    } else {
      for (std::size_t i = 0; i < m; ++i) t[i] = from_bits(to_bits(x[i]) ^ signs[i]);
    }
    if (m == kRotationPiece) {
      transform<kRotationPiece>(t);
    } else {
      transform_rest(t, m);
    }
    float* out = job.out + at;
    if (job.is_inverse) {
      for (std::size_t i = 0; i < m; ++i) out[i] = canonical(from_bits(to_bits(t[i]) ^ signs[i]));
    } else {
      for (std::size_t i = 0; i < m; ++i) out[i] = canonical(t[i]);
    }
  }
}
