// A few threads that share the blocks of one job.
#pragma once

#include <cstddef>
#include <functional>

namespace commlib {

// Calls `work(begin, end)` for parts of 0..count, on at most `num_threads` threads, the caller among them, and returns
// when all of them are done. Parts begin at multiples of `grain`. Where another caller holds the threads, the caller
// does all of it. `work` must not throw.
void parallel_for(std::size_t count, std::size_t grain, int num_threads,
                  const std::function<void(std::size_t, std::size_t)>& work);

}  // namespace commlib
