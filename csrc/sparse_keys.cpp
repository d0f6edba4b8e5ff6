#include "sparse_keys.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <functional>

#include "threads.h"

namespace commlib {
namespace {

constexpr std::size_t kMostSegments = 16;

// The keys are divided among threads in segments of equal size.
struct Segments {
  Segments(std::size_t count, int num_threads) {
    const std::size_t most = num_threads > 1 ? kMostSegments : 1;
    size = std::max(kPlacesGrain, (count + most - 1) / most);
    number = (count + size - 1) / size;
  }
  std::size_t size, number;
};

// Calls `work(segment, first, last)` for each segment of the keys.
template <class Work>
void for_segments(const Keys& keys, const Segments& segments, int num_threads, const Work& work) {
  parallel_for(segments.number, 1, num_threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t segment = begin; segment < end; ++segment) {
      work(segment, segment * segments.size, std::min((segment + 1) * segments.size, keys.size));
    }
  });
}

// Returns the `count`-th largest of the keys, 1 <= count <= size. Each round counts the keys in kBins bins of the
// remaining range and continues with the bin that has the result. Six rounds suffice for any keys.
Key nth_largest(const Keys& keys, std::size_t count, int num_threads) {
  constexpr std::size_t kBins = 2048, kFew = 1024;
  const Segments segments(keys.size, num_threads);
  Key lows[kMostSegments], highs[kMostSegments];
  for_segments(keys, segments, num_threads, [&](std::size_t segment, std::size_t first, std::size_t last) {
    Key low = ~Key{0}, high = 0;
    for (std::size_t i = first; i < last; ++i) {
      low = std::min(low, keys.data[i]);
      high = std::max(high, keys.data[i]);
    }
    lows[segment] = low;
    highs[segment] = high;
  });
  Key low = *std::min_element(lows, lows + segments.number), high = *std::max_element(highs, highs + segments.number);
  while (low < high) {
    int shift = 0;
    while ((high - low) >> shift >= kBins) ++shift;
    std::uint32_t bins[kMostSegments][kBins];
    for_segments(keys, segments, num_threads, [&](std::size_t segment, std::size_t first, std::size_t last) {
      std::uint32_t* const own = bins[segment];
      std::memset(own, 0, sizeof bins[segment]);
      for (std::size_t i = first; i < last; ++i) {
        const Key at = keys.data[i] - low;
        if (at <= high - low) ++own[at >> shift];
      }
    });
    for (std::size_t segment = 1; segment < segments.number; ++segment) {
      for (std::size_t bin = 0; bin < kBins; ++bin) bins[0][bin] += bins[segment][bin];
    }
    std::size_t bin = (high - low) >> shift;
    for (; bins[0][bin] < count; --bin) count -= bins[0][bin];
    low += static_cast<Key>(bin) << shift;
    high = std::min(high, low + ((Key{1} << shift) - 1));
    if (bins[0][bin] > kFew) continue;
    Key few[kFew];
    std::atomic<std::size_t> found{0};
    for_segments(keys, segments, num_threads, [&](std::size_t, std::size_t first, std::size_t last) {
      for (std::size_t i = first; i < last; ++i) {
        if (keys.data[i] - low <= high - low) few[found.fetch_add(1, std::memory_order_relaxed)] = keys.data[i];
      }
    });
    std::nth_element(few, few + (count - 1), few + found, std::greater<>());
    return few[count - 1];
  }
  return low;
}

}  // namespace

Key least_of_largest(const Keys& keys, std::size_t count, int num_threads) {
  if (keys.size <= count) return 0;
  return count == 0 ? ~Key{0} : nth_largest(keys, count, num_threads);
}

void write_payload(const Keys& keys, std::size_t places, std::uint8_t* payload, int num_threads, Key least) {
  if (places == 0) return;
  std::uint8_t* const values = payload + sparse_values_at(places);
  const Segments segments(keys.size, num_threads);
  std::size_t starts[kMostSegments + 1] = {};
  for_segments(keys, segments, num_threads, [&](std::size_t segment, std::size_t first, std::size_t last) {
    std::size_t kept = least == 0 ? last - first : 0;
    for (std::size_t i = first; least > 0 && i < last; ++i) kept += keys.data[i] >= least;
    starts[segment + 1] = kept;
  });
  for (std::size_t segment = 0; segment < segments.number; ++segment) starts[segment + 1] += starts[segment];
  const std::size_t total = starts[segments.number];
  for_segments(keys, segments, num_threads, [&](std::size_t segment, std::size_t first, std::size_t last) {
    std::size_t at = starts[segment];
    for (; first < last; first += kGathered) {
      std::uint32_t indices[kGathered], bits[kGathered];
      std::size_t kept = 0;
      for (std::size_t i = first; i < std::min(first + kGathered, last); ++i) {
        indices[kept] = index_of(keys.data[i]);
        bits[kept] = bits_of(keys.data[i]);
        kept += keys.data[i] >= least;  // a branch would be mispredicted
      }
      std::memcpy(payload + 4 * at, indices, 4 * kept);
      std::memcpy(values + 4 * at, bits, 4 * kept);
      at += kept;
    }
  });
  std::memset(payload + 4 * total, 0xFF, 4 * (places - total));
  std::memset(payload + 4 * places, 0, sparse_values_at(places) - 4 * places);
  std::memset(values + 4 * total, 0, sparse_values_at(places) - 4 * total);
}

}  // namespace commlib
