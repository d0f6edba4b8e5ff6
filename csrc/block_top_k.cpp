// The drivers of blocktopk.
//
// [Note: a bound from maxima] The k-th largest of the maxima of a block's groups is a lower bound that at least k
// elements reach, and few more than k. Only these are examined further. The bound does not affect the selection.
#include "block_top_k.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>

#include "float_env.h"
#include "threads.h"

namespace commlib {
namespace scalar_math {
#include "codec_math.h"
}

namespace {

using scalar_math::Bits16;
using scalar_math::Bits32;

constexpr std::size_t kBlocksGrain = kElementsGrain / kTopKBlock;

const SparseKernels& kernels() {
  return *active_kernels().sparse;
}

// The selected elements of a block, in the order of the indices.
struct Named {
  std::size_t count;
  Key keys[kTopKBlock];
};

// Returns a magnitude that at least `places` elements of a whole block reach. Reorders `maxima`. All NaN are equal.
Bits32 bound_of(Bits32* maxima, std::size_t places) {
  if (places > kGroups / 2) return 0;
  std::nth_element(maxima, maxima + (places - 1), maxima + kGroups, std::greater<>());
  return std::min(maxima[places - 1], scalar_math::kInfinityBits);
}

// Copies the `count` largest of the ordered candidates to `named`.
void keep_largest(const Key* candidates, std::size_t num_candidates, std::size_t count, Named& named) {
  Key least = 0;
  if (num_candidates > count) {
    Key sorted[kTopKBlock];
    std::copy(candidates, candidates + num_candidates, sorted);
    std::nth_element(sorted, sorted + (count - 1), sorted + num_candidates, std::greater<>());
    least = sorted[count - 1];
  }
  std::size_t kept = 0;
  for (std::size_t i = 0; i < num_candidates && kept < count; ++i) {
    named.keys[kept] = candidates[i];  // a branch would be mispredicted
    kept += candidates[i] >= least;
  }
  named.count = count;
}

// Sum in the order of the format: padded with zeros to a power of two and folded in halves.
float folded_sum(float* terms, std::size_t count) {
  std::size_t size = 1;
  while (size < count) size *= 2;
  std::fill(terms + count, terms + size, 0.0f);
  for (; size > 1; size /= 2) {
    for (std::size_t i = 0; i < size / 2; ++i) terms[i] += terms[i + size / 2];
  }
  return terms[0];
}

struct Levels {
  float least_high;  // smallest magnitude with the higher level
  Bits16 low, high;
};

// Returns the means of two classes of magnitudes: those that reach the overall mean and the rest. If any are 0, the
// zeros are the lower class and all others the higher one.
Levels levels_of(const Named& named) {
  float terms[kTopKBlock];
  Bits32 smallest = ~Bits32{0}, largest = 0;
  for (std::size_t i = 0; i < named.count; ++i) {
    smallest = std::min(smallest, magnitude_of(named.keys[i]));
    largest = std::max(largest, magnitude_of(named.keys[i]));
    terms[i] = scalar_math::from_bits(magnitude_of(named.keys[i]));
  }
  const float sum = folded_sum(terms, named.count);
  if (largest >= scalar_math::kWidestRangeBits || scalar_math::to_bits(sum) >= scalar_math::kInfinityBits) {
    return {scalar_math::from_bits(scalar_math::kInfinityBits), scalar_math::kNanScale, scalar_math::kNanScale};
  }
  const float least_high = smallest == 0 ? scalar_math::from_bits(1) : sum / static_cast<float>(named.count);
  Bits16 levels[2];
  for (const bool is_high : {false, true}) {
    std::size_t size = 0;
    for (std::size_t i = 0; i < named.count; ++i) {
      const float magnitude = scalar_math::from_bits(magnitude_of(named.keys[i]));
      const bool is_in = (magnitude >= least_high) == is_high;
      terms[i] = is_in ? magnitude : 0.0f;
      size += is_in;
    }
    const float total = folded_sum(terms, named.count);
    levels[is_high] = size == 0 ? Bits16{0} : scalar_math::bf16_nearest(total / static_cast<float>(size));
  }
  return {least_high, levels[0], levels[1]};
}

float value_of(unsigned code, const Bits16* levels) {
  const Bits32 bits = static_cast<Bits32>(levels[code & 1]) << 16 ^ static_cast<Bits32>(code >> 1) << 31;
  return scalar_math::canonical(scalar_math::from_bits(bits) + 0.0f);
}

// Writes the selected elements of a block, and their decoded values to `decoded` unless it is null.
void write_block(const Named& named, const BlockTopKLayout& layout, std::size_t block, std::uint8_t* payload,
                 float* decoded) {
  const Levels found = levels_of(named);
  const Bits16 levels[2] = {found.low, found.high};
  std::memcpy(payload + layout.levels_of(block), levels, sizeof levels);
  std::uint8_t* const indices = payload + layout.indices_of(block);
  std::uint8_t* const codes = payload + layout.codes_of(block);
  const std::size_t stride = BlockTopKLayout::code_bytes(named.count);
  std::memset(codes, 0, stride);
  const bool is_finite = found.low != scalar_math::kNanScale;
  for (std::size_t i = 0; i < named.count; ++i) {
    const Key key = named.keys[i];
    const std::uint32_t index = index_of(key);
    std::uint8_t* const at = indices + i / 2 * 3;
    if (i % 2 == 0) {
      at[0] = static_cast<std::uint8_t>(index);
      at[1] = static_cast<std::uint8_t>(index >> 8);
    } else {
      at[1] = static_cast<std::uint8_t>(at[1] | index << 4);
      at[2] = static_cast<std::uint8_t>(index >> 4);
    }
    const bool is_high = scalar_math::from_bits(magnitude_of(key)) >= found.least_high;
    const unsigned code = is_finite ? static_cast<unsigned>(key & 1) << 1 | is_high : 0;
    codes[i % stride] = static_cast<std::uint8_t>(codes[i % stride] | code << (2 * (i / stride)));
    if (decoded != nullptr) decoded[i] = value_of(code, levels);
  }
}

// Replaces the residuals of a block with the selected elements `named`, whose decoded values are `decoded`.
void replace_residuals(const SparseSource& source, std::size_t begin, std::size_t count, const float* values,
                       const Named& named, const float* decoded) {
  float before[kTopKBlock];
  float* const residual = source.residual + begin;
  for (std::size_t i = 0; i < named.count; ++i) before[i] = residual[index_of(named.keys[i])];
  Scan none = {0, 0, true, nullptr, 0, 0};
  kernels().scan(source, begin, begin + count, none);
  for (std::size_t i = 0; i < named.count; ++i) {
    const std::uint32_t at = index_of(named.keys[i]);
    const bool is_finite = magnitude_of(named.keys[i]) < scalar_math::kInfinityBits && decoded[i] - decoded[i] == 0.0f;
    residual[at] = is_finite ? (values[at] - decoded[i]) * source.gamma : before[i];
  }
}

// Calls `put(index, value)` for a block's elements, with the index in the block; stops if it returns false.
template <class Put>
bool for_each_named(const std::uint8_t* payload, const BlockTopKLayout& layout, std::size_t block, const Put& put) {
  Bits16 levels[2];
  std::memcpy(levels, payload + layout.levels_of(block), sizeof levels);
  const float values[4] = {value_of(0, levels), value_of(1, levels), value_of(2, levels), value_of(3, levels)};
  const std::uint8_t* const indices = payload + layout.indices_of(block);
  const std::uint8_t* const codes = payload + layout.codes_of(block);
  const std::size_t count = layout.places_of(block), stride = BlockTopKLayout::code_bytes(count);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint8_t* const at = indices + i / 2 * 3;
    const unsigned index = i % 2 == 0 ? at[0] | (at[1] & 0xFu) << 8 : at[1] >> 4 | static_cast<unsigned>(at[2]) << 4;
    if (!put(index, values[codes[i % stride] >> (2 * (i / stride)) & 3])) return false;
  }
  return true;
}

void zero_gaps(const BlockTopKLayout& layout, std::uint8_t* payload) {
  std::memset(payload + layout.levels_end, 0, layout.indices_at - layout.levels_end);
  std::memset(payload + layout.indices_end, 0, layout.codes_at - layout.indices_end);
  std::memset(payload + layout.codes_end, 0, layout.nbytes - layout.codes_end);
}

}  // namespace

void encode_block_top_k(const SparseSource& source, const BlockTopKLayout& layout, std::uint8_t* payload,
                        int num_threads) {
  if (layout.numel == 0) return;
  const ExactFloatScope exact;
  zero_gaps(layout, payload);
  parallel_for(layout.num_blocks, kBlocksGrain, num_threads, [&](std::size_t first, std::size_t last) {
    alignas(64) float buffer[kTopKBlock], decoded[kTopKBlock];
    Key candidates[kTopKBlock];
    Bits32 maxima[kGroups];
    Named named;
    for (std::size_t block = first; block < last; ++block) {
      const std::size_t begin = block * kTopKBlock, count = layout.elements_of(block), places = layout.places_of(block);
      const float* const values = kernels().block_values(source, begin, count, buffer, maxima);
      const Bits32 bound = count == kTopKBlock ? bound_of(maxima, places) : 0;
      keep_largest(candidates, kernels().find(values, count, bound, candidates), places, named);
      const bool feeds = source.residual != nullptr;
      write_block(named, layout, block, payload, feeds ? decoded : nullptr);
      if (feeds) replace_residuals(source, begin, count, values, named, decoded);
    }
  });
}

bool block_top_k_is_valid(const std::uint8_t* payload, const BlockTopKLayout& layout, int num_threads) {
  std::atomic<bool> is_valid{true};
  parallel_for(layout.num_blocks, kBlocksGrain, num_threads, [&](std::size_t first, std::size_t last) {
    for (std::size_t block = first; block < last; ++block) {
      std::size_t least = 0;
      const std::size_t end = layout.elements_of(block);
      const bool ascends = for_each_named(payload, layout, block, [&](std::size_t index, float) {
        const bool follows = least <= index && index < end;
        least = index + 1;
        return follows;
      });
      if (!ascends) is_valid.store(false, std::memory_order_relaxed);
    }
  });
  return is_valid;
}

void sum_block_top_k(const std::uint8_t* const* payloads, std::size_t count, const BlockTopKLayout& layout,
                     float divisor, float* out, int num_threads) {
  const ExactFloatScope exact;
  const float nothing = 0.0f / divisor;  // may be -0; values never are, so sums are the same as when starting from 0
  parallel_for(layout.num_blocks, kBlocksGrain, num_threads, [&](std::size_t first, std::size_t last) {
    for (std::size_t block = first; block < last; ++block) {
      float* const to = out + block * kTopKBlock;
      std::uint64_t is_named[kTopKBlock / 64] = {};  // one bit per element
      std::fill(to, to + layout.elements_of(block), nothing);
      for (std::size_t input = 0; input < count; ++input) {
        for_each_named(payloads[input], layout, block, [&](std::size_t index, float value) {
          to[index] = scalar_math::canonical(to[index] + value);
          is_named[index / 64] |= std::uint64_t{1} << (index % 64);
          return true;
        });
      }
      for (std::size_t word = 0; divisor != 1.0f && word < kTopKBlock / 64; ++word) {
        for (std::uint64_t bits = is_named[word]; bits != 0; bits &= bits - 1) {
          float& sum = to[64 * word + static_cast<std::size_t>(__builtin_ctzll(bits))];
          sum = scalar_math::canonical(sum / divisor);
        }
      }
    }
  });
}

void add_block_top_k(const std::uint8_t* payload, const BlockTopKLayout& layout, float weight, float* out,
                     int num_threads) {
  const ExactFloatScope exact;
  parallel_for(layout.num_blocks, kBlocksGrain, num_threads, [&](std::size_t first, std::size_t last) {
    for (std::size_t block = first; block < last; ++block) {
      float* const to = out + block * kTopKBlock;
      for_each_named(payload, layout, block, [&](std::size_t index, float value) {
        to[index] = scalar_math::canonical(to[index] + weight * value);
        return true;
      });
    }
  });
}

}  // namespace commlib
