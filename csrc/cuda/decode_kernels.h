// Decoding of a tensor or a sum of payloads, and addition to a tensor.
#pragma once

#include "block_kernels.h"

template <class Codec, class Out, bool kIsSum>
COMMLIB_DEVICE void decode(const DecodeArgs& args) {
  const Size idx = tile_of_thread();
  if (idx >= args.chunks.num_tiles) return;  // uniform in a warp
  const Tile tile = find_tile<Codec>(args.chunks, idx, lane_of_thread());
  const Layout& layout = layout_of(args.chunks, tile);
  auto* const out = static_cast<typename Out::Storage*>(args.out) + tile.chunk_at + tile.at;

  float total[Codec::kPerLane];
  const unsigned count = kIsSum ? args.num_inputs : 1;
  const float divisor = kIsSum ? args.divisor : 1.0f;
  sum_tile<Codec>(args.inputs + tile.payload_at, layout.nbytes, count, divisor, layout, tile, total);
  if (args.adds) {
    float before[Codec::kPerLane];
    load_tile<Codec, Out>(out, tile, before);
#pragma unroll
    for (int i = 0; i < Codec::kPerLane; ++i) total[i] = before[i] + args.weight * total[i];
  }
  store_tile<Codec, Out>(out, tile, total);
}
