#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "float_env.h"

namespace commlib {
namespace {

// The parts of one job. Each thread has a region, so that from job to job a core finds its data in its caches. A thread
// that has finished its region takes parts of others.
class Parts {
 public:
  static constexpr std::size_t kMostRegions = 64;

  Parts(std::size_t count, std::size_t grain, std::size_t num_regions, PartFn work)
      : count_(count), num_regions_(num_regions), work_(work) {
    constexpr std::size_t kPartsOfRegion = 4;
    const std::size_t grains = (count + grain - 1) / grain;
    const std::size_t grains_of_region = (grains + num_regions - 1) / num_regions;
    region_ = grains_of_region * grain;
    part_ = (grains_of_region + kPartsOfRegion - 1) / kPartsOfRegion * grain;
  }

  void take_all(std::size_t thread) {
    const ExactFloatScope exact;
    for (std::size_t i = 0; i < num_regions_; ++i) {
      const std::size_t region = (thread + i) % num_regions_;
      const std::size_t end = std::min((region + 1) * region_, count_);
      for (;;) {
        const std::size_t begin = region * region_ + taken_[region].fetch_add(part_, std::memory_order_relaxed);
        if (begin >= end) break;
        work_.call(work_.context, begin, std::min(begin + part_, end));
      }
    }
  }

 private:
  std::size_t count_, num_regions_, region_, part_;
  PartFn work_;
  std::atomic<std::size_t> taken_[kMostRegions] = {};
};

// Calls `is_so` repeatedly until it returns true, or until a time limit; returns whether it did. Waking a sleeping
// thread took some 30 us (a virtual machine on AMD Zen 5), and jobs often follow each other closely.
template <class IsSo>
bool spin_until(const IsSo& is_so) {
  constexpr auto kLongest = std::chrono::microseconds(50);
  const auto start = std::chrono::steady_clock::now();
  do {
    for (int i = 0; i < 16; ++i) {
      if (is_so()) return true;
#if defined(__x86_64__)
      __builtin_ia32_pause();
#elif defined(__aarch64__)
      asm volatile("yield");
#endif
    }
  } while (std::chrono::steady_clock::now() - start < kLongest);
  return false;
}

// Helper threads that sleep between jobs. Never destroyed, because helpers may sleep while the process exits.
class Pool {
 public:
  std::mutex in_use;

  // Does not wait for helpers that arrive after all parts are taken.
  void run(Parts& parts, std::size_t helpers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (num_threads_ < helpers) {
        std::thread(&Pool::serve, this, num_threads_).detach();
        ++num_threads_;
      }
      parts_ = &parts;
      wanted_ = helpers;
      job_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    parts.take_all(0);
    std::unique_lock<std::mutex> lock(mutex_);
    parts_ = nullptr;
    lock.unlock();
    const auto is_done = [this] { return busy_.load(std::memory_order_acquire) == 0; };
    if (spin_until(is_done)) return;
    lock.lock();
    done_.wait(lock, is_done);
  }

 private:
  void serve(std::size_t index) {
    for (std::uint64_t seen = 0;;) {
      const auto has_job = [&] { return job_.load(std::memory_order_acquire) != seen; };
      spin_until(has_job);
      std::unique_lock<std::mutex> lock(mutex_);
      wake_.wait(lock, has_job);
      seen = job_.load(std::memory_order_relaxed);
      if (index >= wanted_ || parts_ == nullptr) continue;
      Parts* parts = parts_;
      busy_.fetch_add(1, std::memory_order_relaxed);
      lock.unlock();
      parts->take_all(index + 1);
      lock.lock();
      if (busy_.fetch_sub(1, std::memory_order_release) == 1) done_.notify_one();
    }
  }

  std::mutex mutex_;  // guards the rest; the atomics are also read without it
  std::condition_variable wake_, done_;
  Parts* parts_ = nullptr;
  std::atomic<std::uint64_t> job_{0};
  std::atomic<std::size_t> busy_{0};
  std::size_t num_threads_ = 0, wanted_ = 0;
};

std::atomic<Pool*> pool{nullptr};

// A forked child has no helpers, and its copies of the pool's locks may be held forever by threads that do not exist in
// it. So it gets a new pool. No lock guards the pointer, so that it is valid after a fork at any time.
void forget_pool() {
  pool.store(nullptr, std::memory_order_relaxed);
}
[[maybe_unused]] const int kForgetsWhenForked = pthread_atfork(nullptr, nullptr, forget_pool);

Pool& pool_of_this_process() {
  Pool* current = pool.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  auto* made = new Pool;
  if (pool.compare_exchange_strong(current, made, std::memory_order_acq_rel)) return *made;
  delete made;
  return *current;
}

}  // namespace

void run_parts(std::size_t count, std::size_t grain, int num_threads, PartFn work) {
  if (count == 0) return;
  const std::size_t grains = (count + grain - 1) / grain;
  const std::size_t threads =
      std::min({static_cast<std::size_t>(std::max(num_threads, 1)), grains, Parts::kMostRegions});
  if (threads > 1) {
    Pool& helpers = pool_of_this_process();
    const std::unique_lock<std::mutex> owned(helpers.in_use, std::try_to_lock);
    if (owned.owns_lock()) {
      Parts parts(count, grain, threads, work);
      helpers.run(parts, threads - 1);
      return;
    }
  }
  const ExactFloatScope exact;
  work.call(work.context, 0, count);
}

}  // namespace commlib
