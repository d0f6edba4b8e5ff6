// The drivers of the block codecs: one chunk, shared among threads.
#include "codec.h"

#include <unistd.h>

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>
#include <mutex>

#include "float_env.h"
#include "threads.h"

namespace commlib {
namespace {

std::size_t find_streaming_bytes() {
  constexpr std::size_t kLeast = std::size_t{4} << 20, kMost = std::size_t{32} << 20;
#if defined(_SC_LEVEL3_CACHE_SIZE)
  const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  if (cache > 0) return std::clamp(static_cast<std::size_t>(cache) / 2, kLeast, kMost);
#endif
  return kMost;
}

const std::size_t kStreamingBytes = find_streaming_bytes();

// Minimum elements per thread, some ten microseconds of work. Smaller parts are not worth waking a thread.
constexpr std::size_t kElementsPerPart = 1 << 17;

std::size_t grain_of(const CodecShape& shape, std::size_t num_inputs) {
  return std::max<std::size_t>(1, kElementsPerPart / (shape.block * std::max<std::size_t>(1, num_inputs)));
}

void zero_gap(std::uint8_t* payload, std::size_t begin, std::size_t end) {
  std::memset(payload + begin, 0, end - begin);
}

// Zeroes the bytes between sections and after the last one.
void zero_gaps(const CodecShape& shape, const EncodeJob& job) {
  const Layout& layout = job.layout;
  const std::size_t parameter_sets = shape.is_one_block ? 1 : layout.blocks;
  const std::size_t full = job.numel / shape.block, rest = job.numel % shape.block;
  const std::size_t codes_end = layout.codes_at + full * layout.code_bytes_per_block + (rest * shape.bits + 7) / 8;
  zero_gap(job.payload, parameter_sets * shape.minimum_bytes, layout.scales_at);
  zero_gap(job.payload, layout.scales_at + layout.blocks * shape.scale_bytes, layout.codes_at);
  zero_gap(job.payload, codes_end, layout.payload_bytes);
}

float from_ordered(std::int32_t key) {
  key ^= (key >> 31) & 0x7FFFFFFF;
  float x;
  std::memcpy(&x, &key, sizeof x);
  return x;
}

// Stores the smallest and the largest element of the chunk, or NaN twice, at the start of the payload.
void store_range(const CodecKernels& kernels, const EncodeJob& job, std::size_t grain, int num_threads) {
  std::mutex mutex;
  std::int32_t range[2] = {INT32_MAX, INT32_MIN};
  parallel_for(job.layout.blocks, grain, num_threads, [&](std::size_t begin, std::size_t end) {
    std::int32_t part[2] = {INT32_MAX, INT32_MIN};
    kernels.range(job, begin, end, part);
    const std::lock_guard<std::mutex> lock(mutex);
    range[0] = std::min(range[0], part[0]);
    range[1] = std::max(range[1], part[1]);
  });
  const ExactFloatScope exact;
  constexpr float kTooLarge = 0x1p127f;
  float bounds[2] = {from_ordered(range[0]) + 0.0f, from_ordered(range[1]) + 0.0f};
  const float spread = bounds[1] - bounds[0], top = bounds[1] * (255.0f / (spread + 1e-7f));
  const bool is_finite = bounds[0] > -kTooLarge && bounds[1] < kTooLarge && spread <= FLT_MAX && std::isfinite(top);
  const std::uint32_t nan = 0x7FC00000;
  for (int i = 0; i < 2; ++i) std::memcpy(job.payload + 4 * i, is_finite ? static_cast<void*>(&bounds[i]) : &nan, 4);
}

}  // namespace

bool exceeds_cache(std::size_t nbytes) {
  return nbytes >= kStreamingBytes;
}

const CodecShape* find_shape(int codec) {
  if (codec < 0 || codec >= kCodecIds) return nullptr;
  const CodecKernels& kernels = *active_kernels().codecs;
  return kernels.encode[codec] == nullptr ? nullptr : &kernels.shapes[codec];
}

Layout::Layout(const CodecShape& shape, std::size_t numel)
    : blocks((numel + shape.block - 1) / shape.block), code_bytes_per_block(shape.block * shape.bits / 8) {
  const std::size_t parameter_sets = shape.is_one_block ? (numel > 0 ? 1 : 0) : blocks;
  scales_at = aligned(parameter_sets * shape.minimum_bytes);
  codes_at = scales_at + aligned(blocks * shape.scale_bytes);
  const std::size_t rest = numel % shape.block;
  const std::size_t code_bytes = numel / shape.block * code_bytes_per_block + (rest * shape.bits + 7) / 8;
  payload_bytes = aligned(codes_at + code_bytes);
}

void encode_chunk(int codec, const EncodeJob& job, int num_threads) {
  if (job.numel == 0) return;
  const CodecKernels& kernels = *active_kernels().codecs;
  const CodecShape& shape = kernels.shapes[codec];
  const std::size_t grain = grain_of(shape, job.num_inputs);
  zero_gaps(shape, job);
  if (shape.is_one_block) store_range(kernels, job, grain, num_threads);
  const EncodeFn encode = kernels.encode[codec];
  parallel_for(job.layout.blocks, grain, num_threads,
               [&](std::size_t begin, std::size_t end) { encode(job, begin, end); });
}

void rotate_chunk(const RotateJob& job, int num_threads) {
  const RotateFn rotate = active_kernels().codecs->rotate;
  const std::size_t pieces = (job.numel + kRotationPiece - 1) / kRotationPiece;
  parallel_for(pieces, kElementsPerPart / kRotationPiece, num_threads,
               [&](std::size_t begin, std::size_t end) { rotate(job, begin, end); });
}

void decode_chunk(int codec, const DecodeJob& job, int num_threads) {
  const CodecKernels& kernels = *active_kernels().codecs;
  const CodecShape& shape = kernels.shapes[codec];
  const DecodeFn decode = kernels.decode[codec];
  parallel_for(job.layout.blocks, grain_of(shape, job.num_inputs), num_threads,
               [&](std::size_t begin, std::size_t end) { decode(job, begin, end); });
}

}  // namespace commlib
