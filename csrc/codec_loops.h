// What the engine asks of a codec, made of its two block functions: the second half of codec_impl.h.

// --- stochastic rounding ---------------------------------------------------------------------------------------------

// u for the `m` elements from global offset `offset` on.
static inline void fill_run(const Random& random, std::uint64_t offset, std::size_t m, float* u) {
  constexpr std::size_t kMost = kMaxBlock / 8 + 2;
  const std::size_t skip = offset % 8, count = (skip + m + 7) / 8;
  Bits32 c0[kMost], c1[kMost], c2[kMost], c3[kMost];
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t counter = offset / 8 + i;
    const Words words = philox(static_cast<Bits32>(counter), static_cast<Bits32>(counter >> 32), random.step,
                               random.stage_and_rank, random.key[0], random.key[1]);
    c0[i] = words.word[0];
    c1[i] = words.word[1];
    c2[i] = words.word[2];
    c3[i] = words.word[3];
  }
  float all[8 * kMost];
  const Bits32* const columns[4] = {c0, c1, c2, c3};
  for (std::size_t i = 0; i < count; ++i) {
    for (std::size_t w = 0; w < 4; ++w) {
      const Bits32 word = columns[w][i];
      all[8 * i + 2 * w] = static_cast<float>(static_cast<int>(word & 0xFFFFu)) * 0x1.0p-16f;
      all[8 * i + 2 * w + 1] = static_cast<float>(static_cast<int>(word >> 16)) * 0x1.0p-16f;
    }
  }
  std::memcpy(u, all + skip, m * sizeof(float));
}

// Calls fill(global offset, count, done) for each stretch of the tensor's elements `start` to `start + m` whose global
// offsets are consecutive; `done` of them came before.
template <class Fill>
static inline void for_segments(const Random& random, std::uint64_t start, std::size_t m, const Fill& fill) {
  std::size_t low = 0, high = random.num_segments;  // the last segment that begins at or before `start`
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

// u for the elements `start` to `start + m` of the tensor.
static inline void fill_uniforms(const Random& random, std::uint64_t start, std::size_t m, float* u) {
  for_segments(random, start, m, [&](std::uint64_t offset, std::size_t count, std::size_t done) {
    fill_run(random, offset, count, u + done);
  });
}

// --- one block -------------------------------------------------------------------------------------------------------

template <class Codec>
struct Place {  // of block `block` in a payload
  Byte* minima;
  Byte* scale;
  Byte* codes;

  Place(Byte* payload, const Layout& layout, std::size_t block)
      : minima(payload + (Codec::kIsOneBlock ? 0 : block * Codec::kMinimumBytes)),
        scale(payload + layout.scales_at + block * Codec::kScaleBytes),
        codes(payload + layout.codes_at + block * (Codec::kBlock * Codec::kBits / 8)) {}
};

// A constant number of elements makes the loops of full blocks free of tails.
template <class Codec>
static inline void encode_block(const float* v, std::size_t m, const float* u, const Place<Codec>& to) {
  if (m == Codec::kBlock) {
    Codec::encode(v, Codec::kBlock, u, to.minima, to.scale, to.codes);
  } else {
    Codec::encode(v, m, u, to.minima, to.scale, to.codes);
  }
}

template <class Codec>
static inline void decode_block(const Byte* payload, const Layout& layout, std::size_t block, std::size_t m,
                                float* out) {
  const Place<Codec> from(const_cast<Byte*>(payload), layout, block);
  if (m == Codec::kBlock) {
    Codec::decode(from.codes, from.scale, from.minima, Codec::kBlock, out);
  } else {
    Codec::decode(from.codes, from.scale, from.minima, m, out);
  }
}

template <class Codec>
static inline void sum_block(const Byte* const* inputs, std::size_t num_inputs, float divisor, const Layout& layout,
                             std::size_t block, std::size_t m, float* total) {
  float decoded[Codec::kBlock];
  decode_block<Codec>(inputs[0], layout, block, m, total);
  for (std::size_t input = 1; input < num_inputs; ++input) {
    decode_block<Codec>(inputs[input], layout, block, m, decoded);
    for (std::size_t i = 0; i < m; ++i) total[i] += decoded[i];
  }
  if (divisor != 1.0f) {
    for (std::size_t i = 0; i < m; ++i) total[i] /= divisor;
  }
}

template <class In>
static inline void load_as(const void* src, std::size_t at, std::size_t m, float* v) {
  const auto* x = static_cast<const typename In::Storage*>(src) + at;
  for (std::size_t i = 0; i < m; ++i) v[i] = static_cast<float>(In::load(x[i]));
}

static inline void load_values(const void* src, DType type, std::size_t at, std::size_t m, float* v) {
  switch (type) {
    case DType::kFloat32:
      return load_as<Float32>(src, at, m, v);
    case DType::kBFloat16:
      return load_as<BFloat16>(src, at, m, v);
    case DType::kFloat16:
      return load_as<Float16>(src, at, m, v);
    case DType::kFloat64:
      return load_as<Float64>(src, at, m, v);
  }
}

template <class Out>
static inline void store_as(void* dst, std::size_t at, std::size_t m, const float* v) {
  auto* x = static_cast<typename Out::Storage*>(dst) + at;
  for (std::size_t i = 0; i < m; ++i) x[i] = Out::store(canonical(v[i]));
}

static inline void store_values(void* dst, DType type, std::size_t at, std::size_t m, const float* v) {
  switch (type) {
    case DType::kFloat32:
      return store_as<Float32>(dst, at, m, v);
    case DType::kBFloat16:
      return store_as<BFloat16>(dst, at, m, v);
    case DType::kFloat16:
      return store_as<Float16>(dst, at, m, v);
    case DType::kFloat64:
      return store_as<Float64>(dst, at, m, v);
  }
}

// v = x + beta * residual (x alone where there is none): where it is, if it can be read in place, else in `buffer`.
static inline const float* compensate(const void* x, DType type, const float* residual, float beta, std::size_t at,
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

// The values to encode.
template <class Codec>
static inline const float* values_of(const EncodeJob& job, std::size_t block, std::size_t m, float* buffer) {
  const std::size_t at = block * Codec::kBlock;
  if (job.x != nullptr) return compensate(job.x, job.type, job.residual, job.beta, at, m, buffer);
  sum_block<Codec>(job.inputs, job.num_inputs, job.divisor, job.layout, block, m, buffer);
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

template <class Codec>
static void encode_blocks(const EncodeJob& job, std::size_t begin, std::size_t end) {
  float buffer[Codec::kBlock], decoded[Codec::kBlock], uniforms[Codec::kBlock];
  for (std::size_t block = begin; block < end; ++block) {
    const std::size_t at = block * Codec::kBlock, m = elements_of(block, Codec::kBlock, job.numel);
    const float* v = values_of<Codec>(job, block, m, buffer);
    if (job.random != nullptr) fill_uniforms(*job.random, job.first + at, m, uniforms);
    encode_block<Codec>(v, m, job.random != nullptr ? uniforms : nullptr, Place<Codec>(job.payload, job.layout, block));
    if (job.residual != nullptr) {
      decode_block<Codec>(job.payload, job.layout, block, m, decoded);
      float* residual = job.residual + at;
      const float gamma = job.gamma;
      for (std::size_t i = 0; i < m; ++i) {
        const bool is_finite = (to_bits(decoded[i]) & kMagnitude) < kInfinityBits;
        const float rest = (v[i] - decoded[i]) * gamma;
        residual[i] = is_finite ? rest : residual[i];
      }
    }
  }
}

template <class Codec>
static void range_of_blocks(const EncodeJob& job, std::size_t begin, std::size_t end, std::int32_t range[2]) {
  float buffer[Codec::kBlock];
  for (std::size_t block = begin; block < end; ++block) {
    const std::size_t m = elements_of(block, Codec::kBlock, job.numel);
    find_range(values_of<Codec>(job, block, m, buffer), m, range);
  }
}

template <class Codec>
static void decode_blocks(const DecodeJob& job, std::size_t begin, std::size_t end) {
  float total[Codec::kBlock], before[Codec::kBlock];
  for (std::size_t block = begin; block < end; ++block) {
    const std::size_t at = block * Codec::kBlock, m = elements_of(block, Codec::kBlock, job.numel);
    if (job.num_inputs == 1 && job.divisor == 1.0f && !job.adds && job.type == DType::kFloat32) {
      decode_block<Codec>(job.inputs[0], job.layout, block, m, static_cast<float*>(job.out) + at);
      continue;
    }
    sum_block<Codec>(job.inputs, job.num_inputs, job.divisor, job.layout, block, m, total);
    if (job.adds) {
      load_values(job.out, job.type, at, m, before);
      const float weight = job.weight;
      for (std::size_t i = 0; i < m; ++i) total[i] = before[i] + weight * total[i];
    }
    store_values(job.out, job.type, at, m, total);
  }
}

#include "hadamard_impl.h"

template <class Codec>
static inline void add_codec(CodecKernels& kernels, CodecId id) {
  kernels.encode[static_cast<int>(id)] = &encode_blocks<Codec>;
  kernels.decode[static_cast<int>(id)] = &decode_blocks<Codec>;
}

static inline CodecKernels make_codec_kernels() {
  CodecKernels kernels = {};
  add_codec<Integer<8, 127, 256>>(kernels, CodecId::kInt8);
  add_codec<MinMax>(kernels, CodecId::kUint8MinMax);
  add_codec<Bagua>(kernels, CodecId::kUint8Bagua);
  add_codec<Integer<4, 7, 128>>(kernels, CodecId::kInt4);
  add_codec<Integer<2, 1, 128>>(kernels, CodecId::kInt2);
  add_codec<OneBit>(kernels, CodecId::kOneBit);
  add_codec<Float8<E4M3>>(kernels, CodecId::kFp8E4M3);
  add_codec<Float8<E5M2>>(kernels, CodecId::kFp8E5M2);
  add_codec<Microscaling<E4M3, 8>>(kernels, CodecId::kMxFp8);
  add_codec<Microscaling<E2M1, 4>>(kernels, CodecId::kMxFp4);
  add_codec<Cast16<BFloat16>>(kernels, CodecId::kBFloat16);
  add_codec<Cast16<Float16>>(kernels, CodecId::kFloat16);
  kernels.range = &range_of_blocks<Bagua>;
  kernels.rotate = &rotate_pieces;
  return kernels;
}
