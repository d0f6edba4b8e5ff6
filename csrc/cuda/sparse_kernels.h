// What the kernels of the sparse codecs share: their argument, values with error feedback, and the kernels that need no
// order.
#pragma once

#include "device.h"

constexpr Bits32 kUnusedIndex = 0xFFFFFFFFu;
constexpr int kBins = 4096;

// A tile's place in the running sums of [Note: look-back].
struct Status {
  unsigned flag;            // 0: nothing yet, 1: `own` is there, 2: `total` too
  Bits32 own[2], total[2];  // of this tile; of this and all before
};

// What the kernels of one encoding leave for the next ones; zeros at first.
struct Selection {
  unsigned histogram[kBins];
  unsigned blocks_done;
  unsigned tickets[2];      // of the two compactions
  Bits32 prefix;            // the digits of the threshold that are known
  Bits32 wanted;            // places for elements that begin with these digits
  unsigned has_candidates;  // whether what may be named fits into the room for it
  Bits32 num_candidates;
  Bits32 num_used;  // places of a payload
};

struct SparseArgs {
  const void* x;
  float* residual;
  Byte* out;
  Selection* selection;
  Status* status[2];  // of the two compactions
  Bits32* indices;    // room for candidates: their indices and their bits
  Bits32* bits;
  Random random;
  Size numel;
  Size values_at;  // where the values begin in the payload
  Size nbytes;     // of the payload
  Bits32 places;
  Bits32 capacity;   // of the room for candidates
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

// The residual of an element of which nothing was sent.
COMMLIB_DEVICE float rest_of(const SparseArgs& args, float v, float e) {
  const float rest = v * args.gamma;
  return is_finite(v) ? rest : e;
}

// Of one that was sent, whose value is finite.
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

// The residuals as if nothing was sent.
template <class In>
COMMLIB_DEVICE void keep_all(const SparseArgs& args) {
  for (Size i = thread_of_grid(); i < args.numel; i += threads_of_grid()) {
    const float e = args.residual[i], v = value_at<In, true>(args, i);
    args.residual[i] = rest_of(args, v, e);
  }
}

// Those of the elements that the payload names; after `keep_all`.
COMMLIB_DEVICE void clear_sent(const SparseArgs& args) {
  for (Size j = thread_of_grid(); j < args.places; j += threads_of_grid()) {
    if (is_finite(from_bits(values_of(args)[j]))) args.residual[indices_of(args)[j]] = rest_of_sent(args);
  }
}

// --- threshold -------------------------------------------------------------------------------------------------------

// The places that the compaction left unused.
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
  unsigned* damage;  // the number of a damaged payload, counted from 1, is left here
  Size numel;
  Size values_at;
  Size nbytes;  // of a payload
  Bits32 places;
  unsigned num_inputs;
  float divisor;
  float weight;
};

constexpr int kRange = 4096;  // elements that a block of threads sums at once
constexpr int kSearches = kThreads / 2;

COMMLIB_DEVICE const Bits32* indices_of_input(const SparseDecodeArgs& args, unsigned input) {
  return reinterpret_cast<const Bits32*>(args.inputs + input * args.nbytes);
}

COMMLIB_DEVICE const float* values_of_input(const SparseDecodeArgs& args, unsigned input) {
  return reinterpret_cast<const float*>(args.inputs + input * args.nbytes + args.values_at);
}

// Whether place `j` keeps the order: below the end and above the place before, or unused.
COMMLIB_DEVICE bool is_in_order(const Bits32* indices, Size j, Size numel) {
  const Bits32 index = indices[j];
  return index == kUnusedIndex || (index < numel && (j == 0 || indices[j - 1] < index));
}

// The first place whose index is at least `least`.
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

// out = sum of the payloads / divisor. A block of threads owns a range of the output and adds to it payload by payload,
// so that sums are in the order of the ranks without atomics. Of a damaged payload it reads no place outside and writes
// no element outside; which of its values count is not defined.
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
        const Size element = indices[place] - base;  // huge where it is below
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

// out += weight * payload. Places that are out of order are left out.
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
