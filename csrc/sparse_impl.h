// The scan of the sparse codecs, compiled once per instruction set; included after codec_impl.h.

// Returns a mask of those of 16 elements with a magnitude of at least `low` and below `low + width`.
static inline unsigned hits_of_16(const float* v, Bits32 low, Bits32 width) {
#if defined(COMMLIB_WITH_AVX512)
  const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(v), _mm512_set1_epi32(0x7FFFFFFF));
  const __m512i above = _mm512_sub_epi32(bits, _mm512_set1_epi32(static_cast<int>(low)));
  return _mm512_cmplt_epu32_mask(above, _mm512_set1_epi32(static_cast<int>(width)));
#elif defined(COMMLIB_WITH_AVX2)
  const __m256i flip = _mm256_set1_epi32(static_cast<int>(0x80000000u)), mask = _mm256_set1_epi32(0x7FFFFFFF);
  const __m256i offset = _mm256_set1_epi32(static_cast<int>(low)),
                limit = _mm256_set1_epi32(static_cast<int>(width ^ 0x80000000u));
  unsigned hits = 0;
  for (int half = 0; half < 2; ++half) {
    const __m256i bits = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(v + 8 * half)), mask);
    const __m256i above = _mm256_xor_si256(_mm256_sub_epi32(bits, offset), flip);
    const __m256i is_hit = _mm256_cmpgt_epi32(limit, above);
    hits |= static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(is_hit))) << (8 * half);
  }
  return hits;
#else
  unsigned hits = 0;
  for (unsigned k = 0; k < 16; ++k) hits |= static_cast<unsigned>((to_bits(v[k]) & kMagnitude) - low < width) << k;
  return hits;
#endif
}

static inline void append_hits(const float* v, std::size_t first, std::size_t m, Scan& scan) {
  const Bits32 width = scan.high - scan.low;
  std::size_t i = 0;
  for (; i + 16 <= m; i += 16) {
    for (unsigned hits = hits_of_16(v + i, scan.low, width); hits != 0; hits &= hits - 1) {
      const auto k = static_cast<std::size_t>(__builtin_ctz(hits));
      scan.keys[scan.count++] = make_key(to_bits(v[i + k]), first + i + k);
    }
  }
  for (; i < m; ++i) {
    if ((to_bits(v[i]) & kMagnitude) - scan.low < width) scan.keys[scan.count++] = make_key(to_bits(v[i]), first + i);
  }
}

// Replaces the tile's finite residuals by v * gamma, and those of the hits by 0 * gamma.
static inline void replace_tile_residuals(const SparseSource& source, const float* v, std::size_t at, std::size_t m,
                                          const Key* hits, std::size_t num_hits) {
  float* const residual = source.residual + at;
  const float gamma = source.gamma, sent = 0.0f * gamma;
  for (std::size_t i = 0; i < m; ++i) {
    const bool is_finite = (to_bits(v[i]) & kMagnitude) < kInfinityBits;
    const float rest = v[i] * gamma;
    residual[i] = is_finite ? rest : residual[i];
  }
  for (std::size_t i = 0; i < num_hits; ++i) {
    if (magnitude_of(hits[i]) < kInfinityBits) source.residual[index_of(hits[i])] = sent;
  }
}

static std::size_t scan_elements(const SparseSource& source, std::size_t begin, std::size_t end, Scan& scan) {
  alignas(64) float buffer[kTile];
  const std::size_t size = element_bytes(source.type);
  for (std::size_t at = begin; at < end; at += kTile) {
    if (scan.high > scan.low && scan.count + kTile > scan.capacity) return at;
    const std::size_t m = end - at < kTile ? end - at : kTile, before = scan.count;
    if (!kPrefetchesToFirstCache) {  // with first-level prefetching, scans are 5% faster without this
      prefetch_behind(static_cast<const Byte*>(source.x) + at * size, m * size);
      if (source.residual != nullptr) prefetch_behind(source.residual + at, m * sizeof(float));
    }
    const float* v = compensate(source.x, source.type, source.residual, source.beta, at, m, buffer);
    if (scan.high > scan.low) append_hits(v, at, m, scan);
    if (scan.writes) replace_tile_residuals(source, v, at, m, scan.keys + before, scan.count - before);
  }
  return end;
}

static void gather_elements(const SparseSource& source, const Bits32* indices, std::size_t count, float* out) {
  for (std::size_t i = 0; i < count; ++i) {
    __builtin_prefetch(static_cast<const Byte*>(source.x) + indices[i] * element_bytes(source.type));
    if (source.residual != nullptr) __builtin_prefetch(source.residual + indices[i]);
  }
  for (std::size_t i = 0; i < count; ++i) {
    float buffer[1] = {};
    out[i] = *compensate(source.x, source.type, source.residual, source.beta, indices[i], 1, buffer);
  }
}

static bool accumulate_elements(const void* x, DType type, float decay, float factor, float* sums, std::size_t begin,
                                std::size_t end) {
  alignas(64) float buffer[kTile];
  Bits32 largest = 0;
  for (std::size_t at = begin; at < end; at += kTile) {
    const std::size_t m = end - at < kTile ? end - at : kTile;
    const float* v = compensate(x, type, nullptr, 0.0f, at, m, buffer);
    const Bits32 bits = largest_magnitude(v, m);
    largest = bits > largest ? bits : largest;
    float* const sum = sums + at;
    COMMLIB_INDEPENDENT_ITERATIONS
    for (std::size_t i = 0; i < m; ++i) {
      const float kept = sum[i] * decay, added = kept + v[i] * factor;
      sum[i] = is_finite_number(v[i]) ? added : kept;
    }
  }
  return largest < kInfinityBits;
}

static const float* block_values(const SparseSource& source, std::size_t begin, std::size_t count, float* buffer,
                                 Bits32* maxima) {
  const std::size_t size = element_bytes(source.type);
  prefetch_behind(static_cast<const Byte*>(source.x) + begin * size, count * size);
  if (source.residual != nullptr) prefetch_behind(source.residual + begin, count * sizeof(float));
  const float* v = compensate(source.x, source.type, source.residual, source.beta, begin, count, buffer);
  if (count < kTopKBlock) return v;
  int largest[kGroups] = {};  // as ints, which more processors can compare; magnitudes have no sign
  for (std::size_t at = 0; at < kTopKBlock; at += kGroups) {
    for (std::size_t i = 0; i < kGroups; ++i) {
      const int magnitude = static_cast<int>(to_bits(v[at + i]) & kMagnitude);
      largest[i] = magnitude > largest[i] ? magnitude : largest[i];
    }
  }
  for (std::size_t i = 0; i < kGroups; ++i) maxima[i] = static_cast<Bits32>(largest[i]);
  return v;
}

static std::size_t find_elements(const float* v, std::size_t count, Bits32 low, Key* keys) {
  Scan scan = {low, 0x80000000u, false, keys, count, 0};
  append_hits(v, 0, count, scan);
  return scan.count;
}

static inline SparseKernels make_sparse_kernels() {
  return {&scan_elements, &gather_elements, &accumulate_elements, &block_values, &find_elements};
}
