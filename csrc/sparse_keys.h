// Candidates of the sparse codecs: which of them are the largest, and the payload that names them.
#pragma once

#include <cstddef>
#include <cstdint>

#include "sparse.h"

namespace commlib {

// Keys in memory that belongs to somebody else.
struct Keys {
  Key* data;
  std::size_t size;
};

// The least of the `count` largest keys: those that are not less are `count`, or all where there are no more.
Key least_of_largest(const Keys& keys, std::size_t count, int num_threads);

// Writes the keys that are not less than `least`, at most `places`, in the order in which they stand.
void write_payload(const Keys& keys, std::size_t places, std::uint8_t* payload, int num_threads, Key least = 0);

}  // namespace commlib
