// Common code of the sparse codec kernels: their argument, values with error feedback, and the kernels that need no
// order.
#pragma once

#include "device.h"

constexpr Bits32 kUnusedIndex = 0xFFFFFFFFu;
constexpr int kBins = 4096;

// A tile's state in the running sums of [Note: look-back].
struct Status {
  unsigned flag;            // 0: empty, 1: `own` is valid, 2: `total` is valid, too
  Bits32 own[2], total[2];  // of this tile; of this and all earlier tiles
};

// State that the kernels of one encoding pass on; initially zeros.
struct Selection {
  unsigned histogram[kBins];
  unsigned blocks_done;
  unsigned tickets[2];      // of the two compactions
  Bits32 prefix;            // the known digits of the threshold
  Bits32 wanted;            // places for elements that start with these digits
  unsigned has_candidates;  // whether the candidates fit into their memory
  Bits32 num_candidates;
  Bits32 num_used;  // used places of the payload
};

struct SparseArgs {
  const void* x;
  float* residual;
  Byte* out;
  Selection* selection;
  Status* status[2];  // of the two compactions
  Bits32* indices;    // memory for candidates: their indices and their bits
  Bits32* bits;
  Random random;
  Size numel;
  Size values_at;  // offset of the values in the payload
  Size nbytes;     // size of the payload
  Bits32 places;
  Bits32 capacity;   // maximum number of candidates
  Bits32 threshold;  // bits of a magnitude
  float beta;
  float gamma;
};

COMMLIB_DEVICE Bits32* indices_of(const SparseArgs& args) {
  return reinterpret_cast<Bits32*>(args.out);
}

COMMLIB_DEVICE Bits32* values_of(const SparseArgs& args) {
  return reinterpret_cast<Bits32*>(args.out + args.values_at);
}

COMMLIB_DEVICE void zero_sparse_gaps(const SparseArgs& args, int thread) {
  const Size used = Size{4} * args.places, begin = used + static_cast<Size>(thread);
  if (begin < args.values_at) args.out[begin] = 0;
  if (args.values_at + begin < args.nbytes) args.out[args.values_at + begin] = 0;
}

template <class In, bool kHasFeedback>
COMMLIB_DEVICE float value_at(const SparseArgs& args, Size i) {
  const float x = In::load(static_cast<const typename In::Storage*>(args.x)[i]);
  return canonical(kHasFeedback ? x + args.beta * args.residual[i] : x);
}

// Returns the residual of an element that was not sent.
COMMLIB_DEVICE float rest_of(const SparseArgs& args, float v, float e) {
  const float rest = v * args.gamma;
  return is_finite(v) ? rest : e;
}

// Returns the residual of an element that was sent and is finite.
COMMLIB_DEVICE float rest_of_sent(const SparseArgs& args) {
  return 0.0f * args.gamma;
}

COMMLIB_DEVICE Size thread_of_grid() {
  return static_cast<Size>(blockIdx.x) * kThreads + threadIdx.x;
}

COMMLIB_DEVICE Size threads_of_grid() {
  return static_cast<Size>(gridDim.x) * kThreads;
}

// --- randomk ---------------------------------------------------------------------------------------------------------

template <class In, bool kHasFeedback>
COMMLIB_DEVICE void choose_at_random(const SparseArgs& args) {
  if (blockIdx.x == 0) zero_sparse_gaps(args, static_cast<int>(threadIdx.x));
  for (Size j = thread_of_grid(); j < args.places; j += threads_of_grid()) {
    const Words words = random_words(args.random, j / 4);
    const int w = static_cast<int>(j % 4);
    const Bits32 word = w < 2 ? (w == 0 ? words.word[0] : words.word[1]) : (w == 2 ? words.word[2] : words.word[3]);
    const Size low = j * args.numel / args.places, high = (j + 1) * args.numel / args.places;
    const Size i = low + (word * (high - low) >> 32);
    indices_of(args)[j] = static_cast<Bits32>(i);
    values_of(args)[j] = to_bits(value_at<In, kHasFeedback>(args, i));
  }
}

// Updates all residuals as if nothing was sent.
template <class In>
COMMLIB_DEVICE void keep_all(const SparseArgs& args) {
  for (Size i = thread_of_grid(); i < args.numel; i += threads_of_grid()) {
    const float e = args.residual[i], v = value_at<In, true>(args, i);
    args.residual[i] = rest_of(args, v, e);
  }
}

// Updates the residuals of the elements in the payload; after `keep_all`.
COMMLIB_DEVICE void clear_sent(const SparseArgs& args) {
  for (Size j = thread_of_grid(); j < args.places; j += threads_of_grid()) {
    if (is_finite(from_bits(values_of(args)[j]))) args.residual[indices_of(args)[j]] = rest_of_sent(args);
  }
}

// --- threshold -------------------------------------------------------------------------------------------------------

// Fills the places that the compaction left unused.
COMMLIB_DEVICE void fill_unused(const SparseArgs& args) {
  if (blockIdx.x == 0) zero_sparse_gaps(args, static_cast<int>(threadIdx.x));
  for (Size j = args.selection->num_used + thread_of_grid(); j < args.places; j += threads_of_grid()) {
    indices_of(args)[j] = kUnusedIndex;
    values_of(args)[j] = 0;
  }
}

// --- decoding --------------------------------------------------------------------------------------------------------

struct SparseDecodeArgs {
  const Byte* inputs;
  float* out;
  unsigned* damage;  // receives the number of a damaged payload, counted from 1
  Size numel;
  Size values_at;
  Size nbytes;  // size of a payload
  Bits32 places;
  unsigned num_inputs;
  float divisor;
  float weight;
};

constexpr int kRange = 4096;  // elements that a thread block sums at once
constexpr int kSearches = kThreads / 2;

COMMLIB_DEVICE const Bits32* indices_of_input(const SparseDecodeArgs& args, unsigned input) {
  return reinterpret_cast<const Bits32*>(args.inputs + input * args.nbytes);
}

COMMLIB_DEVICE const float* values_of_input(const SparseDecodeArgs& args, unsigned input) {
  return reinterpret_cast<const float*>(args.inputs + input * args.nbytes + args.values_at);
}

// Returns whether place `j` is in order: below the end and above the place before, or unused.
COMMLIB_DEVICE bool is_in_order(const Bits32* indices, Size j, Size numel) {
  const Bits32 index = indices[j];
  return index == kUnusedIndex || (index < numel && (j == 0 || indices[j - 1] < index));
}

// Returns the first place whose index is at least `least`.
COMMLIB_DEVICE Bits32 find_place(const Bits32* indices, Bits32 places, Size least) {
  Bits32 low = 0, high = places;
  while (low < high) {
    const Bits32 middle = low + (high - low) / 2;
    if (indices[middle] < least) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// out = sum of the payloads / divisor. A thread block owns a range of the output and adds payload by payload, so that
// sums are in the order of the ranks without atomics. For a damaged payload it accesses no place and no element out of
// bounds, but its values are undefined.
COMMLIB_DEVICE void sum_sparse(const SparseDecodeArgs& args) {
  __shared__ float sums[kRange];
  __shared__ Bits32 bounds[kThreads];
  const int thread = static_cast<int>(threadIdx.x);
  const Size base = static_cast<Size>(blockIdx.x) * kRange, left = args.numel - base;
  const int length = left < kRange ? static_cast<int>(left) : kRange;
  for (int i = thread; i < kRange; i += kThreads) sums[i] = 0.0f;
  for (unsigned first = 0; first < args.num_inputs; first += kSearches) {
    __syncthreads();
    const unsigned mine = first + static_cast<unsigned>(thread / 2);
    if (mine < args.num_inputs) {
      const Size least = base + (thread % 2 == 0 ? Size{0} : static_cast<Size>(length));
      bounds[thread] = find_place(indices_of_input(args, mine), args.places, least);
    }
    __syncthreads();
    for (unsigned j = 0; j < kSearches && first + j < args.num_inputs; ++j) {
      const Bits32* const indices = indices_of_input(args, first + j);
      const float* const values = values_of_input(args, first + j);
      const Size end = bounds[2 * j + 1];
      for (Size place = bounds[2 * j] + static_cast<Size>(thread); place < end; place += kThreads) {
        const Size element = indices[place] - base;  // huge if it is below `base`
        if (element < static_cast<Size>(length)) sums[element] = canonical(sums[element] + (values[place] + 0.0f));
      }
      __syncthreads();
    }
  }
  for (int i = thread; i < length; i += kThreads) {
    const float sum = sums[i];
    args.out[base + static_cast<Size>(i)] = args.divisor == 1.0f ? sum : canonical(sum / args.divisor);
  }
  const Size num_places = Size{args.num_inputs} * args.places;
  for (Size i = thread_of_grid(); i < num_places; i += threads_of_grid()) {
    const unsigned input = static_cast<unsigned>(i / args.places);
    if (!is_in_order(indices_of_input(args, input), i % args.places, args.numel)) atomicMax(args.damage, input + 1);
  }
}

// out += weight * payload. Places that are out of order are skipped.
COMMLIB_DEVICE void add_sparse(const SparseDecodeArgs& args) {
  const Bits32* const indices = indices_of_input(args, 0);
  const float* const values = values_of_input(args, 0);
  for (Size j = thread_of_grid(); j < args.places; j += threads_of_grid()) {
    if (!is_in_order(indices, j, args.numel)) {
      atomicMax(args.damage, 1u);
    } else if (indices[j] != kUnusedIndex) {
      float* const out = args.out + indices[j];
      *out = canonical(*out + args.weight * (values[j] + 0.0f));
    }
  }
}
