// Candidates of the sparse codecs: selection of the largest, and the payload.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparse.h"

namespace commlib {

// A view of keys in memory that it does not own.
struct Keys {
  Key* data;
  std::size_t size;
};

// Returns the least of the `count` largest keys. Exactly `count` keys are not less, or all if there are no more.
Key least_of_largest(const Keys& keys, std::size_t count, int num_threads);

// Writes the keys that are not less than `least`, at most `places`, in their order.
void write_payload(const Keys& keys, std::size_t places, std::uint8_t* payload, int num_threads, Key least = 0);

}  // namespace commlib
