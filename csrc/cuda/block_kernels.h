// Encoding and decoding with the block codecs: one tile per warp, one launch for all chunks of a tensor.
//
// Device memory is read once: a tile stays in registers from its load to the new residual. The parameters of a launch
// are plain structs, mirrored in commlib/kernels/cuda_args.py.
#pragma once

#include "block_codecs.h"

struct Layout {  // offsets in one chunk's payload
  Size scales_at, codes_at, nbytes;
};

// The division of a tensor into chunks and tiles. Tiles do not cross the end of a chunk.
struct Chunks {
  Size numel;            // elements of the tensor
  Size chunk;            // elements of a full chunk
  Size tiles_per_chunk;  // tiles of a full chunk
  Size num_tiles;
  Layout full;
  Layout last;  // of a shorter last chunk
};

struct EncodeArgs {
  Chunks chunks;
  const void* x;       // null: encode the sum of `inputs`
  const Byte* inputs;  // consecutive payloads of one chunk
  float* residual;
  Byte* out;
  int* ranges;  // uint8_bagua: the range of each part of each chunk
  Random random;
  Size first;  // offset of element 0 of `x` in its tensor, for `random`
  unsigned num_inputs;
  unsigned parts;  // uint8_bagua: parts per chunk
  float divisor;
  float beta;
  float gamma;
};

struct DecodeArgs {
  Chunks chunks;
  const Byte* inputs;
  void* out;
  unsigned num_inputs;
  unsigned adds;
  float divisor;
  float weight;
};

// The position of a tile.
struct Tile {
  Size chunk_at;     // first element of its chunk in the tensor
  Size chunk_numel;  // elements of its chunk
  Size payload_at;   // offset of its chunk's payload in the buffer
  Size at;           // its first element in the chunk
  int m;             // its number of elements
  int lane;
};

// Memory through which the lanes of a warp exchange data.
template <class Codec>
struct alignas(16) Scratch {
  Bits16 numbers[Codec::kTile];  // random numbers, or the codes of a tile that is not full
};

template <class Codec>
COMMLIB_DEVICE Tile find_tile(const Chunks& chunks, Size idx, int lane) {
  Size chunk_idx = 0;
  if (idx >= chunks.tiles_per_chunk) {
    const bool is_small = chunks.num_tiles >> 32 == 0;
    chunk_idx = is_small ? static_cast<Bits32>(idx) / static_cast<Bits32>(chunks.tiles_per_chunk)
                         : idx / chunks.tiles_per_chunk;
  }
  Tile tile;
  tile.chunk_at = chunk_idx * chunks.chunk;
  const Size left = chunks.numel - tile.chunk_at;
  tile.chunk_numel = left < chunks.chunk ? left : chunks.chunk;
  tile.payload_at = chunk_idx * chunks.full.nbytes;
  tile.at = (idx - chunk_idx * chunks.tiles_per_chunk) * Codec::kTile;
  const Size rest = tile.chunk_numel - tile.at;
  tile.m = rest < Codec::kTile ? static_cast<int>(rest) : Codec::kTile;
  tile.lane = lane;
  return tile;
}

COMMLIB_DEVICE const Layout& layout_of(const Chunks& chunks, const Tile& tile) {
  return tile.chunk_numel == chunks.chunk ? chunks.full : chunks.last;
}

// The position of a lane: its block in the tile, and its index among the lanes of that block.
template <class Codec>
struct Seat {
  int block, t;
  Size block_idx;  // in the chunk
  int m;           // elements of the block

  __device__ __forceinline__ explicit Seat(const Tile& tile)
      : block(tile.lane / Codec::kLanes),
        t(tile.lane % Codec::kLanes),
        block_idx(tile.at / Codec::kBlock + static_cast<Size>(block)),
        m(tile.m - block * Codec::kBlock) {
    m = m < 0 ? 0 : (m > Codec::kBlock ? Codec::kBlock : m);
  }

  // The index of number i in the block.
  __device__ __forceinline__ int element(int i) const { return i / 4 * Codec::kRunStride + 4 * t + i % 4; }
  // The index of number i in the tile.
  __device__ __forceinline__ int place(int i) const { return block * Codec::kBlock + element(i); }
};

// --- values of tensors -----------------------------------------------------------------------------------------------

// Elements past the end are +0.
template <class Codec, class Type>
COMMLIB_DEVICE void load_tile(const typename Type::Storage* from, const Tile& tile, float* v) {
  const Seat<Codec> seat(tile);
  if (tile.m == Codec::kTile && is_aligned(from, Type::kVectorBytes)) {
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; i += 4) Type::load4(from + seat.place(i), v + i);
  } else {
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) {
      v[i] = seat.element(i) < seat.m ? Type::load(from[seat.place(i)]) : 0.0f;
    }
  }
}

template <class Codec, class Type>
COMMLIB_DEVICE void store_tile(typename Type::Storage* to, const Tile& tile, const float* v) {
  const Seat<Codec> seat(tile);
  if (tile.m == Codec::kTile && is_aligned(to, Type::kVectorBytes)) {
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; i += 4) Type::store4(to + seat.place(i), v + i);
  } else {
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) {
      if (seat.element(i) < seat.m) to[seat.place(i)] = Type::store(v[i]);
    }
  }
}

// --- codes -----------------------------------------------------------------------------------------------------------

// The words of a full block that a lane reads or writes; see [Note: a tile].
template <class Codec>
struct Codes {
  static constexpr int kWords = Codec::kBits == 8 ? Codec::kRuns : (Codec::kBits == 16 ? 2 * Codec::kRuns : 1);
  Bits32 word[kWords];
};

template <class Codec>
COMMLIB_DEVICE Codes<Codec> load_codes(const Byte* block, int t) {
  Codes<Codec> codes;
  if constexpr (Codec::kBits == 16) {
#pragma unroll
    for (int r = 0; r < Codec::kRuns; ++r) {
      const uint2 pair = *reinterpret_cast<const uint2*>(block + 2 * (r * Codec::kRunStride + 4 * t));
      codes.word[2 * r] = pair.x;
      codes.word[2 * r + 1] = pair.y;
    }
  } else if constexpr (Codec::kBits == 8) {
#pragma unroll
    for (int r = 0; r < Codec::kRuns; ++r) {
      codes.word[r] = *reinterpret_cast<const Bits32*>(block + r * Codec::kRunStride + 4 * t);
    }
  } else if constexpr (Codec::kBits == 1) {
    // 16 words; run r of lane t is 4 bits of word 4 * r + t / 8.
    const Bits32 own = *reinterpret_cast<const Bits32*>(block + 4 * (t % 16));
    Bits32 bits = 0;
#pragma unroll
    for (int r = 0; r < Codec::kRuns; ++r) {
      bits |= (__shfl_sync(kAllLanes, own, 4 * r + t / 8) >> (4 * (t % 8)) & 0xFu) << (8 * r);
    }
    codes.word[0] = bits;
  } else {
    codes.word[0] = *reinterpret_cast<const Bits32*>(block + 4 * t);
  }
  return codes;
}

template <class Codec>
COMMLIB_DEVICE int code_of(const Codes<Codec>& codes, int i) {
  constexpr Bits32 kMask = (1u << Codec::kBits) - 1u;
  const int r = i / 4, k = i % 4;
  if constexpr (Codec::kBits == 16) return static_cast<int>(codes.word[i / 2] >> (16 * (i % 2)) & kMask);
  if constexpr (Codec::kBits == 8) return static_cast<int>(codes.word[r] >> (8 * k) & kMask);
  if constexpr (Codec::kBits == 1) return static_cast<int>(codes.word[0] >> (8 * r + k) & kMask);
  return static_cast<int>(codes.word[0] >> (8 * k + r * Codec::kBits) & kMask);
}

template <class Codec>
COMMLIB_DEVICE void store_codes(const int* q, Byte* block, int t) {
  if constexpr (Codec::kBits == 16) {
#pragma unroll
    for (int r = 0; r < Codec::kRuns; ++r) {
      const int* run = q + 4 * r;
      store_vector(block + 2 * (r * Codec::kRunStride + 4 * t), static_cast<Bits32>(run[0] | run[1] << 16),
                   static_cast<Bits32>(run[2] | run[3] << 16));
    }
  } else if constexpr (Codec::kBits == 8) {
#pragma unroll
    for (int r = 0; r < Codec::kRuns; ++r) {
      const int* run = q + 4 * r;
      const Bits32 word = (static_cast<Bits32>(run[0]) & 0xFFu) | (static_cast<Bits32>(run[1]) & 0xFFu) << 8 |
                          (static_cast<Bits32>(run[2]) & 0xFFu) << 16 | static_cast<Bits32>(run[3]) << 24;
      *reinterpret_cast<Bits32*>(block + r * Codec::kRunStride + 4 * t) = word;
    }
  } else if constexpr (Codec::kBits == 1) {
    // Eight lanes compute one word of each run; four of them store one each.
    Bits32 own = 0;
#pragma unroll
    for (int r = 0; r < Codec::kRuns; ++r) {
      const int* run = q + 4 * r;
      Bits32 word = static_cast<Bits32>(run[0] | run[1] << 1 | run[2] << 2 | run[3] << 3) << (4 * (t % 8));
#pragma unroll
      for (int distance = 1; distance < 8; distance *= 2) word |= __shfl_xor_sync(kAllLanes, word, distance);
      own = t % 8 == r ? word : own;
    }
    if (t % 8 < 4) *reinterpret_cast<Bits32*>(block + 4 * (4 * (t % 8) + t / 8)) = own;
  } else {
    Bits32 word = 0;
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) word |= static_cast<Bits32>(q[i]) << (8 * (i % 4) + i / 4 * Codec::kBits);
    *reinterpret_cast<Bits32*>(block + 4 * t) = word;
  }
}

// Returns code `e` of a block of `m` elements, which may be short.
template <int kBits>
COMMLIB_DEVICE int code_at(const Byte* block, int m, int e) {
  if constexpr (kBits == 16) return block[2 * e] | block[2 * e + 1] << 8;
  if constexpr (kBits == 8) return block[e];
  if constexpr (kBits == 1) return block[e / 8] >> (e % 8) & 1;
  constexpr int kPerByte = kBits < 8 ? 8 / kBits : 1;
  const int stride = (m + kPerByte - 1) / kPerByte;
  return block[e % stride] >> (e / stride * kBits) & ((1 << kBits) - 1);
}

// Returns byte `j` of the codes of a block of `m` elements.
template <int kBits>
COMMLIB_DEVICE Byte byte_of_codes(const Bits16* codes, int m, int j) {
  if constexpr (kBits == 16) return static_cast<Byte>(codes[j / 2] >> (8 * (j % 2)));
  constexpr int kPerByte = kBits < 8 ? 8 / kBits : 1;
  const int stride = kBits == 1 ? 1 : (m + kPerByte - 1) / kPerByte, first = kBits == 1 ? 8 * j : j;
  int byte = 0;
#pragma unroll
  for (int k = 0; k < kPerByte; ++k) {
    const int e = first + k * stride;
    byte |= (e < m ? codes[e] : 0) << (k * kBits);
  }
  return static_cast<Byte>(byte);
}

COMMLIB_DEVICE void zero_gap(Byte* payload, Size begin, Size end, int lane) {
  if (begin + static_cast<Size>(lane) < end) payload[begin + static_cast<Size>(lane)] = 0;
}

// Zeroes the bytes between sections and after the last one; each gap is shorter than 16 bytes.
template <class Codec>
COMMLIB_DEVICE void zero_gaps(Byte* payload, const Layout& layout, const Tile& tile) {
  const Size n = tile.chunk_numel, full = n / Codec::kBlock, rest = n % Codec::kBlock;
  const Size blocks = full + (rest > 0 ? 1 : 0), minima = Codec::kIsOneBlock ? 1 : blocks;
  zero_gap(payload, minima * Codec::kMinimumBytes, layout.scales_at, tile.lane);
  zero_gap(payload, layout.scales_at + blocks * Codec::kScaleBytes, layout.codes_at, tile.lane);
  const Size codes_end = layout.codes_at + full * Codec::kCodeBytes + (rest * Codec::kBits + 7) / 8;
  zero_gap(payload, codes_end, layout.nbytes, tile.lane);
}

template <class Codec>
COMMLIB_DEVICE void write_codes(const int* q, Byte* payload, const Layout& layout, const Tile& tile, Bits16* scratch) {
  const Seat<Codec> seat(tile);
  Byte* const codes = payload + layout.codes_at;
  if (tile.m == Codec::kTile) {
    store_codes<Codec>(q, codes + seat.block_idx * Codec::kCodeBytes, seat.t);
  } else {
    __syncwarp();
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) {
      scratch[seat.place(i)] = static_cast<Bits16>(q[i] & (Codec::kBits == 16 ? 0xFFFF : 0xFF));
    }
    __syncwarp();
    const Size first = tile.at / Codec::kBlock;
    for (int block = 0; block * Codec::kBlock < tile.m; ++block) {
      const int left = tile.m - block * Codec::kBlock, m = left < Codec::kBlock ? left : Codec::kBlock;
      Byte* const to = codes + (first + static_cast<Size>(block)) * Codec::kCodeBytes;
      for (int j = tile.lane; j < (m * Codec::kBits + 7) / 8; j += kWarp) {
        to[j] = byte_of_codes<Codec::kBits>(scratch + block * Codec::kBlock, m, j);
      }
    }
  }
  if (tile.at + static_cast<Size>(tile.m) == tile.chunk_numel) zero_gaps<Codec>(payload, layout, tile);
}

// --- parameters ------------------------------------------------------------------------------------------------------

template <class Codec>
COMMLIB_DEVICE void write_parameters(const Parameters& p, Byte* payload, const Layout& layout, const Tile& tile) {
  const Seat<Codec> seat(tile);
  if (seat.t != 0 || seat.m == 0) return;
  Byte* const scales = payload + layout.scales_at;
  if constexpr (Codec::kScaleBytes == 1) scales[seat.block_idx] = static_cast<Byte>(p.scale_bits);
  if constexpr (Codec::kScaleBytes == 2) reinterpret_cast<Bits16*>(scales)[seat.block_idx] = p.scale_bits;
  if constexpr (Codec::kMinimumBytes == 4) reinterpret_cast<float*>(payload)[seat.block_idx] = p.minimum;
}

template <class Codec>
COMMLIB_DEVICE Parameters load_parameters(const Byte* payload, const Layout& layout, const Seat<Codec>& seat) {
  if constexpr (Codec::kIsOneBlock) {
    const float* const bounds = reinterpret_cast<const float*>(payload);
    return Codec::load_bounds(bounds[0], bounds[1]);
  } else {
    const Size block = seat.m > 0 ? seat.block_idx : 0;  // lanes without elements read a valid address
    Bits16 scale = 0;
    float minimum = 0.0f;
    if constexpr (Codec::kScaleBytes == 1) scale = payload[layout.scales_at + block];
    if constexpr (Codec::kScaleBytes == 2) scale = reinterpret_cast<const Bits16*>(payload + layout.scales_at)[block];
    if constexpr (Codec::kMinimumBytes == 4) minimum = reinterpret_cast<const float*>(payload)[block];
    return Codec::load(scale, minimum);
  }
}

// --- sums of payloads ------------------------------------------------------------------------------------------------

// Number of payloads that are loaded ahead.
constexpr unsigned kInFlight = 4;

template <class Codec>
COMMLIB_DEVICE void sum_full_tile(const Byte* payload, Size stride, unsigned count, const Layout& layout,
                                  const Tile& tile, float* total) {
  const Seat<Codec> seat(tile);
  const Size codes_at = layout.codes_at + seat.block_idx * Codec::kCodeBytes;
  for (unsigned first = 0; first < count; first += kInFlight) {
    Codes<Codec> codes[kInFlight];
    Parameters parameters[kInFlight];
#pragma unroll
    for (unsigned j = 0; j < kInFlight; ++j) {
      if (first + j < count) {
        const Byte* const input = payload + (first + j) * stride;
        codes[j] = load_codes<Codec>(input + codes_at, seat.t);
        parameters[j] = load_parameters<Codec>(input, layout, seat);
      }
    }
#pragma unroll
    for (unsigned j = 0; j < kInFlight; ++j) {
      if (first + j < count) {
#pragma unroll
        for (int i = 0; i < Codec::kPerLane; ++i) {
          const float d = Codec::value(code_of<Codec>(codes[j], i), parameters[j]);
          total[i] = first + j == 0 ? d : total[i] + d;
        }
      }
    }
  }
}

template <class Codec>
COMMLIB_DEVICE void sum_short_tile(const Byte* payload, Size stride, unsigned count, const Layout& layout,
                                   const Tile& tile, float* total) {
  const Seat<Codec> seat(tile);
  const Size codes_at = layout.codes_at + seat.block_idx * Codec::kCodeBytes;
  for (unsigned input = 0; input < count; ++input, payload += stride) {
    const Parameters p = load_parameters<Codec>(payload, layout, seat);
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) {
      const bool is_there = seat.element(i) < seat.m;
      const int code = is_there ? code_at<Codec::kBits>(payload + codes_at, seat.m, seat.element(i)) : 0;
      const float d = is_there ? Codec::value(code, p) : 0.0f;
      total[i] = input == 0 ? d : total[i] + d;
    }
  }
}

// Sums the payloads of one chunk, in order, divided; elements past the end are 0.
template <class Codec>
COMMLIB_DEVICE void sum_tile(const Byte* payload, Size stride, unsigned count, float divisor, const Layout& layout,
                             const Tile& tile, float* total) {
  if (tile.m == Codec::kTile) {
    sum_full_tile<Codec>(payload, stride, count, layout, tile, total);
  } else {
    sum_short_tile<Codec>(payload, stride, count, layout, tile, total);
  }
  if (divisor != 1.0f) {
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) total[i] = total[i] / divisor;
  }
}

// --- the kernels -----------------------------------------------------------------------------------------------------

COMMLIB_DEVICE int lane_of_thread() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

COMMLIB_DEVICE int warp_of_thread() {
  return static_cast<int>(threadIdx.x) / kWarp;
}

COMMLIB_DEVICE Size tile_of_thread() {
  return static_cast<Size>(blockIdx.x) * kWarpsPerBlock + static_cast<Size>(warp_of_thread());
}
