// A small thread pool that divides the blocks of one job.
#pragma once

#include <cstddef>

namespace commlib {

// A callable, not owned. Unlike std::function, it never allocates.
struct PartFn {
  void (*call)(const void* context, std::size_t begin, std::size_t end);
  const void* context;
};
void run_parts(std::size_t count, std::size_t grain, int num_threads, PartFn work);

// Calls `work(begin, end)` for parts of 0..count on at most `num_threads` threads, including the caller's, and returns
// when all parts are done. Parts start at multiples of `grain`. If another caller is using the threads, the caller does
// all the work. `work` must not throw.
template <class Work>
void parallel_for(std::size_t count, std::size_t grain, int num_threads, const Work& work) {
  const auto call = [](const void* context, std::size_t begin, std::size_t end) {
    (*static_cast<const Work*>(context))(begin, end);
  };
  run_parts(count, grain, num_threads, {call, &work});
}

}  // namespace commlib
