// The engine's operations of a codec, built from its two block functions: the second half of codec_impl.h.

// --- stochastic rounding ---------------------------------------------------------------------------------------------

// Fills u for the `m` elements from global offset `offset` on.
static inline void fill_run(const Random& random, std::uint64_t offset, std::size_t m, float* u) {
  alignas(64) std::uint16_t numbers[kMostTile + 8 * (kPhiloxLanes + 1)];
  const std::size_t skip = offset % 8;
  philox_run(random, offset / 8, (skip + m + 7) / 8, numbers);
  fractions(numbers + skip, m, u);
}

// Calls fill(global offset, count, done) for each run of the tensor's elements `start` to `start + m` with consecutive
// global offsets; `done` is the number of elements before it.
template <class Fill>
static inline void for_segments(const Random& random, std::uint64_t start, std::size_t m, const Fill& fill) {
  std::size_t low = 0, high = random.num_segments;  // the last segment that starts at or before `start`
  while (high - low > 1) {
    const std::size_t middle = (low + high) / 2;
    (random.segments[middle].start <= start ? low : high) = middle;
  }
  for (std::size_t done = 0; done < m; ++low) {
    const Segment& segment = random.segments[low];
    const std::uint64_t end = low + 1 < random.num_segments ? random.segments[low + 1].start : ~std::uint64_t{0};
    const std::uint64_t at = start + done;
    const std::size_t count = end - at < m - done ? static_cast<std::size_t>(end - at) : m - done;
    fill(segment.offset + (at - segment.start), count, done);
    done += count;
  }
}

// Fills u for the elements `start` to `start + m` of the tensor.
static inline void fill_uniforms(const Random& random, std::uint64_t start, std::size_t m, float* u) {
  for_segments(random, start, m, [&](std::uint64_t offset, std::size_t count, std::size_t done) {
    fill_run(random, offset, count, u + done);
  });
}

// --- one block -------------------------------------------------------------------------------------------------------

template <class Codec>
struct Place {  // block `block` in a payload
  Byte* minima;
  Byte* scale;
  Byte* codes;

  Place(Byte* payload, const Layout& layout, std::size_t block)
      : minima(payload + (Codec::kIsOneBlock ? 0 : block * Codec::kMinimumBytes)),
        scale(payload + layout.scales_at + block * Codec::kScaleBytes),
        codes(payload + layout.codes_at + block * (Codec::kBlock * Codec::kBits / 8)) {}
};

// A constant number of elements makes the loops of full blocks free of tails.
template <bool kDecodes, class Codec>
static inline bool encode_block(const float* v, std::size_t m, const float* u, const Place<Codec>& to, float* decoded) {
  if (m == Codec::kBlock) {
    return Codec::template encode<kDecodes>(v, Codec::kBlock, u, to.minima, to.scale, to.codes, decoded);
  }
  return Codec::template encode<kDecodes>(v, m, u, to.minima, to.scale, to.codes, decoded);
}

template <class Codec, bool kAdds = false>
static inline void decode_block(const Byte* payload, const Layout& layout, std::size_t block, std::size_t m,
                                float* out) {
  const Place<Codec> from(const_cast<Byte*>(payload), layout, block);
  if (m == Codec::kBlock) {
    Codec::template decode<kAdds>(from.codes, from.scale, from.minima, Codec::kBlock, out);
  } else {
    Codec::template decode<kAdds>(from.codes, from.scale, from.minima, m, out);
  }
}

// Blocks are processed in tiles of at least this many elements, to amortize the work per tile.
template <class Codec>
constexpr std::size_t kTileBlocks = Codec::kBlock < 256 ? 256 / Codec::kBlock : 1;
template <class Codec>
constexpr std::size_t kTileElements = kTileBlocks<Codec> * Codec::kBlock;

template <class Codec>
static inline std::size_t tile_elements(std::size_t at, std::size_t numel) {
  return numel - at < kTileElements<Codec> ? numel - at : kTileElements<Codec>;
}

// Calls work(block, first element in the tile, count) for each block of the tile of `m` elements starting at `block`.
template <class Codec, class Work>
static inline void for_blocks(std::size_t block, std::size_t m, const Work& work) {
  for (std::size_t at = 0; at < m; at += Codec::kBlock, ++block) {
    work(block, at, m - at < Codec::kBlock ? m - at : Codec::kBlock);
  }
}

// Decodes the `m` values of the tile starting at `block`.
template <class Codec>
static inline void decode_tile(const Byte* payload, const Layout& layout, std::size_t block, std::size_t m,
                               float* out) {
  for_blocks<Codec>(block, m, [&](std::size_t which, std::size_t at, std::size_t count) {
    decode_block<Codec>(payload, layout, which, count, out + at);
  });
}

template <class Codec, class = void>
constexpr bool kHasReader = false;
template <class Codec>
constexpr bool kHasReader<Codec, std::void_t<typename Codec::Reader>> =
    kLanes > 1 && !std::is_void_v<typename Codec::Reader>;

template <class Codec>
static inline typename Codec::Reader reader_of(const Byte* payload, const Layout& layout, std::size_t block) {
  const Place<Codec> from(const_cast<Byte*>(payload), layout, block);
  return typename Codec::Reader(from.codes, from.scale, from.minima);
}

// Prefetches the codes that are read half a page later, and the parameters of codes, one cache line at a time.
template <class Codec>
COMMLIB_INLINE void ask_ahead(const Place<Codec>& from, std::size_t block, std::size_t at, std::size_t nbytes) {
  constexpr std::size_t kCodesAhead = 2048, kParametersAhead = 192;  // bytes
  constexpr std::size_t kScalesInLine = 64 / Codec::kScaleBytes;
  prefetch_behind(from.codes + at, nbytes, kCodesAhead);
  if (at != 0 || block % kScalesInLine != 0) return;
  prefetch_behind(from.scale, 1, kParametersAhead);
  prefetch_behind(from.minima, kScalesInLine * Codec::kMinimumBytes, kParametersAhead);
}

// The divisor of a sum. For a power of two, multiplication by the inverse is exact and faster.
struct Divisor {
  float value, factor;
  bool is_power;
  explicit Divisor(float divisor)
      : value(divisor),
        factor(1.0f / divisor),
        is_power((to_bits(divisor) & 0x807FFFFFu) == 0 && divisor >= 1.0f && divisor <= 0x1p126f) {}
};

// Adds one register set of values of an input to `sum`, or stores them there if it is the first input.
template <class Codec, bool kIsFirst>
COMMLIB_INLINE void add_lanes(const Byte* input, const Layout& layout, std::size_t block, std::size_t at,
                              Lanes (&sum)[kRegisters]) {
  const Place<Codec> from(const_cast<Byte*>(input), layout, block);
  ask_ahead<Codec>(from, block, at, kRegisters * kLanes * Codec::kBits / 8);
  const typename Codec::Reader reader(from.codes, from.scale, from.minima);
  if constexpr (kIsFirst) {
    for (std::size_t k = 0; k < kRegisters; ++k) sum[k] = reader(at + k * kLanes);
  } else if (has_exact_products(reader.s)) {
    for (std::size_t k = 0; k < kRegisters; ++k) sum[k] = reader.added_to(sum[k], at + k * kLanes);
  } else {
    for (std::size_t k = 0; k < kRegisters; ++k) sum[k] += reader(at + k * kLanes);
  }
}

// Computes the mean of one register set of elements of a whole block, from element `at` on, across the inputs.
//
// [Note: instructions of their own] A core predicts the next address of a load instruction from its previous ones.
// Inputs that alternate at one instruction look like jumps: sums from memory then took a quarter longer (AMD Zen 5).
template <class Codec>
COMMLIB_INLINE void sum_lanes(const Byte* const* inputs, std::size_t num_inputs, const Divisor& divisor,
                              const Layout& layout, std::size_t block, std::size_t at, Lanes (&sum)[kRegisters]) {
  constexpr std::size_t kOfTheirOwn = 8;
  add_lanes<Codec, true>(inputs[0], layout, block, at, sum);
  for (std::size_t input = 1; input < num_inputs; input += kOfTheirOwn) {
    const std::size_t left = num_inputs - input;
#pragma GCC unroll 8
    for (std::size_t k = 0; k < kOfTheirOwn; ++k) {
      if (k < left) add_lanes<Codec, false>(inputs[input + k], layout, block, at, sum);
    }
  }
  if (divisor.is_power) {
    for (std::size_t k = 0; k < kRegisters; ++k) sum[k] = sum[k] * divisor.factor;
  } else {
    for (std::size_t k = 0; k < kRegisters; ++k) sum[k] = sum[k] / divisor.value;
  }
}

template <class Codec>
static inline void sum_block(const Byte* const* inputs, std::size_t num_inputs, const Divisor& divisor,
                             const Layout& layout, std::size_t block, float* total) {
  for (std::size_t at = 0; at < Codec::kBlock; at += kRegisters * kLanes) {
    Lanes sum[kRegisters];
    sum_lanes<Codec>(inputs, num_inputs, divisor, layout, block, at, sum);
    for (std::size_t k = 0; k < kRegisters; ++k) store_lanes(total + at + k * kLanes, sum[k]);
  }
}

// Sums the inputs' tiles, for any codec and any length.
template <class Codec>
static inline void sum_inputs(const Byte* const* inputs, std::size_t num_inputs, const Layout& layout,
                              std::size_t block, std::size_t m, float* total) {
  for (std::size_t input = 0; input < num_inputs; ++input) {
    const Place<Codec> from(const_cast<Byte*>(inputs[input]), layout, block);
    prefetch_behind(from.codes, m * Codec::kBits / 8);
    if (input == 0) {
      decode_tile<Codec>(inputs[0], layout, block, m, total);
      continue;
    }
    for_blocks<Codec>(block, m, [&](std::size_t which, std::size_t at, std::size_t count) {
      decode_block<Codec, true>(inputs[input], layout, which, count, total + at);
    });
  }
}

template <class Codec>
static inline void sum_tile(const Byte* const* inputs, std::size_t num_inputs, float divisor, const Layout& layout,
                            std::size_t block, std::size_t m, float* total) {
  const Divisor by(divisor);
  if constexpr (kHasReader<Codec>) {
    const std::size_t whole = m - m % Codec::kBlock;
    for_blocks<Codec>(block, whole, [&](std::size_t which, std::size_t at, std::size_t) {
      sum_block<Codec>(inputs, num_inputs, by, layout, which, total + at);
    });
    if (whole == m) return;
    block += whole / Codec::kBlock;
    total += whole;
    m -= whole;
  }
  sum_inputs<Codec>(inputs, num_inputs, layout, block, m, total);
  if (by.is_power && divisor != 1.0f) {
    for (std::size_t i = 0; i < m; ++i) total[i] *= by.factor;
  } else if (divisor != 1.0f) {
    for (std::size_t i = 0; i < m; ++i) total[i] /= divisor;
  }
}

// Returns v = x + beta * residual (x alone without a residual): x itself if it can be read in place, else `buffer`.
COMMLIB_INLINE const float* compensate(const void* x, DType type, const float* residual, float beta, std::size_t at,
                                       std::size_t m, float* buffer) {
  const float* v = static_cast<const float*>(x) + at;
  if (type != DType::kFloat32) {
    load_values(x, type, at, m, buffer);
    v = buffer;
  }
  if (residual == nullptr) return v;
  for (std::size_t i = 0; i < m; ++i) buffer[i] = v[i] + beta * residual[at + i];
  return buffer;
}

// Returns the values to encode, of the tile starting at `block`. If nothing else is read, x is also prefetched from
// further ahead; with a residual as well, that was slower. The residual is prefetched where it is written
// (encode_tile): both prefetches at once exceed a core's outstanding requests, and it would stall (AMD Zen 4). For data
// in the cache, prefetching only costs time.
template <class Codec, bool kIsAlone>
COMMLIB_INLINE const float* values_of(const EncodeJob& job, std::size_t block, std::size_t m, float* buffer) {
  const std::size_t at = block * Codec::kBlock;
  if (job.x != nullptr) {
    if (job.exceeds_cache) {
      const std::size_t size = element_bytes(job.type);
      prefetch_behind(static_cast<const Byte*>(job.x) + at * size, m * size);
      if constexpr (kIsAlone) prefetch_behind(static_cast<const Byte*>(job.x) + at * size, m * size, 7168);
    }
    return compensate(job.x, job.type, job.residual, job.beta, at, m, buffer);
  }
  sum_tile<Codec>(job.inputs, job.num_inputs, job.divisor, job.layout, block, m, buffer);
  if (job.residual != nullptr) {
    const float* residual = job.residual + at;
    for (std::size_t i = 0; i < m; ++i) buffer[i] += job.beta * residual[i];
  }
  return buffer;
}

static inline std::size_t elements_of(std::size_t block, std::size_t block_size, std::size_t numel) {
  const std::size_t left = numel - block * block_size;
  return left < block_size ? left : block_size;
}

// --- many blocks -----------------------------------------------------------------------------------------------------

static inline void replace_residual(const float* v, const float* decoded, float gamma, bool are_finite, std::size_t m,
                                    float* residual) {
  if (are_finite) {
    for (std::size_t i = 0; i < m; ++i) residual[i] = (v[i] - decoded[i]) * gamma;
    return;
  }
  for (std::size_t i = 0; i < m; ++i) {
    const float rest = (v[i] - decoded[i]) * gamma;
    residual[i] = is_finite_number(decoded[i]) ? rest : residual[i];
  }
}

// Encodes one tile of at most kMost elements: values, payload, and residuals if kFeeds.
template <class Codec, bool kFeeds, std::size_t kMost>
COMMLIB_INLINE void encode_tile(const EncodeJob& job, std::size_t block, std::size_t m) {
  constexpr std::size_t kCodeBytes = kMost * Codec::kBits / 8;
  alignas(64) float buffer[kMost], decoded[kFeeds ? kMost : 1], uniforms[kMost];
  alignas(64) Byte staged[kCodeBytes];
  const float* v = values_of<Codec, !kFeeds>(job, block, m, buffer);
  const float* u = nullptr;
  if (job.random != nullptr) {
    fill_uniforms(*job.random, job.first + block * Codec::kBlock, m, uniforms);
    u = uniforms;
  }
  bool are_finite = true;
  for_blocks<Codec>(block, m, [&](std::size_t which, std::size_t at, std::size_t count) {
    Place<Codec> to(job.payload, job.layout, which);
    if (job.streams) to.codes = staged + at * Codec::kBits / 8;
    const float* numbers = u == nullptr ? nullptr : u + at;
    are_finite &= encode_block<kFeeds>(v + at, count, numbers, to, kFeeds ? decoded + at : nullptr);
  });
  if (job.streams) stream_copy(Place<Codec>(job.payload, job.layout, block).codes, staged, (m * Codec::kBits + 7) / 8);
  if constexpr (kFeeds) {
    if (job.exceeds_cache) prefetch_behind(job.residual + block * Codec::kBlock, m * sizeof(float));
    replace_residual(v, decoded, job.gamma, are_finite, m, job.residual + block * Codec::kBlock);
  }
}

template <class Codec, bool kFeeds, std::size_t kMost>
COMMLIB_INLINE void encode_tiles(const EncodeJob& job, std::size_t begin, std::size_t end) {
  const std::size_t last = end * Codec::kBlock < job.numel ? end * Codec::kBlock : job.numel;
  for (std::size_t at = begin * Codec::kBlock; at < last; at += kMost) {
    encode_tile<Codec, kFeeds, kMost>(job, at / Codec::kBlock, last - at < kMost ? last - at : kMost);
  }
  if (job.streams) finish_streams();
}

// Whether a block of a sum fits in registers. It then needs no memory and is summed while the previous one is encoded.
template <class Codec>
constexpr bool kEncodesLanes = kHasReader<Codec> && Codec::kBlock == kRegisters * kLanes;

// Encodes whole blocks of a sum.
template <class Codec>
static void encode_sums(const EncodeJob& job, std::size_t begin, std::size_t end) {
  const Divisor by(job.divisor);
  alignas(64) Byte staged[Codec::kBlock];
  for (std::size_t block = begin; block < end; ++block) {
    Lanes sum[kRegisters];
    sum_lanes<Codec>(job.inputs, job.num_inputs, by, job.layout, block, 0, sum);
    const Place<Codec> to(job.payload, job.layout, block);
    Codec::encode_lanes(sum, to.minima, to.scale, job.streams ? staged : to.codes);
    if (job.streams) stream_copy(to.codes, staged, Codec::kBlock);
  }
  if (job.streams) finish_streams();
}

template <class Codec>
static void encode_blocks(const EncodeJob& job, std::size_t begin, std::size_t end) {
  constexpr std::size_t kMost = kTileElements<Codec>;
  if (job.residual != nullptr) return encode_tiles<Codec, true, kMost>(job, begin, end);
  if constexpr (kEncodesLanes<Codec>) {
    if (job.x == nullptr && job.random == nullptr) {
      const std::size_t whole = job.numel / Codec::kBlock;
      encode_sums<Codec>(job, begin, end < whole ? end : whole);
      if (end > whole) encode_tiles<Codec, false, kMost>(job, whole, end);
      return;
    }
  }
  encode_tiles<Codec, false, kMost>(job, begin, end);
}

template <class Codec>
static void range_of_blocks(const EncodeJob& job, std::size_t begin, std::size_t end, std::int32_t range[2]) {
  alignas(64) float buffer[Codec::kBlock];
  for (std::size_t block = begin; block < end; ++block) {
    const std::size_t m = elements_of(block, Codec::kBlock, job.numel);
    find_range(values_of<Codec, false>(job, block, m, buffer), m, range);
  }
}

// The tile's values are decoded to a buffer and written to `out`, with non-temporal stores if the job requests them.
template <class Codec>
static inline void decode_tile_to(const DecodeJob& job, std::size_t block, std::size_t m) {
  alignas(64) float total[kTileElements<Codec>], before[kTileElements<Codec>];
  const std::size_t at = block * Codec::kBlock;
  sum_tile<Codec>(job.inputs, job.num_inputs, job.divisor, job.layout, block, m, total);
  if (job.adds) {
    load_values(job.out, job.type, at, m, before);
    const float weight = job.weight;
    for (std::size_t i = 0; i < m; ++i) total[i] = before[i] + weight * total[i];
  }
  if (job.streams) {
    alignas(64) double staged[kTileElements<Codec>];
    store_values(staged, job.type, 0, m, total);
    const std::size_t size = element_bytes(job.type);
    stream_copy(static_cast<Byte*>(job.out) + at * size, staged, m * size);
  } else {
    store_values(job.out, job.type, at, m, total);
  }
}

// out += weight * value, for a whole block of floats.
template <class Codec>
static inline void add_block(const DecodeJob& job, std::size_t block) {
  float* const out = static_cast<float*>(job.out) + block * Codec::kBlock;
  for (std::size_t at = 0; at < Codec::kBlock; at += kRegisters * kLanes) {
    prefetch_behind(Place<Codec>(const_cast<Byte*>(job.inputs[0]), job.layout, block).codes + at, kRegisters * kLanes);
    const auto reader = reader_of<Codec>(job.inputs[0], job.layout, block);
    Lanes x[kRegisters];
    for (std::size_t k = 0; k < kRegisters; ++k) {
      x[k] = load_lanes(out + at + k * kLanes) + job.weight * reader(at + k * kLanes);
    }
    for (std::size_t k = 0; k < kRegisters; ++k) store_lanes(out + at + k * kLanes, canonical_lanes(x[k]));
  }
}

template <class Codec>
static void decode_blocks(const DecodeJob& job, std::size_t begin, std::size_t end) {
  const bool is_plain = job.num_inputs == 1 && job.divisor == 1.0f && !job.adds && job.type == DType::kFloat32;
  const std::size_t last = end * Codec::kBlock < job.numel ? end * Codec::kBlock : job.numel;
  alignas(64) float decoded[kTileElements<Codec>];
  for (std::size_t block = begin; block < end; block += kTileBlocks<Codec>) {
    const std::size_t at = block * Codec::kBlock, m = tile_elements<Codec>(at, last);
    if constexpr (kHasReader<Codec>) {
      if (job.adds && job.type == DType::kFloat32 && m == Codec::kBlock) {
        add_block<Codec>(job, block);
        continue;
      }
    }
    if (!is_plain) {
      decode_tile_to<Codec>(job, block, m);
    } else if (job.streams) {
      prefetch_behind(Place<Codec>(const_cast<Byte*>(job.inputs[0]), job.layout, block).codes, m * Codec::kBits / 8);
      decode_tile<Codec>(job.inputs[0], job.layout, block, m, decoded);
      stream_copy(static_cast<float*>(job.out) + at, decoded, m * sizeof(float));
    } else {
      decode_tile<Codec>(job.inputs[0], job.layout, block, m, static_cast<float*>(job.out) + at);
    }
  }
  if (job.streams) finish_streams();
}

#include "hadamard_impl.h"

template <int kId, class Codec>
static inline void add_codec(CodecKernels& kernels, const char* name) {
  static_assert(kId > 0 && kId < kCodecIds);
  kernels.shapes[kId] = {
      name, Codec::kBlock, Codec::kBits, Codec::kScaleBytes, Codec::kMinimumBytes, Codec::kIsOneBlock};
  kernels.encode[kId] = &encode_blocks<Codec>;
  kernels.decode[kId] = &decode_blocks<Codec>;
}

static inline CodecKernels make_codec_kernels() {
  CodecKernels kernels = {};
  add_codec<1, Integer<8, 127, 256>>(kernels, "int8");
  add_codec<2, MinMax>(kernels, "uint8_minmax");
  add_codec<3, Bagua>(kernels, "uint8_bagua");
  add_codec<4, Integer<4, 7, 128>>(kernels, "int4");
  add_codec<5, Integer<2, 1, 128>>(kernels, "int2");
  add_codec<6, OneBit>(kernels, "onebit");
  add_codec<7, Float8<E4M3>>(kernels, "fp8_e4m3");
  add_codec<8, Float8<E5M2>>(kernels, "fp8_e5m2");
  add_codec<9, Microscaling<E4M3, 8>>(kernels, "mxfp8");
  add_codec<10, Microscaling<E2M1, 4>>(kernels, "mxfp4");
  add_codec<11, Cast16<BFloat16>>(kernels, "bf16");
  add_codec<12, Cast16<Float16>>(kernels, "fp16");
  kernels.range = &range_of_blocks<Bagua>;
  kernels.rotate = &rotate_pieces;
  kernels.stream_copy = [](void* dst, const void* src, std::size_t nbytes) {
    stream_copy(dst, src, nbytes);
    finish_streams();
  };
  return kernels;
}
