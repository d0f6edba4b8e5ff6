// Codecs as used by the drivers: layouts, jobs, and the table of block loops of each instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace commlib {

// Upper bound of the ids of block codecs (docs/reference/wire_format.md); tables have an entry for each id.
inline constexpr int kCodecIds = 32;
inline constexpr std::size_t kMostTile = 512;  // maximum elements processed at once
inline constexpr std::size_t kAlignment = 16;

// The constants of the codec's struct (codec_loops.h), checked against commlib/kernels/codec_table.py when the
// extension is loaded.
struct CodecShape {
  const char* name;
  std::size_t block;          // elements; the unit of processing if blocks share or have no parameters
  std::size_t bits;           // bits of a code
  std::size_t scale_bytes;    // bytes per block
  std::size_t minimum_bytes;  // bytes per block
  bool is_one_block;          // whether the whole chunk shares its parameters
};

// Returns null if `codec` is not the id of a block codec.
const CodecShape* find_shape(int codec);

inline std::size_t aligned(std::size_t nbytes) {
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Offsets of the sections of one chunk's payload.
struct Layout {
  Layout(const CodecShape& shape, std::size_t numel);
  std::size_t blocks, scales_at, codes_at, code_bytes_per_block, payload_bytes;
};

// A range of a tensor whose elements have consecutive global offsets.
struct Segment {
  std::uint64_t start;   // first element in the tensor
  std::uint64_t offset;  // global offset of that element
};

// The source of random numbers: Philox's key and counter, except the offsets.
struct Random {
  std::uint32_t key[2];
  std::uint32_t step;
  std::uint32_t stage_and_rank;
  const Segment* segments;  // ascending; the first starts at 0
  std::size_t num_segments;
};

// Encodes one chunk of a tensor or of a sum of payloads, with error feedback if there is a residual.
struct EncodeJob {
  const void* x;  // null: encode the sum of `inputs`
  DType type;
  const std::uint8_t* const* inputs;
  std::size_t num_inputs;
  float divisor;
  float* residual;  // null: no error feedback
  float beta, gamma;
  const Random* random;  // null: round to nearest
  std::size_t first;     // the chunk's first element in the tensor, for `random`
  std::size_t numel;
  Layout layout;
  std::uint8_t* payload;
  bool exceeds_cache;  // whether the tensor exceeds the caches, so that prefetching pays
  bool streams;        // whether the payload is written with non-temporal stores
};

// Decodes one chunk: out = sum of inputs / divisor, or out += weight * input.
struct DecodeJob {
  const std::uint8_t* const* inputs;
  std::size_t num_inputs;
  float divisor;
  bool adds;
  float weight;
  void* out;
  DType type;
  std::size_t numel;
  Layout layout;
  bool streams;  // whether `out` exceeds the caches and is written with non-temporal stores
};

// Both process the blocks from `begin` to `end`. For a chunk with a single set of parameters (uint8_bagua), these are
// already at the start of the payload.
using EncodeFn = void (*)(const EncodeJob& job, std::size_t begin, std::size_t end);
using DecodeFn = void (*)(const DecodeJob& job, std::size_t begin, std::size_t end);
// Finds the smallest and the largest element of the blocks from `begin` to `end`, as integers in the order of floats.
using RangeFn = void (*)(const EncodeJob& job, std::size_t begin, std::size_t end, std::int32_t range[2]);

// The random Hadamard rotation of a chunk, or its inverse, in pieces of this many elements.
inline constexpr std::size_t kRotationPiece = 256;
struct RotateJob {
  const float* x;
  float* out;  // `x` itself, or not overlapping it
  std::size_t numel;
  const Random* random;
  bool is_inverse;
};
using RotateFn = void (*)(const RotateJob& job, std::size_t begin, std::size_t end);

// Copies with non-temporal stores; `src` is aligned to 64 bytes.
using CopyFn = void (*)(void* dst, const void* src, std::size_t nbytes);

struct CodecKernels {
  // By codec id; null for unused ids.
  CodecShape shapes[kCodecIds];
  EncodeFn encode[kCodecIds];
  DecodeFn decode[kCodecIds];
  RangeFn range;
  RotateFn rotate;
  CopyFn stream_copy;
};

// Returns whether `nbytes` are too many to stay in the caches until they are used.
// [Note: streaming] A store to memory that is not cached first reads the line, so writing costs twice the bytes.
// Non-temporal stores avoid the read, but leave the data out of the cache, where the next reader would find it. So only
// outputs of at least half of the last-level cache, or of 32 MiB if that is larger, are streamed: their start would be
// evicted before their end is written.
bool exceeds_cache(std::size_t nbytes);

// The caller checks the arguments. `num_threads` is at least 1.
void encode_chunk(int codec, const EncodeJob& job, int num_threads);
void decode_chunk(int codec, const DecodeJob& job, int num_threads);
void rotate_chunk(const RotateJob& job, int num_threads);

}  // namespace commlib
