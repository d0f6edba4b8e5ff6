// The drivers of the sparse codecs.
//
// [Note: exact top-k in one pass] A sample suggests a magnitude t that a few more than k elements reach. One pass
// collects those elements. If they exceed the room, only the k best so far are kept and t rises to the worst of them,
// so the room is bounded for any data. If there are fewer than k, t was too high, and a second pass over the rest finds
// the missing ones in the same way, starting from t = 0. The result depends on neither the sample nor the threads.
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
#include "sparse_keys.h"
#include "threads.h"

namespace commlib {
namespace scalar_math {
#include "codec_math.h"
}

namespace {

using scalar_math::kInfinityBits;

constexpr std::size_t kElementsPerSample = 128, kMostElementsPerSample = 4096;
constexpr std::size_t kManySamples = 1 << 15;   // above this only one per kMostElementsPerSample
constexpr std::size_t kLeastGuessed = 1 << 16;  // elements
constexpr std::size_t kRun = 16;                // neighboring elements that are sampled together
constexpr std::size_t kLeastRoom = 4096;

const SparseKernels& kernels() {
  return *active_kernels().sparse;
}

// Memory for keys that a thread keeps between calls, because fresh memory costs more than its use. Memory larger than
// kMostKept is freed after the call.
class Scratch {
 public:
  Key* reserve(std::size_t count) {
    if (count > capacity_) {
      keys_.reset();                // first, so that both never exist at once
      keys_.reset(new Key[count]);  // not initialized
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

// Restores the residuals that a scan cleared for the keys below `end`, because these are not sent after all.
void restore_residuals(const SparseSource& source, const Keys& keys, Key end, int num_threads) {
  parallel_for(keys.size, kPlacesGrain, num_threads, [&](std::size_t first, std::size_t last) {
    float unused;
    for (std::size_t i = first; i < last; ++i) {
      const Key key = keys.data[i];
      const bool was_cleared = key < end && magnitude_of(key) < kInfinityBits;
      float* const residual =
          was_cleared ? source.residual + index_of(key) : &unused;  // a branch is often mispredicted
      *residual = scalar_math::from_bits(bits_of(key)) * source.gamma;
    }
  });
}

// Keeps the `count` largest keys, in their order. With a source, the keys' residuals were cleared by a scan, and those
// of the dropped keys are restored.
void keep_largest(Keys& keys, std::size_t count, const SparseSource* source = nullptr) {
  if (keys.size <= count) return;
  const Key least = least_of_largest(keys, count, 1);
  if (source != nullptr) restore_residuals(*source, keys, least, 1);
  std::size_t kept = 0;
  for (std::size_t i = 0; i < keys.size; ++i) {
    const Key key = keys.data[i];
    keys.data[kept] = key;  // a branch would be mispredicted
    kept += key >= least;
  }
  keys.size = kept;
}

// The number of keys that `collect` needs room for.
std::size_t room_for(std::size_t count, std::size_t elements) {
  return std::min(2 * count + kLeastRoom, elements + kTile);
}

// Updates a momentum while it is scanned.
class Update {
 public:
  explicit Update(const Momentum& momentum) : momentum_(momentum) {}

  // Updates the next elements, few enough to be still cached when they are scanned. Returns their end.
  std::size_t advance(std::size_t begin, std::size_t end) {
    const auto& [gradient, type, decay, factor, u] = momentum_;
    end = std::min(begin + kAtOnce, end);
    if (!kernels().accumulate(gradient, type, decay, factor, u, begin, end)) all_finite_ = false;
    return end;
  }

  // Approximates the future values of a few elements of v, at most kGathered.
  void gather(const SparseSource& source, const std::uint32_t* indices, std::size_t count, float* out) const {
    const auto& [gradient, type, decay, factor, u] = momentum_;
    float gradients[kGathered], residuals[kGathered];
    kernels().gather({u, DType::kFloat32, nullptr, 1.0f, 1.0f, source.numel}, indices, count, out);
    kernels().gather({gradient, type, nullptr, 1.0f, 1.0f, source.numel}, indices, count, gradients);
    kernels().gather({source.residual, DType::kFloat32, nullptr, 1.0f, 1.0f, source.numel}, indices, count, residuals);
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = out[i] * decay + gradients[i] * factor + residuals[i] * source.beta;
    }
  }

  // Zeroes the momentum of the sent elements, the keys that are not less than `least`.
  void clear(const Keys& keys, Key least, int num_threads) const {
    parallel_for(keys.size, kPlacesGrain, num_threads, [&](std::size_t first, std::size_t last) {
      for (std::size_t i = first; i < last; ++i) {
        if (keys.data[i] >= least) momentum_.u[index_of(keys.data[i])] = 0.0f;
      }
    });
  }

  bool all_finite() const { return all_finite_; }

 private:
  static constexpr std::size_t kAtOnce = 1 << 11;
  const Momentum& momentum_;
  std::atomic<bool> all_finite_{true};
};

// Returns the `count` largest elements of a range with magnitudes in low..high - 1, or all of them if there are fewer.
Keys collect(const SparseSource& source, std::size_t begin, std::size_t end, std::uint32_t low, std::uint32_t high,
             std::size_t count, bool writes, Key* memory, Update* update) {
  Scan scan = {low, high, writes, memory, room_for(count, end - begin), 0};
  std::size_t ready = update == nullptr ? end : begin;
  for (std::size_t at = begin; at < end;) {
    if (at == ready) ready = update->advance(at, end);
    at = kernels().scan(source, at, ready, scan);
    if (at < ready) {
      Keys keys = {memory, scan.count};
      keep_largest(keys, count, writes ? &source : nullptr);
      scan.count = keys.size;
      // Later elements with the magnitude of the worst one rank below it, because of their index.
      if (scan.count == count) {
        std::uint32_t worst = high;
        for (std::size_t i = 0; i < keys.size; ++i) worst = std::min(worst, magnitude_of(memory[i]));
        scan.low = std::min(high, std::max(scan.low, worst + 1));
      }
    }
  }
  return {memory, scan.count};
}

// Calls `find(first, last, memory)` for parts of the chunk, one per thread, and returns the keys in the order of the
// indices. The memory of a part has room for `room(elements)` keys.
template <class Room, class Find>
Keys find_in_parts(std::size_t numel, int num_threads, Scratch& scratch, const Room& room, const Find& find) {
  constexpr std::size_t kMostParts = 256;
  const std::size_t most = std::min<std::size_t>(kMostParts, static_cast<std::size_t>(std::max(num_threads, 1)));
  const std::size_t num_parts = std::clamp<std::size_t>(numel / kElementsGrain, 1, most);
  const std::size_t size = (numel + num_parts - 1) / num_parts, distance = room(size);
  Key* const memory = scratch.reserve(num_parts * distance);
  Keys parts[kMostParts];
  parallel_for(num_parts, 1, num_threads, [&](std::size_t begin, std::size_t end) {
    for (std::size_t part = begin; part < end; ++part) {
      const std::size_t first = std::min(part * size, numel), last = std::min(first + size, numel);
      parts[part] = find(first, last, memory + part * distance);
    }
  });
  Keys keys = parts[0];
  for (std::size_t part = 1; part < num_parts; ++part) {
    std::memmove(keys.data + keys.size, parts[part].data, parts[part].size * sizeof(Key));
    keys.size += parts[part].size;
  }
  return keys;
}

// `collect` over the whole chunk.
Keys collect_in_parts(const SparseSource& source, std::uint32_t low, std::uint32_t high, std::size_t count, bool writes,
                      int num_threads, Scratch& scratch, Update* update = nullptr) {
  const auto room = [&](std::size_t elements) { return room_for(count, elements); };
  return find_in_parts(source.numel, num_threads, scratch, room, [&](std::size_t first, std::size_t last, Key* memory) {
    return collect(source, first, last, low, high, count, writes, memory, update);
  });
}

// Returns a magnitude that somewhat more than `count` elements are likely to reach; 0 if guessing is not worthwhile.
std::uint32_t guess_threshold(const SparseSource& source, std::size_t count, const Update* update) {
  if (source.numel < kLeastGuessed || count == 0) return 0;
  const std::size_t most = std::max(kManySamples, source.numel / kMostElementsPerSample);
  const std::size_t num_runs = std::min(most, source.numel / kElementsPerSample) / kRun;
  const std::size_t stride = source.numel / num_runs;
  static thread_local std::vector<std::uint32_t> sample;  // keeps its memory between calls
  sample.resize(num_runs * kRun);
  for (std::size_t first = 0; first < sample.size(); first += kGathered) {
    const std::size_t m = std::min(kGathered, sample.size() - first);
    std::uint32_t indices[kGathered];
    float values[kGathered];
    for (std::size_t i = 0; i < m; ++i) {
      indices[i] = static_cast<std::uint32_t>((first + i) / kRun * stride + i % kRun);
    }
    if (update == nullptr) {
      kernels().gather(source, indices, m, values);
    } else {
      update->gather(source, indices, m, values);
    }
    for (std::size_t i = 0; i < m; ++i) sample[first + i] = scalar_math::to_bits(values[i]) & 0x7FFFFFFFu;
  }
  const double expected =
      static_cast<double>(count) * static_cast<double>(sample.size()) / static_cast<double>(source.numel);
  const auto rank = static_cast<std::size_t>(expected + 4 * std::sqrt(expected) + 8);
  if (rank >= sample.size()) return 0;
  std::nth_element(sample.begin(), sample.begin() + static_cast<std::ptrdiff_t>(rank), sample.end(), std::greater<>());
  return std::min(sample[rank], kInfinityBits);
}

// Clears the residuals of sent elements. Those of non-finite elements stay unchanged.
void clear_sent(const SparseSource& source, const Keys& keys, int num_threads, Key least = 0) {
  if (source.residual == nullptr) return;
  const float rest = 0.0f * source.gamma;
  parallel_for(keys.size, kPlacesGrain, num_threads, [&](std::size_t first, std::size_t last) {
    for (std::size_t i = first; i < last; ++i) {
      const Key key = keys.data[i];
      if (key >= least && magnitude_of(key) < kInfinityBits) source.residual[index_of(key)] = rest;
    }
  });
}

// Replaces all residuals by v * gamma, as if nothing was sent.
void replace_residuals(const SparseSource& source, int num_threads) {
  parallel_for(source.numel, kElementsGrain, num_threads, [&](std::size_t begin, std::size_t end) {
    Scan none = {0, 0, true, nullptr, 0, 0};
    kernels().scan(source, begin, end, none);
  });
}

// Removes the elements of `keys` from `more`; both are in order.
void remove_taken(const Keys& keys, Keys& more) {
  std::size_t kept = 0;
  for (std::size_t i = 0, j = 0; i < more.size; ++i) {
    while (j < keys.size && index_of(keys.data[j]) < index_of(more.data[i])) ++j;
    const bool is_taken = j < keys.size && index_of(keys.data[j]) == index_of(more.data[i]);
    if (!is_taken) more.data[kept++] = more.data[i];
  }
  more.size = kept;
}

// Merges `more` into `keys`, which has room for it, from the back; both are in order.
void merge(Keys& keys, const Keys& more) {
  std::size_t i = keys.size, j = more.size;
  while (j > 0) {
    const bool is_later = i > 0 && index_of(keys.data[i - 1]) > index_of(more.data[j - 1]);
    keys.data[i + j - 1] = is_later ? keys.data[i - 1] : more.data[j - 1];
    --(is_later ? i : j);
  }
  keys.size += more.size;
}

// Completes `keys`, all elements that reach `low`, with the largest elements below it, to `places` keys in order. If
// the first pass has `written` the residuals, these are v, except for non-finite elements. These were all collected,
// and their residuals, still the old ones, must not be used as v.
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

// `update`, if not null, updates the elements before they are scanned.
void encode_largest(const SparseSource& source, std::size_t places, std::uint8_t* payload, int num_threads,
                    Update* update) {
  const ExactFloatScope exact;
  const ScratchScope scope;
  const bool has_residual = source.residual != nullptr;
  // Writing at once saves a pass, but is final: a second pass, if needed, must find v.
  const bool writes = has_residual && source.gamma == 1.0f;
  bool are_cleared = writes;  // whether the residuals of all keys are cleared
  const std::uint32_t low = guess_threshold(source, places, update);
  Keys keys = collect_in_parts(source, low, 0x80000000u, places, writes, num_threads, first_scratch, update);
  if (keys.size < places && low > 0) {
    if (writes) restore_residuals(source, keys, ~Key{0}, num_threads);
    are_cleared = false;
    complete(source, low, places, writes, num_threads, keys);
  }
  if (has_residual && !writes) replace_residuals(source, num_threads);
  const Key least = least_of_largest(keys, places, num_threads);
  write_payload(keys, places, payload, num_threads, least);
  if (are_cleared) {
    restore_residuals(source, keys, least, num_threads);
  } else {
    clear_sent(source, keys, num_threads, least);
  }
  if (update != nullptr) update->clear(keys, least, num_threads);
}

}  // namespace

void encode_top_k(const SparseSource& source, std::size_t places, std::uint8_t* payload, int num_threads) {
  encode_largest(source, places, payload, num_threads, nullptr);
}

bool encode_momentum(const Momentum& momentum, const SparseSource& source, std::size_t places, std::uint8_t* payload,
                     int num_threads) {
  Update update(momentum);
  encode_largest(source, places, payload, num_threads, &update);
  return update.all_finite();
}

// Each part finds up to `places` elements; the first of all parts are used.
void encode_above(const SparseSource& source, std::uint32_t threshold_bits, std::size_t places, std::uint8_t* payload,
                  int num_threads) {
  const ExactFloatScope exact;
  const ScratchScope scope;
  const bool writes = source.residual != nullptr;
  const auto room = [&](std::size_t elements) { return std::min(places, elements) + kTile; };
  const auto find = [&](std::size_t first, std::size_t last, Key* memory) {
    Scan scan = {threshold_bits, 0x80000000u, writes, memory, room(last - first), 0};
    const std::size_t at = kernels().scan(source, first, last, scan);
    Scan rest = {0, 0, true, nullptr, 0, 0};  // no room: only replaces the residuals of the remaining elements
    if (at < last && writes) kernels().scan(source, at, last, rest);
    return Keys{memory, scan.count};
  };
  const Keys found = find_in_parts(source.numel, num_threads, first_scratch, room, find);
  const Keys keys = {found.data, std::min(found.size, places)};
  if (writes) restore_residuals(source, {keys.data + keys.size, found.size - keys.size}, ~Key{0}, num_threads);
  write_payload(keys, places, payload, num_threads);
}

void encode_random_k(const SparseSource& source, const std::uint32_t key[2], std::uint32_t step,
                     std::uint32_t stage_and_rank, std::size_t places, std::uint8_t* payload, int num_threads) {
  static_assert(kPlacesGrain % 4 == 0, "parts begin with a counter's first word");
  const ExactFloatScope exact;
  const ScratchScope scope;
  const Keys keys = {first_scratch.reserve(places), places};
  parallel_for(places, kPlacesGrain, num_threads, [&](std::size_t begin, std::size_t end) {
    std::uint32_t indices[kGathered];
    float values[kGathered];
    scalar_math::Words words = {};
    std::uint64_t low = static_cast<std::uint64_t>(begin) * source.numel / places;
    for (std::uint64_t first = begin; first < end; first += kGathered) {
      const std::size_t count = std::min<std::uint64_t>(kGathered, end - first);
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
  });
  if (source.residual != nullptr) replace_residuals(source, num_threads);
  write_payload(keys, places, payload, num_threads);
  clear_sent(source, keys, num_threads);
}

}  // namespace commlib
