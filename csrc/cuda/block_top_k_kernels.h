// blocktopk: one thread block per block of elements, which is in shared memory.
#pragma once

#include "select_kernels.h"

constexpr int kTopKBlock = 4096;
constexpr int kPerThread = kTopKBlock / kThreads;
constexpr int kDigitBits = 8;

// Offsets of the sections of a payload. Block `b` starts after `b` blocks of `kept` places each.
struct BlockTopKLayout {
  Size numel;
  Size indices_at;
  Size codes_at;
  Size nbytes;
  Bits32 kept;
};

struct BlockTopKArgs {
  BlockTopKLayout layout;
  const void* x;
  float* residual;
  Byte* out;
  float beta;
  float gamma;
};

struct BlockTopKDecodeArgs {
  BlockTopKLayout layout;
  const Byte* inputs;
  float* out;
  unsigned* damage;  // as in SparseDecodeArgs
  unsigned num_inputs;
  float divisor;
  float weight;
};

COMMLIB_DEVICE int code_bytes_of(int places) {
  return (places + 3) / 4;
}

COMMLIB_DEVICE int index_bytes_of(int places) {
  return (3 * places + 1) / 2;
}

// One block of a payload.
struct BlockOfPlaces {
  int count, places;  // numbers of elements and places
  Size levels, indices, codes;

  COMMLIB_DEVICE BlockOfPlaces of(const BlockTopKLayout& layout, Size block) {
    const Size left = layout.numel - block * kTopKBlock;
    const int count = left < kTopKBlock ? static_cast<int>(left) : kTopKBlock, kept = static_cast<int>(layout.kept);
    return {count, kept < count ? kept : count, 4 * block,
            layout.indices_at + block * static_cast<Size>(index_bytes_of(kept)),
            layout.codes_at + block * static_cast<Size>(code_bytes_of(kept))};
  }
};

// --- encoding --------------------------------------------------------------------------------------------------------

// Shared memory of a thread block.
struct BlockRoom {
  float values[kTopKBlock];
  float terms[kTopKBlock];  // of sums; finally the decoded values
  Bits16 indices[kTopKBlock];
  unsigned bins[1 << kDigitBits];
  Bits32 warps[kWarpsPerBlock];
  Bits32 least, wanted;  // the smallest selected magnitude; number of selected elements of that magnitude
  Bits32 largest;
  unsigned num_high;
};

// Finds the `places`-th largest magnitude digit by digit.
COMMLIB_DEVICE void find_least(BlockRoom& room, int count, int places) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) room.least = 0, room.wanted = static_cast<Bits32>(places);
  for (int shift = 24; shift >= 0; shift -= kDigitBits) {
    room.bins[thread] = 0;
    __syncthreads();
    const Bits32 prefix = room.least, wanted = room.wanted;
    for (int i = thread; i < count; i += kThreads) {
      const Bits32 magnitude = to_bits(room.values[i]) & kMagnitude;
      if (magnitude >> shift >> kDigitBits == prefix) atomicAdd(room.bins + (magnitude >> shift & 0xFFu), 1u);
    }
    __syncthreads();
    const int digit = (1 << kDigitBits) - 1 - thread;  // threads take the bins from the top
    const Bits32 own = room.bins[digit];
    Bits32 total;
    const Bits32 above = sum_before(own, room.warps, total);
    if (above < wanted && wanted - above <= own) {  // true for one thread
      room.least = prefix << kDigitBits | static_cast<Bits32>(digit);
      room.wanted = wanted - above;
    }
    __syncthreads();
  }
}

// Writes the indices of the selected elements in order.
COMMLIB_DEVICE void name_elements(BlockRoom& room, int count) {
  const int first = static_cast<int>(threadIdx.x) * kPerThread;
  const Bits32 least = room.least, wanted = room.wanted;
  Bits32 own = 0;  // larger elements in the upper half, ties in the lower half
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    if (first + k >= count) continue;
    const Bits32 magnitude = to_bits(room.values[first + k]) & kMagnitude;
    own += magnitude > least ? 0x10000u : (magnitude == least ? 1u : 0u);
  }
  Bits32 total;
  const Bits32 before = sum_before(own, room.warps, total);
  Bits32 sure = before >> 16, tied = before & 0xFFFFu;
#pragma unroll
  for (int k = 0; k < kPerThread; ++k) {
    if (first + k >= count) continue;
    const Bits32 magnitude = to_bits(room.values[first + k]) & kMagnitude;
    const bool is_sure = magnitude > least, is_tied = magnitude == least;
    if (is_sure || (is_tied && tied < wanted)) {
      room.indices[sure + (tied < wanted ? tied : wanted)] = static_cast<Bits16>(first + k);
    }
    sure += is_sure;
    tied += is_tied;
  }
  __syncthreads();
}

COMMLIB_DEVICE float magnitude_of_place(const BlockRoom& room, int place) {
  return from_bits(to_bits(room.values[room.indices[place]]) & kMagnitude);
}

// Sums the terms, padded with zeros to a power of two and folded in halves. All threads get the result.
COMMLIB_DEVICE float folded_sum(float* terms, int places) {
  const int thread = static_cast<int>(threadIdx.x);
  int size = 1;
  while (size < places) size *= 2;
  for (int i = places + thread; i < size; i += kThreads) terms[i] = 0.0f;
  __syncthreads();
  for (int half = size / 2; half > 0; half /= 2) {
    for (int i = thread; i < half; i += kThreads) terms[i] += terms[i + half];
    __syncthreads();
  }
  const float sum = terms[0];
  __syncthreads();
  return sum;
}

struct Levels {
  float least_high;
  Bits16 low, high;
};

COMMLIB_DEVICE Levels find_levels(BlockRoom& room, int places) {
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) room.largest = 0, room.num_high = 0;
  __syncthreads();
  for (int j = thread; j < places; j += kThreads) {
    room.terms[j] = magnitude_of_place(room, j);
    atomicMax(&room.largest, to_bits(room.terms[j]));
  }
  const float sum = folded_sum(room.terms, places);
  if (room.largest >= kWidestRangeBits || !is_finite(sum)) return {from_bits(kInfinityBits), kNanScale, kNanScale};
  const float least_high = room.least == 0 ? from_bits(1) : sum / static_cast<float>(places);
  Bits16 levels[2];
  for (int is_high = 1; is_high >= 0; --is_high) {
    for (int j = thread; j < places; j += kThreads) {
      const float magnitude = magnitude_of_place(room, j);
      const bool is_in = (magnitude >= least_high) == (is_high == 1);
      room.terms[j] = is_in ? magnitude : 0.0f;
      if (is_high == 1 && is_in) atomicAdd(&room.num_high, 1u);
    }
    const float total = folded_sum(room.terms, places);
    const unsigned size = is_high == 1 ? room.num_high : static_cast<unsigned>(places) - room.num_high;
    levels[is_high] = size == 0 ? Bits16{0} : bf16_nearest(total / static_cast<float>(size));
  }
  return {least_high, levels[0], levels[1]};
}

COMMLIB_DEVICE float value_of_code(int code, Bits32 levels) {
  const Bits32 level = (code & 1) != 0 ? levels & 0xFFFF0000u : levels << 16;
  return canonical(from_bits(level ^ static_cast<Bits32>(code >> 1) << 31) + 0.0f);
}

COMMLIB_DEVICE int code_of_place(const BlockRoom& room, int place, const Levels& levels) {
  if (levels.low == kNanScale) return 0;
  const bool is_negative = to_bits(room.values[room.indices[place]]) >> 31 != 0;
  return 2 * is_negative + (magnitude_of_place(room, place) >= levels.least_high);
}

COMMLIB_DEVICE void write_places(const BlockRoom& room, const BlockOfPlaces& part, const Levels& levels, Byte* out) {
  const int thread = static_cast<int>(threadIdx.x), places = part.places, stride = code_bytes_of(places);
  if (thread == 0) {
    *reinterpret_cast<Bits32*>(out + part.levels) = levels.low | static_cast<Bits32>(levels.high) << 16;
  }
  for (int pair = thread; 2 * pair < places; pair += kThreads) {
    const bool has_second = 2 * pair + 1 < places;
    const Bits32 bits =
        room.indices[2 * pair] | (has_second ? static_cast<Bits32>(room.indices[2 * pair + 1]) << 12 : 0);
    Byte* const at = out + part.indices + 3 * pair;
    at[0] = static_cast<Byte>(bits);
    at[1] = static_cast<Byte>(bits >> 8);
    if (has_second) at[2] = static_cast<Byte>(bits >> 16);
  }
  for (int i = thread; i < stride; i += kThreads) {
    int byte = 0;
    for (int run = 0; run < 4; ++run) {
      const int place = run * stride + i;
      if (place < places) byte |= code_of_place(room, place, levels) << (2 * run);
    }
    out[part.codes + static_cast<Size>(i)] = static_cast<Byte>(byte);
  }
}

// Zero-pads the sections.
COMMLIB_DEVICE void zero_block_gaps(const BlockTopKLayout& layout, Byte* out) {
  const Size last = (layout.numel + kTopKBlock - 1) / kTopKBlock - 1;
  const BlockOfPlaces part = BlockOfPlaces::of(layout, last);
  const Size ends[3] = {part.levels + 4, part.indices + static_cast<Size>(index_bytes_of(part.places)),
                        part.codes + static_cast<Size>(code_bytes_of(part.places))};
  const Size limits[3] = {layout.indices_at, layout.codes_at, layout.nbytes};
  for (int section = 0; section < 3; ++section) {
    const Size at = ends[section] + threadIdx.x;
    if (at < limits[section]) out[at] = 0;
  }
}

template <class In, bool kHasFeedback>
COMMLIB_DEVICE void encode_block_top_k(const BlockTopKArgs& args) {
  __shared__ BlockRoom room;
  const int thread = static_cast<int>(threadIdx.x);
  const BlockOfPlaces part = BlockOfPlaces::of(args.layout, blockIdx.x);
  const Size base = static_cast<Size>(blockIdx.x) * kTopKBlock;
  const auto* const x = static_cast<const typename In::Storage*>(args.x) + base;
  float* const residual = kHasFeedback ? args.residual + base : nullptr;
  if (blockIdx.x == 0) zero_block_gaps(args.layout, args.out);
  for (int i = thread; i < part.count; i += kThreads) {
    const float loaded = In::load(x[i]);
    room.values[i] = canonical(kHasFeedback ? loaded + args.beta * residual[i] : loaded);
  }
  __syncthreads();
  find_least(room, part.count, part.places);
  name_elements(room, part.count);
  const Levels levels = find_levels(room, part.places);
  write_places(room, part, levels, args.out);
  if constexpr (kHasFeedback) {
    for (int i = thread; i < part.count; i += kThreads) room.terms[i] = 0.0f;
    __syncthreads();
    const Bits32 both = levels.low | static_cast<Bits32>(levels.high) << 16;
    for (int j = thread; j < part.places; j += kThreads) {
      room.terms[room.indices[j]] = value_of_code(code_of_place(room, j, levels), both);
    }
    __syncthreads();
    for (int i = thread; i < part.count; i += kThreads) {
      const float v = room.values[i], decoded = room.terms[i], rest = (v - decoded) * args.gamma;
      if (is_finite(v) && is_finite(decoded)) residual[i] = rest;
    }
  }
}

// --- decoding --------------------------------------------------------------------------------------------------------

struct NamedElement {
  int index;
  float value;
  bool is_in_order;  // index is within the block and above that of the place before
};

COMMLIB_DEVICE int index_of_place(const Byte* indices, int place) {
  const Byte* const at = indices + place / 2 * 3;
  return place % 2 == 0 ? at[0] | (at[1] & 0xF) << 8 : at[1] >> 4 | at[2] << 4;
}

COMMLIB_DEVICE NamedElement element_of_place(const Byte* payload, const BlockOfPlaces& part, int place) {
  const Byte* const indices = payload + part.indices;
  const int index = index_of_place(indices, place), stride = code_bytes_of(part.places);
  const int code = payload[part.codes + static_cast<Size>(place % stride)] >> (2 * (place / stride)) & 3;
  const bool is_in_order = index < part.count && (place == 0 || index_of_place(indices, place - 1) < index);
  return {index, value_of_code(code, *reinterpret_cast<const Bits32*>(payload + part.levels)), is_in_order};
}

// out = sum of the payloads / divisor, payload by payload, so that sums are in the order of the ranks without atomics.
// Places of a damaged payload that are out of order are skipped.
COMMLIB_DEVICE void sum_block_top_k(const BlockTopKDecodeArgs& args) {
  __shared__ float sums[kTopKBlock];
  const int thread = static_cast<int>(threadIdx.x);
  const BlockOfPlaces part = BlockOfPlaces::of(args.layout, blockIdx.x);
  for (int i = thread; i < kTopKBlock; i += kThreads) sums[i] = 0.0f;
  for (unsigned input = 0; input < args.num_inputs; ++input) {
    __syncthreads();
    for (int j = thread; j < part.places; j += kThreads) {
      const NamedElement named = element_of_place(args.inputs + input * args.layout.nbytes, part, j);
      if (named.is_in_order) {
        sums[named.index] = canonical(sums[named.index] + named.value);
      } else {
        atomicMax(args.damage, input + 1);
      }
    }
  }
  __syncthreads();
  float* const out = args.out + static_cast<Size>(blockIdx.x) * kTopKBlock;
  for (int i = thread; i < part.count; i += kThreads) {
    out[i] = args.divisor == 1.0f ? sums[i] : canonical(sums[i] / args.divisor);
  }
}

// out += weight * payload. Places that are out of order are skipped.
COMMLIB_DEVICE void add_block_top_k(const BlockTopKDecodeArgs& args) {
  const BlockOfPlaces part = BlockOfPlaces::of(args.layout, blockIdx.x);
  for (int j = static_cast<int>(threadIdx.x); j < part.places; j += kThreads) {
    const NamedElement named = element_of_place(args.inputs, part, j);
    if (named.is_in_order) {
      float* const out = args.out + static_cast<Size>(blockIdx.x) * kTopKBlock + named.index;
      *out = canonical(*out + args.weight * named.value);
    } else {
      atomicMax(args.damage, 1u);
    }
  }
}
