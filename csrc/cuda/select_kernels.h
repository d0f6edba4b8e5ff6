// topk and threshold: exact, in the order of the indices, deterministic on every device.
//
// [Note: top-k by digits] The threshold is found digit by digit, of 12, 10 and 9 bits of the magnitude, the highest
// first. A histogram of a digit, over the elements with the digits found so far, locates the k-th largest. The first
// histogram also gives the number of elements with its digit or a larger one. That is usually little more than k, and
// they are copied, so that the tensor itself is read only twice: by the first histogram and by that copy. If there are
// too many of them (nearly equal magnitudes), each later pass reads the tensor. The device decides this, without the
// host.
//
// [Note: look-back] Compaction in one pass (Merrill and Garland, 2016): thread blocks take tiles in ascending order,
// publish their own counts, and look back at earlier tiles until they find one with the sum of all before it. A counter
// assigns the tiles, so every tile that is waited for is already running. Only integers are summed.
#pragma once

#include "sparse_kernels.h"

constexpr int kCopies = 2;  // of the histogram, so that neighboring lanes seldom wait for each other
constexpr int kItems = 16;  // elements per thread
constexpr int kSelectTile = kThreads * kItems;

struct Digit {
  int shift, bits;
};

COMMLIB_DEVICE Digit digit_of(int pass) {
  return pass == 0 ? Digit{19, 12} : (pass == 1 ? Digit{9, 10} : Digit{0, 9});
}

// Returns the sum over the threads before this one, and the sum over all threads in `total`.
COMMLIB_DEVICE Bits32 sum_before(Bits32 x, Bits32* warps, Bits32& total) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  Bits32 sum = x;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const Bits32 other = __shfl_up_sync(kAllLanes, sum, distance);
    if (lane >= distance) sum += other;
  }
  if (lane == kWarp - 1) warps[warp] = sum;
  __syncthreads();
  Bits32 before = 0;
  total = 0;
  for (int i = 0; i < kWarpsPerBlock; ++i) {
    before += i < warp ? warps[i] : 0;
    total += warps[i];
  }
  __syncthreads();
  return before + sum - x;
}

// Called by the last block of a histogram: finds the digit and prepares the histogram for the next one.
COMMLIB_DEVICE void choose_digit(const SparseArgs& args, Digit digit, bool is_first, Bits32* warps) {
  constexpr int kPerThread = kBins / kThreads;
  Selection& selection = *args.selection;
  volatile unsigned* const histogram = selection.histogram;
  const Bits32 wanted = is_first ? args.places : selection.wanted;
  Bits32 counts[kPerThread], own = 0;
  const int top = kBins - 1 - static_cast<int>(threadIdx.x) * kPerThread;  // threads take the bins from the top
#pragma unroll
  for (int i = 0; i < kPerThread; ++i) {
    counts[i] = histogram[top - i];
    own += counts[i];
    histogram[top - i] = 0;
  }
  Bits32 total;
  Bits32 above = sum_before(own, warps, total);
  if (above < wanted && wanted - above <= own) {  // true for one thread
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      if (above < wanted && wanted - above <= counts[i]) {
        selection.prefix = selection.prefix << digit.bits | static_cast<Bits32>(top - i);
        selection.wanted = wanted - above;
        if (is_first) {
          selection.num_candidates = above + counts[i];
          selection.has_candidates = above + counts[i] <= args.capacity;
        }
        break;
      }
      above += counts[i];
    }
  }
  if (threadIdx.x == 0) selection.blocks_done = 0;
}

template <class In, bool kHasFeedback, int kPass>
COMMLIB_DEVICE void find_digit(const SparseArgs& args) {
  __shared__ unsigned bins[kCopies * kBins];
  __shared__ Bits32 warps[kWarpsPerBlock];
  __shared__ bool is_last;
  const Digit digit = digit_of(kPass);
  const bool has_candidates = kPass > 0 && args.selection->has_candidates;
  const Size count = has_candidates ? args.selection->num_candidates : args.numel;
  const Bits32 prefix = kPass > 0 ? args.selection->prefix : 0;
  for (int i = static_cast<int>(threadIdx.x); i < kCopies * kBins; i += kThreads) bins[i] = 0;
  __syncthreads();
  unsigned* const own = bins + static_cast<int>(threadIdx.x) % kCopies * kBins;
#pragma unroll 4
  for (Size i = thread_of_grid(); i < count; i += threads_of_grid()) {
    const Bits32 bits = has_candidates ? args.bits[i] : to_bits(value_at<In, kHasFeedback>(args, i));
    const Bits32 magnitude = bits & kMagnitude;
    if (magnitude >> digit.shift >> digit.bits == prefix) {
      atomicAdd(own + (magnitude >> digit.shift & ((1u << digit.bits) - 1u)), 1u);
    }
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kBins; i += kThreads) {
    unsigned sum = 0;
#pragma unroll
    for (int copy = 0; copy < kCopies; ++copy) sum += bins[copy * kBins + i];
    if (sum > 0) atomicAdd(args.selection->histogram + i, sum);
  }
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) is_last = atomicAdd(&args.selection->blocks_done, 1u) == gridDim.x - 1;
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  choose_digit(args, digit, kPass == 0, warps);
}

// --- compaction ------------------------------------------------------------------------------------------------------

struct Counts {
  Bits32 sure, tied;  // elements that are taken; ties, which are taken while there are places
};

COMMLIB_DEVICE Bits32 sum_of_warp(Bits32 x) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kAllLanes, x, distance);
  return x;
}

// Called by one warp: publishes a tile's counts and returns those of all tiles before it.
COMMLIB_DEVICE Counts look_back(Status* status, unsigned tile, Counts own, int lane) {
  volatile Status* const table = status;
  if (lane == 0) {
    table[tile].own[0] = own.sure;
    table[tile].own[1] = own.tied;
    __threadfence();
    table[tile].flag = 1;
  }
  Counts before = {0, 0};
  long long last = static_cast<long long>(tile) - 1;
  for (bool is_known = false; !is_known; last -= kWarp) {
    const long long i = last - lane;
    unsigned flag = 2;  // there is nothing before the first tile
    while (i >= 0 && (flag = table[i].flag) == 0) __nanosleep(64);
    __threadfence();
    const unsigned known = __ballot_sync(kAllLanes, flag == 2);
    const int nearest = known == 0 ? kWarp : __ffs(static_cast<int>(known)) - 1;
    const bool counts = i >= 0 && lane <= nearest, is_total = lane == nearest;
    before.sure += sum_of_warp(counts ? (is_total ? table[i].total[0] : table[i].own[0]) : 0);
    before.tied += sum_of_warp(counts ? (is_total ? table[i].total[1] : table[i].own[1]) : 0);
    is_known = known != 0;
  }
  if (lane == 0) {
    table[tile].total[0] = before.sure + own.sure;
    table[tile].total[1] = before.tied + own.tied;
    __threadfence();
    table[tile].flag = 2;
  }
  return before;
}

// The input and output of a compaction.
enum class Goal {
  kCandidates,  // elements with the first digit or a larger one, to the candidates
  kTopK,        // the payload, from the candidates or the tensor
  kThreshold,   // the payload: the first elements that reach the threshold
};

// Item k of a lane is element 128 * (k / 4) + 4 * lane + k % 4 of its warp's 512; `first` is item 0.
COMMLIB_DEVICE Size element_of(Size first, int k) {
  return first + static_cast<Size>(k / 4 * 4 * kWarp + k % 4);
}

template <class In, bool kHasFeedback>
COMMLIB_DEVICE bool can_load_vectors(const SparseArgs& args, Size first, Size count) {
  return element_of(first, kItems - 1) < count && is_aligned(args.x, 16) &&
         (!kHasFeedback || is_aligned(args.residual, 16));
}

// Loads v and e of a lane's items; +0 past the end.
template <class In, bool kHasFeedback>
COMMLIB_DEVICE void load_items(const SparseArgs& args, Size first, Size count, float* v, float* e) {
  const auto* const x = static_cast<const typename In::Storage*>(args.x);
  if (can_load_vectors<In, kHasFeedback>(args, first, count)) {
#pragma unroll
    for (int k = 0; k < kItems; k += 4) {
      In::load4(x + element_of(first, k), v + k);
      if constexpr (kHasFeedback) Float32::load4(args.residual + element_of(first, k), e + k);
    }
  } else {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      const Size element = element_of(first, k);
      v[k] = element < count ? In::load(x[element]) : 0.0f;
      if constexpr (kHasFeedback) e[k] = element < count ? args.residual[element] : 0.0f;
    }
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) v[k] = canonical(kHasFeedback ? v[k] + args.beta * e[k] : v[k]);
}

COMMLIB_DEVICE void load_candidates(const SparseArgs& args, Size first, Size count, float* v) {
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const Size element = element_of(first, k);
    v[k] = element < count ? from_bits(args.bits[element]) : 0.0f;
  }
}

// Writes the new residuals of a lane's items; those in `sent` are sent.
template <class In>
COMMLIB_DEVICE void write_rests(const SparseArgs& args, Size first, Size count, const float* v, const float* e,
                                unsigned sent) {
  float rest[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    rest[k] = (sent >> k & 1u) != 0 && is_finite(v[k]) ? rest_of_sent(args) : rest_of(args, v[k], e[k]);
  }
  const bool is_whole = can_load_vectors<In, true>(args, first, count);
#pragma unroll
  for (int k = 0; k < kItems; k += 4) {
    if (is_whole) {
      store_vector(args.residual + element_of(first, k), rest[k], rest[k + 1], rest[k + 2], rest[k + 3]);
    } else {
#pragma unroll
      for (int i = k; i < k + 4; ++i) {
        if (element_of(first, i) < count) args.residual[element_of(first, i)] = rest[i];
      }
    }
  }
}

// The taken items of a lane, and the number of the warp's 512 items before each group of four.
struct Ranks {
  unsigned sure, tied;  // one bit per item
  Counts before[kItems / 4];
  Counts all;  // of the warp
};

template <Goal kGoal>
COMMLIB_DEVICE Ranks rank_items(const float* v, Size first, Size count, Bits32 least) {
  const unsigned lower = (1u << (threadIdx.x % kWarp)) - 1u;
  Ranks ranks = {};
#pragma unroll
  for (int k = 0; k < kItems; k += 4) {
    Counts before = ranks.all;
#pragma unroll
    for (int i = k; i < k + 4; ++i) {
      const Bits32 magnitude = to_bits(v[i]) & kMagnitude;
      const bool is_there = element_of(first, i) < count;
      const bool is_tied = is_there && (kGoal == Goal::kTopK ? magnitude == least : magnitude >= least);
      const unsigned tied = __ballot_sync(kAllLanes, is_tied);
      ranks.tied |= static_cast<unsigned>(is_tied) << i;
      before.tied += static_cast<Bits32>(__popc(tied & lower));
      ranks.all.tied += static_cast<Bits32>(__popc(tied));
      if constexpr (kGoal == Goal::kTopK) {
        const bool is_sure = is_there && magnitude > least;
        const unsigned sure = __ballot_sync(kAllLanes, is_sure);
        ranks.sure |= static_cast<unsigned>(is_sure) << i;
        before.sure += static_cast<Bits32>(__popc(sure & lower));
        ranks.all.sure += static_cast<Bits32>(__popc(sure));
      }
    }
    ranks.before[k / 4] = before;
  }
  return ranks;
}

// Returns the counts of all elements before those of this warp. `room` is shared by the block.
COMMLIB_DEVICE Counts count_before(const SparseArgs& args, Status* status, unsigned tile, Counts warp_all, bool is_last,
                                   Counts* room) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp, warp = static_cast<int>(threadIdx.x) / kWarp;
  Counts* const base = room + kWarpsPerBlock;
  if (lane == 0) room[warp] = warp_all;
  __syncthreads();
  Counts before = {0, 0}, tile_all = {0, 0};
  for (int i = 0; i < kWarpsPerBlock; ++i) {
    const Counts one = room[i];
    before.sure += i < warp ? one.sure : 0;
    before.tied += i < warp ? one.tied : 0;
    tile_all.sure += one.sure;
    tile_all.tied += one.tied;
  }
  if (warp == 0) {
    const Counts tiles_before = look_back(status, tile, tile_all, lane);
    if (lane == 0) {
      *base = tiles_before;
      const Bits32 total = tiles_before.tied + tile_all.tied;
      if (is_last) args.selection->num_used = total < args.places ? total : args.places;
    }
  }
  __syncthreads();
  return {before.sure + base->sure, before.tied + base->tied};
}

template <class In, bool kHasFeedback, Goal kGoal>
COMMLIB_DEVICE void compact_tile(const SparseArgs& args, unsigned tile, bool is_last, bool has_candidates, Size count,
                                 Counts* room) {
  const Selection& selection = *args.selection;
  Bits32 least = args.threshold, limit = args.places;  // `limit`: number of ties that are taken
  if constexpr (kGoal == Goal::kCandidates) least = selection.prefix << digit_of(0).shift, limit = args.capacity;
  if constexpr (kGoal == Goal::kTopK) least = selection.prefix, limit = selection.wanted;
  const Size first = static_cast<Size>(tile) * kSelectTile + static_cast<Size>(threadIdx.x / kWarp * (kItems * kWarp)) +
                     static_cast<Size>(4 * (threadIdx.x % kWarp));
  float v[kItems], e[kItems];
  if (has_candidates) {
    load_candidates(args, first, count, v);
  } else {
    load_items<In, kHasFeedback>(args, first, count, v, e);
  }
  const Ranks ranks = rank_items<kGoal>(v, first, count, least);
  const Counts base = count_before(args, args.status[kGoal == Goal::kTopK], tile, ranks.all, is_last, room);
  Bits32* const indices = kGoal == Goal::kCandidates ? args.indices : indices_of(args);
  Bits32* const values = kGoal == Goal::kCandidates ? args.bits : values_of(args);
  unsigned sent = 0;
#pragma unroll
  for (int k = 0; k < kItems; k += 4) {
    Bits32 sure = base.sure + ranks.before[k / 4].sure, tied = base.tied + ranks.before[k / 4].tied;
#pragma unroll
    for (int i = k; i < k + 4; ++i) {
      const bool is_sure = (ranks.sure >> i & 1u) != 0, is_tied = (ranks.tied >> i & 1u) != 0;
      if (is_sure || (is_tied && tied < limit)) {
        const Size element = element_of(first, i), place = Size{sure} + (tied < limit ? tied : limit);
        const Bits32 index = has_candidates ? args.indices[element] : static_cast<Bits32>(element);
        indices[place] = index;
        values[place] = to_bits(v[i]);
        sent |= 1u << i;
        if (kHasFeedback && has_candidates && is_finite(v[i])) args.residual[index] = rest_of_sent(args);
      }
      sure += is_sure;
      tied += is_tied;
    }
  }
  if constexpr (kHasFeedback) {
    if (!has_candidates) write_rests<In>(args, first, count, v, e, kGoal == Goal::kCandidates ? 0 : sent);
  }
}

template <class In, bool kHasFeedback, Goal kGoal>
COMMLIB_DEVICE void compact(const SparseArgs& args) {
  __shared__ Counts room[kWarpsPerBlock + 1];
  __shared__ unsigned taken;
  if (kGoal == Goal::kTopK && blockIdx.x == 0) zero_sparse_gaps(args, static_cast<int>(threadIdx.x));
  if (kGoal == Goal::kCandidates && !args.selection->has_candidates) return;
  const bool has_candidates = kGoal == Goal::kTopK && args.selection->has_candidates;
  const Size count = has_candidates ? args.selection->num_candidates : args.numel;
  const Size num_tiles = (count + kSelectTile - 1) / kSelectTile;
  for (;;) {
    if (threadIdx.x == 0) taken = atomicAdd(args.selection->tickets + (kGoal == Goal::kTopK), 1u);
    __syncthreads();
    const unsigned tile = taken;
    if (tile >= num_tiles) return;
    compact_tile<In, kHasFeedback, kGoal>(args, tile, tile == num_tiles - 1, has_candidates, count, room);
    __syncthreads();
  }
}
