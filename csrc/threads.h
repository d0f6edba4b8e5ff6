// A few threads that share the blocks of one job.
#pragma once

#include <cstddef>

namespace commlib {

// A function to call, without owning it: unlike std::function, this never allocates.
struct PartFn {
  void (*call)(const void* context, std::size_t begin, std::size_t end);
  const void* context;
};
void run_parts(std::size_t count, std::size_t grain, int num_threads, PartFn work);

// Calls `work(begin, end)` for parts of 0..count, on at most `num_threads` threads, the caller among them, and returns
// when all of them are done. Parts begin at multiples of `grain`. Where another caller holds the threads, the caller
// does all of it. `work` must not throw.
template <class Work>
void parallel_for(std::size_t count, std::size_t grain, int num_threads, const Work& work) {
  const auto call = [](const void* context, std::size_t begin, std::size_t end) {
    (*static_cast<const Work*>(context))(begin, end);
  };
  run_parts(count, grain, num_threads, {call, &work});
}

}  // namespace commlib
