// Decoding of the sparse codecs: validation, addition and sums of payloads.
#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "float_env.h"
#include "sparse.h"
#include "threads.h"

namespace commlib {
namespace scalar_math {
#include "codec_math.h"
}

namespace {

constexpr std::uint32_t kUnused = 0xFFFFFFFFu;  // the index of an unused place

std::uint32_t load_word(const std::uint8_t* at) {
  std::uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

// Calls `put(index, value)` for the elements below `end` in the places from `place` to `last`; returns the next place.
template <class Put>
std::size_t for_each_below(const std::uint8_t* payload, std::size_t places, std::size_t place, std::size_t last,
                           std::size_t end, const Put& put) {
  const std::uint8_t* values = payload + sparse_values_at(places);
  for (; place < last; ++place) {
    const std::uint32_t index = load_word(payload + 4 * place);
    if (index >= end) break;  // unused places are last
    put(index, scalar_math::from_bits(load_word(values + 4 * place)) + 0.0f);
  }
  return place;
}

// Returns the first place whose element is not before `begin`.
std::size_t first_place(const std::uint8_t* payload, std::size_t places, std::size_t begin) {
  std::size_t low = 0, high = places;
  while (low < high) {
    const std::size_t middle = (low + high) / 2;
    if (load_word(payload + 4 * middle) < begin) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace

bool sparse_is_valid(const std::uint8_t* payload, std::size_t places, std::size_t numel, int num_threads) {
  std::atomic<bool> is_valid{true};
  parallel_for(places, kPlacesGrain, num_threads, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      const std::uint32_t index = load_word(payload + 4 * i);
      const bool ascends = i == 0 || load_word(payload + 4 * (i - 1)) < index;  // no used place follows an unused one
      if (index != kUnused && (index >= numel || !ascends)) is_valid = false;
    }
  });
  return is_valid;
}

void add_sparse(const std::uint8_t* payload, std::size_t places, float weight, float* out, std::size_t numel,
                int num_threads) {
  parallel_for(places, kPlacesGrain, num_threads, [&](std::size_t first, std::size_t last) {
    for_each_below(payload, places, first, last, numel, [&](std::uint32_t index, float value) {
      out[index] = scalar_math::canonical(out[index] + weight * value);
    });
  });
}

void sum_sparse(const std::uint8_t* const* payloads, std::size_t count, std::size_t places, float divisor, float* out,
                std::size_t numel, int num_threads) {
  constexpr std::size_t kRange = 4096;  // elements that are summed and divided while they are in the first-level cache
  static_assert(kElementsGrain % kRange == 0, "ranges do not lie across parts");
  const ExactFloatScope exact;
  const float nothing = 0.0f / divisor;  // may be -0; values never are, so sums are the same as when starting from 0
  parallel_for(numel, kElementsGrain, num_threads, [&](std::size_t first, std::size_t last) {
    static thread_local std::vector<std::size_t> next;  // next place of each payload; keeps its memory between calls
    next.resize(count);
    for (std::size_t input = 0; input < count; ++input) next[input] = first_place(payloads[input], places, first);
    for (std::size_t begin = first; begin < last; begin += kRange) {
      const std::size_t end = std::min(begin + kRange, last);
      std::uint64_t named[kRange / 64] = {};  // one bit per element
      std::fill(out + begin, out + end, nothing);
      for (std::size_t input = 0; input < count; ++input) {
        const auto put = [&](std::uint32_t index, float value) {
          out[index] = scalar_math::canonical(out[index] + value);
          named[(index - begin) / 64] |= std::uint64_t{1} << (index % 64);
        };
        next[input] = for_each_below(payloads[input], places, next[input], places, end, put);
      }
      for (std::size_t word = 0; divisor != 1.0f && word < kRange / 64; ++word) {
        for (std::uint64_t bits = named[word]; bits != 0; bits &= bits - 1) {
          float& sum = out[begin + 64 * word + static_cast<std::size_t>(__builtin_ctzll(bits))];
          sum = scalar_math::canonical(sum / divisor);
        }
      }
    }
  });
}

}  // namespace commlib
