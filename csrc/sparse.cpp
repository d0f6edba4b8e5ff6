// The drivers of the sparse codecs.
//
// [Note: exact top-k in one pass] A sample suggests a magnitude t that a few more than k elements reach. One pass
// collects those that do. Where more come than there is room for, only the k best so far are kept and t rises to the
// worst of them, so room is bounded whatever the data. Where too few came, t was too high, and a second pass over the
// rest finds the missing ones in the same way, from t = 0 on. The result depends on neither the sample nor the threads.
#include "sparse.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "codec.h"
#include "float_env.h"
#include "threads.h"

namespace commlib {
namespace scalar_math {
#include "codec_math.h"
}

namespace {

using scalar_math::kInfinityBits;

constexpr std::size_t kSamples = 1 << 15;
constexpr std::size_t kRun = 16;  // neighbouring elements that are sampled together
constexpr std::size_t kLeastRoom = 4096;
constexpr std::size_t kGrain = 1 << 16;  // elements

std::uint32_t magnitude_of(Key key) {
  return static_cast<std::uint32_t>(key >> 33);
}

std::uint32_t index_of(Key key) {
  return ~static_cast<std::uint32_t>(key >> 1);
}

std::uint32_t bits_of(Key key) {
  return magnitude_of(key) | static_cast<std::uint32_t>(key & 1) << 31;
}

const SparseKernels& kernels() {
  return *active_kernels().sparse;
}

// Keeps the `count` largest keys, in the order in which they stand.
void keep_largest(std::vector<Key>& keys, std::size_t count) {
  if (keys.size() <= count) return;
  if (count == 0) return keys.clear();
  std::vector<Key> copy(keys);
  std::nth_element(copy.begin(), copy.begin() + static_cast<std::ptrdiff_t>(count - 1), copy.end(), std::greater<>());
  const Key least = copy[count - 1];
  keys.erase(std::remove_if(keys.begin(), keys.end(), [least](Key key) { return key < least; }), keys.end());
}

// The `count` largest of a stretch whose magnitudes are in low..high - 1; all such ones where there are fewer.
std::vector<Key> collect(const SparseSource& source, std::size_t begin, std::size_t end, std::uint32_t low,
                         std::uint32_t high, std::size_t count, bool writes) {
  std::vector<Key> keys(std::min(2 * count + kLeastRoom, end - begin + kTile));
  Scan scan = {low, high, writes, keys.data(), keys.size(), 0};
  const std::size_t room = keys.size();
  for (std::size_t at = begin; at < end;) {
    at = kernels().scan(source, at, end, scan);
    if (at < end) {
      keys.resize(scan.count);
      keep_largest(keys, count);
      scan.count = keys.size();
      // Later elements with the magnitude of the worst one lose against it by their index.
      if (scan.count == count) {
        std::uint32_t worst = high;
        for (const Key key : keys) worst = std::min(worst, magnitude_of(key));
        scan.low = std::min(high, std::max(scan.low, worst + 1));
      }
      keys.resize(room);
      scan.keys = keys.data();
    }
  }
  keys.resize(scan.count);
  return keys;
}

// The same over the whole chunk, in parts; in the order of the indices.
std::vector<Key> collect_in_parts(const SparseSource& source, std::uint32_t low, std::uint32_t high, std::size_t count,
                                  bool writes, int num_threads) {
  const std::size_t num_parts =
      std::clamp<std::size_t>(source.numel / kGrain, 1, static_cast<std::size_t>(std::max(num_threads, 1)));
  const std::size_t size = (source.numel + num_parts - 1) / num_parts;
  std::vector<std::vector<Key>> parts(num_parts);
  parallel_for(num_parts, 1, num_threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t part = begin; part < end; ++part) {
      const std::size_t first = std::min(part * size, source.numel), last = std::min(first + size, source.numel);
      parts[part] = collect(source, first, last, low, high, count, writes);
    }
  });
  std::vector<Key> keys = std::move(parts[0]);
  for (std::size_t part = 1; part < num_parts; ++part) keys.insert(keys.end(), parts[part].begin(), parts[part].end());
  return keys;
}

// A magnitude that somewhat more than `count` elements are likely to reach; 0 where it is not worth guessing.
std::uint32_t guess_threshold(const SparseSource& source, std::size_t count) {
  if (source.numel < 4 * kSamples || count == 0) return 0;
  std::vector<std::uint32_t> sample;
  sample.reserve(kSamples);
  const std::size_t stride = source.numel / (kSamples / kRun);
  for (std::size_t at = 0; at + kRun <= source.numel && sample.size() + kRun <= kSamples; at += stride) {
    for (std::size_t i = 0; i < kRun; ++i) {
      const float v = kernels().value(source, at + i);
      std::uint32_t bits;
      std::memcpy(&bits, &v, sizeof bits);
      sample.push_back(bits & 0x7FFFFFFFu);
    }
  }
  const double expected =
      static_cast<double>(count) * static_cast<double>(sample.size()) / static_cast<double>(source.numel);
  const auto rank = static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 8);
  if (rank >= sample.size()) return 0;
  std::nth_element(sample.begin(), sample.begin() + static_cast<std::ptrdiff_t>(rank), sample.end(), std::greater<>());
  return std::min(sample[rank], kInfinityBits);
}

void store_word(std::uint8_t* at, std::uint32_t word) {
  std::memcpy(at, &word, sizeof word);
}

std::uint32_t load_word(const std::uint8_t* at) {
  std::uint32_t word;
  std::memcpy(&word, at, sizeof word);
  return word;
}

std::size_t values_at(std::size_t places) {
  return aligned(4 * places);
}

void write_payload(const std::vector<Key>& keys, std::size_t places, std::uint8_t* payload) {
  std::uint8_t* values = payload + values_at(places);
  std::memset(payload, 0xFF, 4 * places);
  std::memset(payload + 4 * places, 0, sparse_payload_bytes(places) - 4 * places);
  for (std::size_t i = 0; i < keys.size(); ++i) {
    store_word(payload + 4 * i, index_of(keys[i]));
    store_word(values + 4 * i, bits_of(keys[i]));
  }
}

// What was sent leaves nothing behind; what is not finite leaves the residual as it was.
void clear_sent(const SparseSource& source, const std::vector<Key>& keys) {
  if (source.residual == nullptr) return;
  for (const Key key : keys) {
    if (magnitude_of(key) < kInfinityBits) source.residual[index_of(key)] = 0.0f * source.gamma;
  }
}

}  // namespace

std::size_t sparse_payload_bytes(std::size_t places) {
  return 2 * aligned(4 * places);
}

void encode_top_k(const SparseSource& source, std::size_t places, std::uint8_t* payload, int num_threads) {
  const ExactFloatScope exact;
  const bool writes = source.residual != nullptr;
  // The second pass reads what the first one wrote, which is v only where gamma is 1.
  const bool can_guess = !writes || source.gamma == 1.0f;
  const std::uint32_t low = can_guess ? guess_threshold(source, places) : 0;
  std::vector<Key> keys = collect_in_parts(source, low, 0x80000000u, places, writes, num_threads);
  if (keys.size() < places && low > 0) {
    SparseSource rest = source;
    if (writes) rest = {source.residual, DType::kFloat32, nullptr, 1.0f, 1.0f, source.numel};
    // Elements that are not finite were all collected: their residuals, still the old ones, must not be taken for them.
    std::vector<std::uint32_t> taken;
    for (const Key key : keys) {
      if (magnitude_of(key) >= kInfinityBits) taken.push_back(index_of(key));
    }
    std::vector<Key> more = collect_in_parts(rest, 0, low, places - keys.size() + taken.size(), false, num_threads);
    if (writes) {
      const auto is_taken = [&](Key key) { return std::binary_search(taken.begin(), taken.end(), index_of(key)); };
      more.erase(std::remove_if(more.begin(), more.end(), is_taken), more.end());
    }
    keep_largest(more, places - keys.size());
    const auto by_index = [](Key a, Key b) { return index_of(a) < index_of(b); };
    const auto middle = static_cast<std::ptrdiff_t>(keys.size());
    keys.insert(keys.end(), more.begin(), more.end());
    std::inplace_merge(keys.begin(), keys.begin() + middle, keys.end(), by_index);
  }
  keep_largest(keys, places);
  write_payload(keys, places, payload);
  clear_sent(source, keys);
}

// In order and in one thread, as the first `places` of them are wanted.
void encode_above(const SparseSource& source, std::uint32_t threshold_bits, std::size_t places, std::uint8_t* payload) {
  const ExactFloatScope exact;
  std::vector<Key> keys(std::min(places + kTile, source.numel + kTile));
  Scan scan = {threshold_bits, 0x80000000u, source.residual != nullptr, keys.data(), keys.size(), 0};
  std::size_t at = kernels().scan(source, 0, source.numel, scan);
  if (at < source.numel) {  // full: the rest only has its residuals replaced
    Scan rest = {0, 0, scan.writes, nullptr, 0, 0};
    if (rest.writes) kernels().scan(source, at, source.numel, rest);
  }
  keys.resize(std::min(scan.count, places));
  write_payload(keys, places, payload);
  clear_sent(source, keys);
}

void encode_random_k(const SparseSource& source, const std::uint32_t key[2], std::uint32_t step,
                     std::uint32_t stage_and_rank, std::size_t places, std::uint8_t* payload, int num_threads) {
  const ExactFloatScope exact;
  std::vector<Key> keys(places);
  scalar_math::Words words = {};
  for (std::uint64_t j = 0; j < places; ++j) {
    if (j % 4 == 0) {
      words = scalar_math::philox(static_cast<std::uint32_t>(j / 4), 0, step, stage_and_rank, key[0], key[1]);
    }
    const std::uint64_t low = j * source.numel / places, high = (j + 1) * source.numel / places;
    const auto index = static_cast<std::uint32_t>(low + (words.word[j % 4] * (high - low) >> 32));
    const float v = kernels().value(source, index);
    std::uint32_t bits;
    std::memcpy(&bits, &v, sizeof bits);
    keys[j] = make_key(bits, index);
  }
  if (source.residual != nullptr) {
    parallel_for(source.numel, kGrain, num_threads, [&](std::size_t begin, std::size_t end) {
      Scan none = {0, 0, true, nullptr, 0, 0};
      kernels().scan(source, begin, end, none);
    });
  }
  write_payload(keys, places, payload);
  clear_sent(source, keys);
}

bool sparse_is_valid(const std::uint8_t* payload, std::size_t places, std::size_t numel) {
  constexpr std::uint32_t kUnused = 0xFFFFFFFFu;
  std::int64_t before = -1;
  for (std::size_t i = 0; i < places; ++i) {
    const std::uint32_t index = load_word(payload + 4 * i);
    if (index == kUnused) {
      before = INT64_MAX;
    } else if (index >= numel || static_cast<std::int64_t>(index) <= before) {
      return false;
    } else {
      before = index;
    }
  }
  return true;
}

void decode_sparse(const std::uint8_t* const* payloads, std::size_t count, std::size_t places, float divisor, bool adds,
                   float weight, float* out, std::size_t numel) {
  const ExactFloatScope exact;
  if (!adds) std::memset(static_cast<void*>(out), 0, numel * sizeof(float));
  for (std::size_t input = 0; input < count; ++input) {
    const std::uint8_t* values = payloads[input] + values_at(places);
    for (std::size_t i = 0; i < places; ++i) {
      const std::uint32_t index = load_word(payloads[input] + 4 * i);
      if (index >= numel) break;  // unused places are the last ones
      const float value = scalar_math::from_bits(load_word(values + 4 * i)) + 0.0f;
      out[index] = scalar_math::canonical(adds ? out[index] + weight * value : out[index] + value);
    }
  }
  if (divisor != 1.0f) {
    for (std::size_t i = 0; i < numel; ++i) out[i] = scalar_math::canonical(out[i] / divisor);
  }
}

}  // namespace commlib
