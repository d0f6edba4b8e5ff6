// Sparse codecs: selection of elements, encoding and decoding.
#pragma once

#include <cstddef>
#include <cstdint>

#include "codec.h"
#include "kernels.h"

namespace commlib {

// One chunk. With a residual (error feedback), elements are selected from v = x + beta * residual.
struct SparseSource {
  const void* x;
  DType type;
  float* residual;
  float beta, gamma;
  std::size_t numel;
};

// A candidate: the bits of its magnitude, then the complement of its index, then its sign. So the largest key has the
// largest magnitude and, among equals, the lowest index. All NaN are equal, because their bits vary between processors.
using Key = std::uint64_t;

inline Key make_key(std::uint32_t bits, std::size_t index) {
  bits = (bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC00000u : bits;
  return static_cast<Key>(bits & 0x7FFFFFFFu) << 33 | static_cast<Key>(~static_cast<std::uint32_t>(index)) << 1 |
         bits >> 31;
}

inline std::uint32_t magnitude_of(Key key) {
  return static_cast<std::uint32_t>(key >> 33);
}

inline std::uint32_t index_of(Key key) {
  return ~static_cast<std::uint32_t>(key >> 1);
}

inline std::uint32_t bits_of(Key key) {
  return magnitude_of(key) | static_cast<std::uint32_t>(key & 1) << 31;
}

// Computes v of the elements from `begin` to `end`, appends to `keys` those with low <= bits of |v| < high, in order,
// and, if `writes`, replaces finite residuals as if exactly these were sent: by 0 * gamma, all others by v * gamma.
// Works in tiles of kTile elements; stops before a tile that might exceed `capacity`. Returns where it stopped.
inline constexpr std::size_t kTile = 256;
struct Scan {
  std::uint32_t low, high;
  bool writes;
  Key* keys;
  std::size_t capacity;
  std::size_t count;
};
using ScanFn = std::size_t (*)(const SparseSource& source, std::size_t begin, std::size_t end, Scan& scan);
// Gathers elements of v, before their residuals are replaced. With kGathered elements, enough reads are outstanding to
// hide their cache misses.
inline constexpr std::size_t kGathered = 256;
using GatherFn = void (*)(const SparseSource& source, const std::uint32_t* indices, std::size_t count, float* out);

// sums = decay * sums + factor * x from `begin` to `end`; non-finite x count as 0. Returns whether all x are finite.
using AccumulateFn = bool (*)(const void* x, DType type, float decay, float factor, float* sums, std::size_t begin,
                              std::size_t end);

// Returns v of at most kTopKBlock elements, either x itself or `buffer`. For a whole block, also finds the largest
// magnitudes of kGroups groups of its elements.
inline constexpr std::size_t kTopKBlock = 4096, kGroups = 256;
using BlockValuesFn = const float* (*)(const SparseSource& source, std::size_t begin, std::size_t count, float* buffer,
                                       std::uint32_t* maxima);
// Appends the elements with low <= bits of |v| to `keys`, in order and with their index in `v`; returns how many.
using FindFn = std::size_t (*)(const float* v, std::size_t count, std::uint32_t low, Key* keys);

struct SparseKernels {
  ScanFn scan;
  GatherFn gather;
  AccumulateFn accumulate;
  BlockValuesFn block_values;
  FindFn find;
};

// Offset of the values in a payload, after the indices, and their end.
inline std::size_t sparse_values_at(std::size_t places) {
  return aligned(4 * places);
}
inline std::size_t sparse_payload_bytes(std::size_t places) {
  return 2 * sparse_values_at(places);
}

// A thread's range starts at multiples of these: in a chunk, and in a payload.
inline constexpr std::size_t kElementsGrain = 1 << 16, kPlacesGrain = 1 << 13;

// A momentum u that is updated while it is read: u = decay * u + factor * gradient.
struct Momentum {
  const void* gradient;
  DType type;
  float decay, factor;
  float* u;
};

// All write a whole payload of `places` places. `places` is at most `numel`, which is below 2^32 - 1.
void encode_top_k(const SparseSource& source, std::size_t places, std::uint8_t* payload, int num_threads);
// The same for a momentum, the `x` of `source`. It is set to 0 for sent elements. Returns the result of AccumulateFn.
bool encode_momentum(const Momentum& momentum, const SparseSource& source, std::size_t places, std::uint8_t* payload,
                     int num_threads);
void encode_above(const SparseSource& source, std::uint32_t threshold_bits, std::size_t places, std::uint8_t* payload,
                  int num_threads);
void encode_random_k(const SparseSource& source, const std::uint32_t key[2], std::uint32_t step,
                     std::uint32_t stage_and_rank, std::size_t places, std::uint8_t* payload, int num_threads);

// Returns whether the indices ascend and are below `numel`, with unused places last.
bool sparse_is_valid(const std::uint8_t* payload, std::size_t places, std::size_t numel, int num_threads);

// out = sum of the payloads / divisor
void sum_sparse(const std::uint8_t* const* payloads, std::size_t count, std::size_t places, float divisor, float* out,
                std::size_t numel, int num_threads);
// out += weight * payload, for the elements in the payload
void add_sparse(const std::uint8_t* payload, std::size_t places, float weight, float* out, std::size_t numel,
                int num_threads);

}  // namespace commlib
