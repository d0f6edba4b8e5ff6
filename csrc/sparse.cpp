// The drivers of the sparse codecs.
//
// [Note: exact top-k in one pass] A sample suggests a magnitude t that a few more than k elements reach. One pass
// collects those that do. Where more come than there is room for, only the k best so far are kept and t rises to the
// worst of them, so room is bounded whatever the data. Where too few came, t was too high, and a second pass over the
// rest finds the missing ones in the same way, from t = 0 on. The result depends on neither the sample nor the threads.
#include "sparse.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
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

constexpr std::size_t kMostSamples = 1 << 15;
constexpr std::size_t kElementsPerSample = 128;
constexpr std::size_t kLeastGuessed = 1 << 16;  // elements
constexpr std::size_t kRun = 16;                // neighbouring elements that are sampled together
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

// Keys in memory that belongs to a Scratch.
struct Keys {
  Key* data;
  std::size_t size;
};

// Memory for keys that a thread keeps from call to call, since fresh memory costs more than what is done with it. What
// is larger than kMostKept is given back after the call.
class Scratch {
 public:
  Key* reserve(std::size_t count) {
    if (count > capacity_) {
      keys_.reset();                // first, so that both never exist together
      keys_.reset(new Key[count]);  // not initialised
      capacity_ = count;
    }
    return keys_.get();
  }
  void release() {
    if (capacity_ * sizeof(Key) <= kMostKept) return;
    keys_.reset();
    capacity_ = 0;
  }

 private:
  static constexpr std::size_t kMostKept = std::size_t{128} << 20;
  std::unique_ptr<Key[]> keys_;
  std::size_t capacity_ = 0;
};

thread_local Scratch first_scratch, second_scratch;

struct ScratchScope {
  ~ScratchScope() {
    first_scratch.release();
    second_scratch.release();
  }
};

// The `count`-th largest of the keys, 1 <= count <= size: each round counts the keys of the range that is left in
// kBins parts of it and goes on with the part that holds the one sought. Six rounds suffice for any keys.
Key nth_largest(const Keys& keys, std::size_t count) {
  constexpr std::size_t kBins = 2048, kFew = 1024;
  Key low = ~Key{0}, high = 0;
  for (std::size_t i = 0; i < keys.size; ++i) {
    low = std::min(low, keys.data[i]);
    high = std::max(high, keys.data[i]);
  }
  while (low < high) {
    int shift = 0;
    while ((high - low) >> shift >= kBins) ++shift;
    std::uint32_t bins[kBins] = {};
    for (std::size_t i = 0; i < keys.size; ++i) {
      const Key at = keys.data[i] - low;
      if (at <= high - low) ++bins[at >> shift];
    }
    std::size_t bin = (high - low) >> shift;
    for (; bins[bin] < count; --bin) count -= bins[bin];
    low += static_cast<Key>(bin) << shift;
    high = std::min(high, low + ((Key{1} << shift) - 1));
    if (bins[bin] > kFew) continue;
    Key few[kFew];
    std::size_t found = 0;
    for (std::size_t i = 0; i < keys.size; ++i) {
      if (keys.data[i] - low <= high - low) few[found++] = keys.data[i];
    }
    std::nth_element(few, few + (count - 1), few + found, std::greater<>());
    return few[count - 1];
  }
  return low;
}

// Keeps the `count` largest keys, in the order in which they stand.
void keep_largest(Keys& keys, std::size_t count) {
  if (keys.size <= count) return;
  const Key least = count == 0 ? 0 : nth_largest(keys, count);
  std::size_t kept = 0;
  for (std::size_t i = 0; count > 0 && i < keys.size; ++i) {
    const Key key = keys.data[i];
    keys.data[kept] = key;  // a branch would be mispredicted
    kept += key >= least;
  }
  keys.size = kept;
}

// How many keys `collect` needs room for.
std::size_t room_for(std::size_t count, std::size_t elements) {
  return std::min(2 * count + kLeastRoom, elements + kTile);
}

// The `count` largest of a stretch whose magnitudes are in low..high - 1; all such ones where there are fewer.
Keys collect(const SparseSource& source, std::size_t begin, std::size_t end, std::uint32_t low, std::uint32_t high,
             std::size_t count, bool writes, Key* memory) {
  Scan scan = {low, high, writes, memory, room_for(count, end - begin), 0};
  for (std::size_t at = begin; at < end;) {
    at = kernels().scan(source, at, end, scan);
    if (at < end) {
      Keys keys = {memory, scan.count};
      keep_largest(keys, count);
      scan.count = keys.size;
      // Later elements with the magnitude of the worst one lose against it by their index.
      if (scan.count == count) {
        std::uint32_t worst = high;
        for (std::size_t i = 0; i < keys.size; ++i) worst = std::min(worst, magnitude_of(memory[i]));
        scan.low = std::min(high, std::max(scan.low, worst + 1));
      }
    }
  }
  return {memory, scan.count};
}

// The same over the whole chunk, in parts; in the order of the indices.
Keys collect_in_parts(const SparseSource& source, std::uint32_t low, std::uint32_t high, std::size_t count, bool writes,
                      int num_threads, Scratch& scratch) {
  constexpr std::size_t kMostParts = 256;
  const std::size_t most = std::min<std::size_t>(kMostParts, static_cast<std::size_t>(std::max(num_threads, 1)));
  const std::size_t num_parts = std::clamp<std::size_t>(source.numel / kGrain, 1, most);
  const std::size_t size = (source.numel + num_parts - 1) / num_parts, room = room_for(count, size);
  Key* const memory = scratch.reserve(num_parts * room);
  Keys parts[kMostParts];
  parallel_for(num_parts, 1, num_threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t part = begin; part < end; ++part) {
      const std::size_t first = std::min(part * size, source.numel), last = std::min(first + size, source.numel);
      parts[part] = collect(source, first, last, low, high, count, writes, memory + part * room);
    }
  });
  Keys keys = parts[0];
  for (std::size_t part = 1; part < num_parts; ++part) {
    std::memmove(keys.data + keys.size, parts[part].data, parts[part].size * sizeof(Key));
    keys.size += parts[part].size;
  }
  return keys;
}

// A magnitude that somewhat more than `count` elements are likely to reach; 0 where it is not worth guessing.
std::uint32_t guess_threshold(const SparseSource& source, std::size_t count) {
  if (source.numel < kLeastGuessed || count == 0) return 0;
  const std::size_t num_runs = std::min(kMostSamples, source.numel / kElementsPerSample) / kRun;
  const std::size_t stride = source.numel / num_runs;
  static thread_local std::vector<std::uint32_t> sample;  // keeps its memory from call to call
  sample.resize(num_runs * kRun);
  for (std::size_t first = 0; first < sample.size(); first += kGathered) {
    const std::size_t m = std::min(kGathered, sample.size() - first);
    std::uint32_t indices[kGathered];
    float values[kGathered];
    for (std::size_t i = 0; i < m; ++i) {
      indices[i] = static_cast<std::uint32_t>((first + i) / kRun * stride + i % kRun);
    }
    kernels().gather(source, indices, m, values);
    for (std::size_t i = 0; i < m; ++i) sample[first + i] = scalar_math::to_bits(values[i]) & 0x7FFFFFFFu;
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

void write_payload(const Keys& keys, std::size_t places, std::uint8_t* payload) {
  if (places == 0) return;
  std::uint8_t* values = payload + values_at(places);
  const std::size_t unused = places - keys.size;
  for (std::size_t i = 0; i < keys.size; ++i) store_word(payload + 4 * i, index_of(keys.data[i]));
  std::memset(payload + 4 * keys.size, 0xFF, 4 * unused);
  std::memset(payload + 4 * places, 0, values_at(places) - 4 * places);
  for (std::size_t i = 0; i < keys.size; ++i) store_word(values + 4 * i, bits_of(keys.data[i]));
  std::memset(values + 4 * keys.size, 0, values_at(places) - 4 * keys.size);
}

// What was sent leaves nothing behind; what is not finite leaves the residual as it was.
void clear_sent(const SparseSource& source, const Keys& keys) {
  if (source.residual == nullptr) return;
  const float rest = 0.0f * source.gamma;
  for (std::size_t i = 0; i < keys.size; ++i) {
    if (magnitude_of(keys.data[i]) < kInfinityBits) source.residual[index_of(keys.data[i])] = rest;
  }
}

// Replaces all residuals by v * gamma, what is sent or not.
void replace_residuals(const SparseSource& source, int num_threads) {
  parallel_for(source.numel, kGrain, num_threads, [&](std::size_t begin, std::size_t end) {
    Scan none = {0, 0, true, nullptr, 0, 0};
    kernels().scan(source, begin, end, none);
  });
}

// Takes out of `more` what is in `keys`; both are in order.
void remove_taken(const Keys& keys, Keys& more) {
  std::size_t kept = 0;
  for (std::size_t i = 0, j = 0; i < more.size; ++i) {
    while (j < keys.size && index_of(keys.data[j]) < index_of(more.data[i])) ++j;
    const bool is_taken = j < keys.size && index_of(keys.data[j]) == index_of(more.data[i]);
    if (!is_taken) more.data[kept++] = more.data[i];
  }
  more.size = kept;
}

// Merges `more` into `keys`, which have room for it, from behind; both are in order.
void merge(Keys& keys, const Keys& more) {
  std::size_t i = keys.size, j = more.size;
  while (j > 0) {
    const bool is_later = i > 0 && index_of(keys.data[i - 1]) > index_of(more.data[j - 1]);
    keys.data[i + j - 1] = is_later ? keys.data[i - 1] : more.data[j - 1];
    --(is_later ? i : j);
  }
  keys.size += more.size;
}

// Adds to `keys`, all that reach `low`, the best of the elements below it: `places` keys in all, in order. Where the
// first pass has `written` the residuals, they are v, but for elements that are not finite: these were all collected,
// and their residuals, still the old ones, must not be taken for them.
void complete(const SparseSource& source, std::uint32_t low, std::size_t places, bool written, int num_threads,
              Keys& keys) {
  const std::size_t missing = places - keys.size;
  std::size_t wanted = missing;
  SparseSource rest = source;
  if (written) {
    rest = {source.residual, DType::kFloat32, nullptr, 1.0f, 1.0f, source.numel};
    for (std::size_t i = 0; i < keys.size; ++i) wanted += magnitude_of(keys.data[i]) >= kInfinityBits;
  }
  Keys more = collect_in_parts(rest, 0, low, wanted, false, num_threads, second_scratch);
  remove_taken(keys, more);
  keep_largest(more, missing);
  merge(keys, more);  // there is room for 2 * places
}

// Calls `put(index, value)` for what a payload names below `end`, from `place` on; returns the next place.
template <class Put>
std::size_t for_each_below(const std::uint8_t* payload, std::size_t places, std::size_t place, std::size_t end,
                           const Put& put) {
  const std::uint8_t* values = payload + values_at(places);
  for (; place < places; ++place) {
    const std::uint32_t index = load_word(payload + 4 * place);
    if (index >= end) break;  // unused places are the last ones
    put(index, scalar_math::from_bits(load_word(values + 4 * place)) + 0.0f);
  }
  return place;
}

}  // namespace

std::size_t sparse_payload_bytes(std::size_t places) {
  return 2 * aligned(4 * places);
}

void encode_top_k(const SparseSource& source, std::size_t places, std::uint8_t* payload, int num_threads) {
  const ExactFloatScope exact;
  const ScratchScope scope;
  const bool has_residual = source.residual != nullptr;
  // Writing at once saves a pass, but is final: should another pass be needed, it must find v.
  const bool writes = has_residual && source.gamma == 1.0f;
  const std::uint32_t low = guess_threshold(source, places);
  Keys keys = collect_in_parts(source, low, 0x80000000u, places, writes, num_threads, first_scratch);
  if (keys.size < places && low > 0) complete(source, low, places, writes, num_threads, keys);
  if (has_residual && !writes) replace_residuals(source, num_threads);
  keep_largest(keys, places);
  write_payload(keys, places, payload);
  clear_sent(source, keys);
}

// In order and in one thread, as the first `places` of them are wanted.
void encode_above(const SparseSource& source, std::uint32_t threshold_bits, std::size_t places, std::uint8_t* payload) {
  const ExactFloatScope exact;
  const ScratchScope scope;
  const std::size_t room = std::min(places + kTile, source.numel + kTile);
  Scan scan = {threshold_bits, 0x80000000u, source.residual != nullptr, first_scratch.reserve(room), room, 0};
  std::size_t at = kernels().scan(source, 0, source.numel, scan);
  if (at < source.numel) {  // full: the rest only has its residuals replaced
    Scan rest = {0, 0, scan.writes, nullptr, 0, 0};
    if (rest.writes) kernels().scan(source, at, source.numel, rest);
  }
  const Keys keys = {scan.keys, std::min(scan.count, places)};
  write_payload(keys, places, payload);
  clear_sent(source, keys);
}

void encode_random_k(const SparseSource& source, const std::uint32_t key[2], std::uint32_t step,
                     std::uint32_t stage_and_rank, std::size_t places, std::uint8_t* payload, int num_threads) {
  const ExactFloatScope exact;
  const ScratchScope scope;
  const Keys keys = {first_scratch.reserve(places), places};
  std::uint32_t indices[kGathered];
  float values[kGathered];
  scalar_math::Words words = {};
  std::uint64_t low = 0;
  for (std::uint64_t first = 0; first < places; first += kGathered) {
    const std::size_t count = std::min<std::uint64_t>(kGathered, places - first);
    for (std::uint64_t j = first; j < first + count; ++j) {
      if (j % 4 == 0) {
        words = scalar_math::philox(static_cast<std::uint32_t>(j / 4), 0, step, stage_and_rank, key[0], key[1]);
      }
      const std::uint64_t high = (j + 1) * source.numel / places;
      indices[j - first] = static_cast<std::uint32_t>(low + (words.word[j % 4] * (high - low) >> 32));
      low = high;
    }
    kernels().gather(source, indices, count, values);
    for (std::size_t i = 0; i < count; ++i) {
      keys.data[first + i] = make_key(scalar_math::to_bits(values[i]), indices[i]);
    }
  }
  if (source.residual != nullptr) replace_residuals(source, num_threads);
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

void add_sparse(const std::uint8_t* payload, std::size_t places, float weight, float* out, std::size_t numel) {
  const ExactFloatScope exact;
  for_each_below(payload, places, 0, numel, [&](std::uint32_t index, float value) {
    out[index] = scalar_math::canonical(out[index] + weight * value);
  });
}

void sum_sparse(const std::uint8_t* const* payloads, std::size_t count, std::size_t places, float divisor, float* out,
                std::size_t numel) {
  constexpr std::size_t kRange = 4096;  // elements that are summed and divided while they are in the nearest cache
  const ExactFloatScope exact;
  const float nothing = 0.0f / divisor;               // may be -0; as no value is, sums are the same as from 0 on
  static thread_local std::vector<std::size_t> next;  // place of each payload; keeps its memory from call to call
  next.assign(count, 0);
  for (std::size_t begin = 0; begin < numel; begin += kRange) {
    const std::size_t end = std::min(begin + kRange, numel);
    std::uint64_t named[kRange / 64] = {};  // one bit for each element
    std::fill(out + begin, out + end, nothing);
    for (std::size_t input = 0; input < count; ++input) {
      next[input] = for_each_below(payloads[input], places, next[input], end, [&](std::uint32_t index, float value) {
        out[index] = scalar_math::canonical(out[index] + value);
        named[(index - begin) / 64] |= std::uint64_t{1} << (index % 64);
      });
    }
    for (std::size_t word = 0; divisor != 1.0f && word < kRange / 64; ++word) {
      for (std::uint64_t bits = named[word]; bits != 0; bits &= bits - 1) {
        float& sum = out[begin + 64 * word + static_cast<std::size_t>(__builtin_ctzll(bits))];
        sum = scalar_math::canonical(sum / divisor);
      }
    }
  }
}

bool accumulate(const void* x, DType type, float decay, float factor, float* sums, std::size_t numel, int num_threads) {
  std::atomic<bool> all_finite{true};
  parallel_for(numel, kGrain, num_threads, [&](std::size_t begin, std::size_t end) {
    if (!kernels().accumulate(x, type, decay, factor, sums, begin, end)) all_finite = false;
  });
  return all_finite;
}

}  // namespace commlib
