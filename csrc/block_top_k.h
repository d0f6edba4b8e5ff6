// The codec blocktopk: the elements of largest magnitude of each block, as 12 bits of index and 2 of value.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "sparse.h"

namespace commlib {

// Offsets of the sections of a payload: two levels (bf16) per block, indices, codes; and the ends of the sections
// before zero padding.
struct BlockTopKLayout {
  std::size_t numel, kept, num_blocks, levels_end, indices_at, indices_end, codes_at, codes_end, nbytes;

  BlockTopKLayout(std::size_t elements, std::size_t most)
      : numel(elements), kept(most), num_blocks((elements + kTopKBlock - 1) / kTopKBlock) {
    const std::size_t full = numel / kTopKBlock, last = std::min(kept, numel % kTopKBlock);
    levels_end = 4 * num_blocks;
    indices_at = aligned(levels_end);
    indices_end = indices_at + full * index_bytes(kept) + index_bytes(last);
    codes_at = aligned(indices_end);
    codes_end = codes_at + full * code_bytes(kept) + code_bytes(last);
    nbytes = aligned(codes_end);
  }
  std::size_t elements_of(std::size_t block) const { return std::min(kTopKBlock, numel - block * kTopKBlock); }
  std::size_t places_of(std::size_t block) const { return std::min(kept, elements_of(block)); }
  std::size_t levels_of(std::size_t block) const { return 4 * block; }
  std::size_t indices_of(std::size_t block) const { return indices_at + block * index_bytes(kept); }
  std::size_t codes_of(std::size_t block) const { return codes_at + block * code_bytes(kept); }

  static std::size_t index_bytes(std::size_t places) { return (12 * places + 7) / 8; }
  static std::size_t code_bytes(std::size_t places) { return (2 * places + 7) / 8; }
};

// Writes a whole payload with `layout.kept` elements of each block, 1 to kTopKBlock.
void encode_block_top_k(const SparseSource& source, const BlockTopKLayout& layout, std::uint8_t* payload,
                        int num_threads);

// Returns whether the indices of each block ascend and lie within the block.
bool block_top_k_is_valid(const std::uint8_t* payload, const BlockTopKLayout& layout, int num_threads);

// out = sum of the payloads / divisor
void sum_block_top_k(const std::uint8_t* const* payloads, std::size_t count, const BlockTopKLayout& layout,
                     float divisor, float* out, int num_threads);
// out += weight * payload, for the elements in the payload
void add_block_top_k(const std::uint8_t* payload, const BlockTopKLayout& layout, float weight, float* out,
                     int num_threads);

}  // namespace commlib
