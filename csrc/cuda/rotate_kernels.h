// The random Hadamard rotation: a warp has a piece of 256 elements, with four neighbors of each half per lane.
#pragma once

#include "device.h"

struct RotateArgs {
  const float* x;
  float* out;  // `x` itself, or not overlapping it
  Size numel;
  Random random;
  unsigned is_inverse;
};

constexpr int kPiece = 256;
constexpr int kPieceValues = kPiece / kWarp;  // number i of lane t is element i / 4 * 128 + 4 * t + i % 4

// Draws the sign bit or 0 for each of a lane's values; `words` is scratch memory of the warp.
COMMLIB_DEVICE void draw_signs(const Random& random, Size start, int m, int lane, Bits32* words, Bits32* signs) {
#pragma unroll
  for (int i = 0; i < kPieceValues; ++i) signs[i] = 0;
  for_segments(random, start, m, [&](Size offset, int count, int done) {
    const Size first = offset / 128;
    __syncwarp();
    if (first + static_cast<Size>(lane) <= (offset + static_cast<Size>(count) - 1) / 128) {  // at most three lanes
      const Words four = random_words(random, first + static_cast<Size>(lane));
#pragma unroll
      for (int i = 0; i < 4; ++i) words[4 * lane + i] = four.word[i];
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < kPieceValues; ++i) {
      const int e = i / 4 * (kPiece / 2) + 4 * lane + i % 4 - done;
      if (e >= 0 && e < count) {
        const int bit = static_cast<int>(offset % 128) + e;
        signs[i] = words[bit / 32] >> (bit % 32) << 31;
      }
    }
  });
}

// Returns the length of the piece of element `e` in the last `m` elements: the highest bit that m has and e does not.
COMMLIB_DEVICE int piece_length(int m, int e) {
  return m == kPiece ? kPiece : 1 << (31 - __clz(m ^ e));
}

COMMLIB_DEVICE float inverse_root(int length) {
  constexpr float kRoots[] = {1.0f,           0x1.6a09e6p-1f, 0x1p-1f,        0x1.6a09e6p-2f, 0x1p-2f,
                              0x1.6a09e6p-3f, 0x1p-3f,        0x1.6a09e6p-4f, 0x1p-4f};
  float root = kRoots[8];
#pragma unroll
  for (int power = 0; power < 8; ++power) root = length == 1 << power ? kRoots[power] : root;
  return root;
}

COMMLIB_DEVICE void rotate(const RotateArgs& args) {
  __shared__ Bits32 words[kWarpsPerBlock][12];
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  const Size at = (static_cast<Size>(blockIdx.x) * kWarpsPerBlock + static_cast<Size>(warp)) * kPiece;
  if (at >= args.numel) return;  // uniform in a warp
  const int m = args.numel - at < kPiece ? static_cast<int>(args.numel - at) : kPiece;
  const float* const x = args.x + at;
  float* const out = args.out + at;

  float v[kPieceValues];
  Bits32 signs[kPieceValues];
  int length[kPieceValues];
#pragma unroll
  for (int i = 0; i < kPieceValues; ++i) {
    const int e = i / 4 * (kPiece / 2) + 4 * lane + i % 4;
    length[i] = e < m ? piece_length(m, e) : 0;
  }
  if (m == kPiece && is_aligned(x, 16)) {
    Float32::load4(x + 4 * lane, v);
    Float32::load4(x + kPiece / 2 + 4 * lane, v + 4);
  } else {
#pragma unroll
    for (int i = 0; i < kPieceValues; ++i) v[i] = length[i] > 0 ? x[i / 4 * (kPiece / 2) + 4 * lane + i % 4] : 0.0f;
  }
  draw_signs(args.random, at, m, lane, words[warp], signs);
  if (!args.is_inverse) {
#pragma unroll
    for (int i = 0; i < kPieceValues; ++i) v[i] = from_bits(to_bits(v[i]) ^ signs[i]);
  }

  // Pairs at distances 1 and 2 are within a lane, 4 to 64 in two lanes, 128 within a lane.
#pragma unroll
  for (int half = 1; half < kPiece; half *= 2) {
    float next[kPieceValues];
#pragma unroll
    for (int i = 0; i < kPieceValues; ++i) {
      const int e = i / 4 * (kPiece / 2) + 4 * lane + i % 4;
      const bool is_lane = half >= 4 && half < kPiece / 2;
      const float other = is_lane ? __shfl_xor_sync(kAllLanes, v[i], half / 4) : v[half < 4 ? i ^ half : i ^ 4];
      const float combined = e & half ? other - v[i] : v[i] + other;
      next[i] = half < length[i] ? combined : v[i];
    }
#pragma unroll
    for (int i = 0; i < kPieceValues; ++i) v[i] = next[i];
  }
#pragma unroll
  for (int i = 0; i < kPieceValues; ++i) {
    v[i] = v[i] * inverse_root(length[i]);
    if (args.is_inverse) v[i] = from_bits(to_bits(v[i]) ^ signs[i]);
  }
  if (m == kPiece && is_aligned(out, 16)) {
    Float32::store4(out + 4 * lane, v);
    Float32::store4(out + kPiece / 2 + 4 * lane, v + 4);
  } else {
#pragma unroll
    for (int i = 0; i < kPieceValues; ++i) {
      if (length[i] > 0) out[i / 4 * (kPiece / 2) + 4 * lane + i % 4] = canonical(v[i]);
    }
  }
}
