#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "float_env.h"

namespace commlib {
namespace {

// The parts of one job, taken one by one by whoever is free.
class Parts {
 public:
  Parts(std::size_t count, std::size_t size, PartFn work) : count_(count), size_(size), work_(work) {}

  void take_all() {
    const ExactFloatScope exact;
    for (;;) {
      const std::size_t begin = next_.fetch_add(size_, std::memory_order_relaxed);
      if (begin >= count_) return;
      work_.call(work_.context, begin, std::min(begin + size_, count_));
    }
  }

 private:
  std::size_t count_, size_;
  PartFn work_;
  std::atomic<std::size_t> next_{0};
};

// Helpers that sleep between jobs. Never destroyed: they may sleep while the process exits.
class Pool {
 public:
  std::mutex in_use;

  void run(Parts& parts, int helpers) {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      while (static_cast<int>(num_threads_) < helpers) {
        std::thread(&Pool::serve, this, num_threads_).detach();
        ++num_threads_;
      }
      parts_ = &parts;
      wanted_ = busy_ = static_cast<std::size_t>(helpers);
      ++job_;
    }
    wake_.notify_all();
    parts.take_all();
    std::unique_lock<std::mutex> lock(mutex_);
    done_.wait(lock, [this] { return busy_ == 0; });
    parts_ = nullptr;
  }

 private:
  void serve(std::size_t index) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (std::uint64_t seen = 0;;) {
      wake_.wait(lock, [&] { return job_ != seen; });
      seen = job_;
      if (index >= wanted_ || parts_ == nullptr) continue;
      Parts* parts = parts_;
      lock.unlock();
      parts->take_all();
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  Parts* parts_ = nullptr;
  std::uint64_t job_ = 0;
  std::size_t num_threads_ = 0, wanted_ = 0, busy_ = 0;
};

std::atomic<Pool*> pool{nullptr};

// A forked child has no helpers, and its copies of the pool's locks may be held for ever by threads that it has not: it
// gets a pool of its own. No lock guards the pointer, so that a fork at any moment leaves it whole.
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
  const auto threads = static_cast<std::size_t>(std::max(num_threads, 1));
  if (threads == 1 || grains == 1) {
    Parts(count, count, work).take_all();
    return;
  }
  Pool& helpers = pool_of_this_process();
  const std::unique_lock<std::mutex> owned(helpers.in_use, std::try_to_lock);
  if (!owned.owns_lock()) {
    Parts(count, count, work).take_all();
    return;
  }
  const std::size_t parts_per_thread = 4;
  const std::size_t size = (grains + threads * parts_per_thread - 1) / (threads * parts_per_thread) * grain;
  Parts parts(count, size, work);
  helpers.run(parts, static_cast<int>(std::min(threads, grains)) - 1);
}

}  // namespace commlib
