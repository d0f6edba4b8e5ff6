// Codecs as the drivers see them: layouts, jobs, and the table of block loops that each instruction set provides.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels.h"

namespace commlib {

// The ids of block codecs (docs/reference/wire_format.md) are below it; tables have a place for each.
inline constexpr int kCodecIds = 32;
inline constexpr std::size_t kMostTile = 512;  // elements that are worked on at once
inline constexpr std::size_t kAlignment = 16;

// Taken from the constants of the codec's struct (codec_loops.h), and held to commlib/kernels/codec_table.py when the
// extension is loaded.
struct CodecShape {
  const char* name;
  std::size_t block;          // elements; where blocks share or have no parameters, a portion that is worked on at once
  std::size_t bits;           // of a code
  std::size_t scale_bytes;    // of a block
  std::size_t minimum_bytes;  // of a block
  bool is_one_block;          // the whole chunk shares its parameters
};

// Null for a number that is not the id of a block codec.
const CodecShape* find_shape(int codec);

inline std::size_t aligned(std::size_t nbytes) {
  return (nbytes + kAlignment - 1) / kAlignment * kAlignment;
}

// Where the sections of one chunk's payload begin.
struct Layout {
  Layout(const CodecShape& shape, std::size_t numel);
  std::size_t blocks, scales_at, codes_at, code_bytes_per_block, payload_bytes;
};

// A stretch of a tensor whose elements have consecutive global offsets.
struct Segment {
  std::uint64_t start;   // its first element in the tensor
  std::uint64_t offset;  // that element's global offset
};

// The source of random numbers: everything of Philox's key and counter but the offsets.
struct Random {
  std::uint32_t key[2];
  std::uint32_t step;
  std::uint32_t stage_and_rank;
  const Segment* segments;  // ascending; the first starts at 0
  std::size_t num_segments;
};

// Encode one chunk: of a tensor, or of a sum of payloads; with error feedback where there is a residual.
struct EncodeJob {
  const void* x;  // null: the values are those of `inputs`
  DType type;
  const std::uint8_t* const* inputs;
  std::size_t num_inputs;
  float divisor;
  float* residual;  // null: no error feedback
  float beta, gamma;
  const Random* random;  // null: rounding to nearest
  std::size_t first;     // the chunk's first element in the tensor, for `random`
  std::size_t numel;
  Layout layout;
  std::uint8_t* payload;
  bool exceeds_cache;  // the tensor does: worth asking for its lines early
  bool streams;        // the payload does: written past the caches
};

// Decode one chunk: out = sum of inputs / divisor, or out += weight * input.
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
  bool streams;  // `out` does not fit into the caches: written past them
};

// Both work on the blocks from `begin` to `end`. The parameters of a chunk of one block (uint8_bagua) are at the front
// of the payload before.
using EncodeFn = void (*)(const EncodeJob& job, std::size_t begin, std::size_t end);
using DecodeFn = void (*)(const DecodeJob& job, std::size_t begin, std::size_t end);
// The smallest and the largest element of the blocks from `begin` to `end`, as integers in the order of the floats.
using RangeFn = void (*)(const EncodeJob& job, std::size_t begin, std::size_t end, std::int32_t range[2]);

// The random Hadamard rotation of a chunk, or its inverse, in pieces of this many elements.
inline constexpr std::size_t kRotationPiece = 256;
struct RotateJob {
  const float* x;
  float* out;  // `x` or apart from it
  std::size_t numel;
  const Random* random;
  bool is_inverse;
};
using RotateFn = void (*)(const RotateJob& job, std::size_t begin, std::size_t end);

// Copies past the caches; `src` is aligned to 64 bytes.
using CopyFn = void (*)(void* dst, const void* src, std::size_t nbytes);

struct CodecKernels {
  // By the codec's id; null where there is none.
  CodecShape shapes[kCodecIds];
  EncodeFn encode[kCodecIds];
  DecodeFn decode[kCodecIds];
  RangeFn range;
  RotateFn rotate;
  CopyFn stream_copy;
};

// Whether `nbytes` are too many for the caches to hold until they are used.
// [Note: streaming] A store to memory that is not in a cache first reads the line, so writing costs twice its bytes;
// non-temporal stores do without. But what they write is not in the cache afterwards, where the next reader would find
// it. So outputs of at least half of the last-level cache, or of 32 MiB where that is larger still, are streamed: their
// begin would be gone from the cache before their end is written.
bool exceeds_cache(std::size_t nbytes);

// Checked by their caller. `num_threads` is at least 1.
void encode_chunk(int codec, const EncodeJob& job, int num_threads);
void decode_chunk(int codec, const DecodeJob& job, int num_threads);
void rotate_chunk(const RotateJob& job, int num_threads);

}  // namespace commlib
