// Encoding of a tensor or of a sum of payloads, with optional error feedback and stochastic rounding.
#pragma once

#include "block_kernels.h"

// Loads v and, with feedback, e.
template <class Codec, class In, bool kHasFeedback, bool kIsSum>
COMMLIB_DEVICE void load_values(const EncodeArgs& args, const Tile& tile, float* v, float* e) {
  const Size at = tile.chunk_at + tile.at;
  if constexpr (kIsSum) {
    const Layout& layout = layout_of(args.chunks, tile);
    sum_tile<Codec>(args.inputs, layout.nbytes, args.num_inputs, args.divisor, layout, tile, v);
  } else {
    load_tile<Codec, In>(static_cast<const typename In::Storage*>(args.x) + at, tile, v);
  }
  if constexpr (kHasFeedback) {
    load_tile<Codec, Float32>(args.residual + at, tile, e);
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) v[i] = v[i] + args.beta * e[i];
  }
}

// Draws sixteen random bits for each element of the tile.
template <class Codec>
COMMLIB_DEVICE void draw_numbers(const Random& random, Size start, const Tile& tile, Bits16* numbers) {
  for_segments(random, start, tile.m, [&](Size offset, int count, int done) {
    const int skip = static_cast<int>(offset % 8);
    for (int c = tile.lane; 8 * c < skip + count; c += kWarp) {
      const Words words = random_words(random, offset / 8 + static_cast<Size>(c));
      const int begin = 8 * c - skip;
      if (begin >= 0 && begin + 8 <= count && (done + begin) % 8 == 0) {
        *reinterpret_cast<uint4*>(numbers + done + begin) =
            make_uint4(words.word[0], words.word[1], words.word[2], words.word[3]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const int place = begin + j;
          if (place >= 0 && place < count)
            numbers[done + place] = static_cast<Bits16>(words.word[j / 2] >> 16 * (j % 2));
        }
      }
    }
  });
  __syncwarp();
}

template <class Codec>
COMMLIB_DEVICE void read_uniforms(const Bits16* numbers, const Tile& tile, float* u) {
  const Seat<Codec> seat(tile);
#pragma unroll
  for (int i = 0; i < Codec::kPerLane; i += 4) {
    const uint2 four = *reinterpret_cast<const uint2*>(numbers + seat.place(i));
    const Bits32 number[4] = {four.x & 0xFFFFu, four.x >> 16, four.y & 0xFFFFu, four.y >> 16};
#pragma unroll
    for (int k = 0; k < 4; ++k) u[i + k] = static_cast<float>(static_cast<int>(number[k])) * 0x1.0p-16f;
  }
}

// Writes e' if the decoded value is finite; `v` and `e` are those of `load_values`.
template <class Codec>
COMMLIB_DEVICE void write_residual(const EncodeArgs& args, const Tile& tile, const float* v, const float* e,
                                   const int* q, const Parameters& p) {
  float next[Codec::kPerLane];
#pragma unroll
  for (int i = 0; i < Codec::kPerLane; ++i) {
    const float d = Codec::value(q[i], p), rest = (v[i] - d) * args.gamma;
    next[i] = is_finite(d) ? rest : e[i];
  }
  const Seat<Codec> seat(tile);
  float* const to = args.residual + tile.chunk_at + tile.at;
  if (tile.m == Codec::kTile && is_aligned(to, 16)) {
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; i += 4) {
      store_vector(to + seat.place(i), next[i], next[i + 1], next[i + 2], next[i + 3]);
    }
  } else {
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) {
      if (seat.element(i) < seat.m) to[seat.place(i)] = next[i];
    }
  }
}

// --- uint8_bagua: the range of a chunk -------------------------------------------------------------------------------

// Finds the range of a part of a chunk, (smallest, largest) as ordered integers. blockIdx.x counts parts of all chunks.
template <class Codec, class In, bool kHasFeedback, bool kIsSum>
COMMLIB_DEVICE void find_ranges(const EncodeArgs& args) {
  __shared__ int lows[kWarpsPerBlock], highs[kWarpsPerBlock];
  const int lane = lane_of_thread(), warp = warp_of_thread();
  const Size chunk_idx = blockIdx.x / args.parts, part = blockIdx.x % args.parts;
  const Size begin = chunk_idx * args.chunks.tiles_per_chunk, rest = args.chunks.num_tiles - begin;
  const Size end = begin + (rest < args.chunks.tiles_per_chunk ? rest : args.chunks.tiles_per_chunk);
  Range range;
  for (Size idx = begin + part * kWarpsPerBlock + static_cast<Size>(warp); idx < end;
       idx += Size{args.parts} * kWarpsPerBlock) {
    const Tile tile = find_tile<Codec>(args.chunks, idx, lane);
    const Seat<Codec> seat(tile);
    float v[Codec::kPerLane], e[Codec::kPerLane];
    load_values<Codec, In, kHasFeedback, kIsSum>(args, tile, v, e);
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) {
      if (seat.element(i) < seat.m) widen(range, ordered(v[i]), ordered(v[i]));
    }
  }
  range = range_of_warp(range);
  if (lane == 0) {
    lows[warp] = range.low;
    highs[warp] = range.high;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int i = 1; i < kWarpsPerBlock; ++i) widen(range, lows[i], highs[i]);
    args.ranges[2 * blockIdx.x] = range.low;
    args.ranges[2 * blockIdx.x + 1] = range.high;
  }
}

COMMLIB_DEVICE Parameters bagua_parameters(const EncodeArgs& args, const Tile& tile, Byte* payload) {
  const Size chunk_idx = tile.chunk_at / args.chunks.chunk;
  const int* const ranges = args.ranges + 2 * chunk_idx * args.parts;
  Range range;
  for (unsigned part = static_cast<unsigned>(tile.lane); part < args.parts; part += kWarp) {
    widen(range, ranges[2 * part], ranges[2 * part + 1]);
  }
  range = range_of_warp(range);
  float minimum = from_ordered(range.low) + 0.0f, maximum = from_ordered(range.high) + 0.0f;
  const float spread = maximum - minimum, top = maximum * (255.0f / (spread + 1e-7f));
  const float limit = from_bits(kWidestRangeBits);
  if (!(minimum > -limit && maximum < limit && is_finite(spread) && is_finite(top))) {
    minimum = maximum = from_bits(kQuietNanBits);
  }
  if (tile.at == 0 && tile.lane == 0) {
    reinterpret_cast<float*>(payload)[0] = minimum;
    reinterpret_cast<float*>(payload)[1] = maximum;
  }
  return Bagua::load_bounds(minimum, maximum);
}

// --- the kernel ------------------------------------------------------------------------------------------------------

template <class Codec, class In, bool kHasFeedback, bool kIsRandom, bool kIsSum>
COMMLIB_DEVICE void encode(const EncodeArgs& args) {
  __shared__ Scratch<Codec> scratches[kWarpsPerBlock];
  const Size idx = tile_of_thread();
  if (idx >= args.chunks.num_tiles) return;  // uniform in a warp
  Bits16* const scratch = scratches[warp_of_thread()].numbers;
  const Tile tile = find_tile<Codec>(args.chunks, idx, lane_of_thread());
  const Layout& layout = layout_of(args.chunks, tile);
  const Seat<Codec> seat(tile);
  Byte* const payload = args.out + tile.payload_at;

  float v[Codec::kPerLane], e[Codec::kPerLane], u[Codec::kPerLane];
  load_values<Codec, In, kHasFeedback, kIsSum>(args, tile, v, e);
  if constexpr (kIsRandom) {
    draw_numbers<Codec>(args.random, args.first + tile.chunk_at + tile.at, tile, scratch);
    read_uniforms<Codec>(scratch, tile, u);
  }
  Parameters p;
  if constexpr (Codec::kIsOneBlock) {
    p = bagua_parameters(args, tile, payload);
  } else {
    p = Codec::analyse(v, seat.m, seat.t);
    write_parameters<Codec>(p, payload, layout, tile);
  }
  int q[Codec::kPerLane];
#pragma unroll
  for (int i = 0; i < Codec::kPerLane; ++i) q[i] = Codec::template code<kIsRandom>(v[i], kIsRandom ? u[i] : 0.0f, p);
  write_codes<Codec>(q, payload, layout, tile, scratch);
  if constexpr (kHasFeedback) write_residual<Codec>(args, tile, v, e, q, p);
}
