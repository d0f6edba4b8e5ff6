// CUDA's additions to C++, for the CPU: the threads of a block are fibers of one CPU thread, each running until it
// meets a barrier or a warp's exchange; several blocks may run at once, each in its own CPU thread. No GPU is involved:
// this shows that the kernels' logic is correct, not that a device runs them.
//
// The order in which fibers run can be reversed: a result that depends on it lacks a barrier. Lanes of a warp that do
// not all reach the same exchange, and blocks that wait forever, end the process with a message.
#pragma once

#include <sched.h>
#include <ucontext.h>

#include <atomic>
#include <csetjmp>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#define __device__
#define __global__
#define __shared__ static thread_local
#define __forceinline__ inline
#define __grid_constant__
#define __restrict__
#define __launch_bounds__(...)

struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline double2 make_double2(double x, double y) {
  return {x, y};
}

namespace emulation {

constexpr int kThreads = 256, kWarpSize = 32, kWarps = kThreads / kWarpSize;
constexpr std::size_t kStackBytes = 1 << 16;

struct Index {
  unsigned x = 0;
};

[[noreturn]] inline void give_up(const char* why) {
  std::fprintf(stderr, "cuda_on_cpu: %s\n", why);
  std::abort();
}

// Where all of a group's running threads meet. Slots of two meetings: a thread is at most one meeting ahead.
struct Meeting {
  int running = 0, arrived = 0, kind = 0;
  unsigned number = 0;
  std::uint64_t slots[2][kThreads] = {};
};

struct Fiber {
  std::jmp_buf state;
  ucontext_t first;
  bool is_started = false, is_done = true;
};

struct Machine {
  std::unique_ptr<char[]> stacks{new char[kThreads * kStackBytes]};
  Fiber fibers[kThreads];
  Meeting block, warps[kWarps];
  std::jmp_buf scheduler;
  ucontext_t origin;
  const std::function<void()>* body = nullptr;
  int current = 0;
  bool has_moved = false;
};

inline thread_local Machine machine;
inline thread_local Index thread_idx, block_idx, grid_dim;

inline void leave(Meeting& meeting) {
  if (--meeting.running == meeting.arrived && meeting.arrived > 0) {
    meeting.arrived = 0;
    ++meeting.number;
  }
}

inline void yield() {
  const int self = machine.current;
  if (_setjmp(machine.fibers[self].state) == 0) _longjmp(machine.scheduler, 1);
}

inline void fiber_main() {
  for (;;) {
    (*machine.body)();
    machine.fibers[machine.current].is_done = true;
    machine.has_moved = true;
    leave(machine.warps[machine.current / kWarpSize]);
    leave(machine.block);
    yield();
  }
}

inline void resume(int thread) {
  Fiber& fiber = machine.fibers[thread];
  machine.current = thread;
  thread_idx.x = static_cast<unsigned>(thread);
  if (_setjmp(machine.scheduler) != 0) return;
  if (fiber.is_started) _longjmp(fiber.state, 1);
  fiber.is_started = true;
  getcontext(&fiber.first);
  fiber.first.uc_stack.ss_sp = machine.stacks.get() + static_cast<std::size_t>(thread) * kStackBytes;
  fiber.first.uc_stack.ss_size = kStackBytes;
  fiber.first.uc_link = nullptr;
  makecontext(&fiber.first, fiber_main, 0);
  setcontext(&fiber.first);
}

// Stores `value` for the other threads, waits for all of them, and returns their values.
inline const std::uint64_t* meet(Meeting& meeting, int place, int kind, std::uint64_t value) {
  if (meeting.arrived == 0) meeting.kind = kind;
  if (meeting.kind != kind) give_up("the threads of a group are at different barriers");
  const unsigned number = meeting.number;
  meeting.slots[number % 2][place] = value;
  machine.has_moved = true;
  if (++meeting.arrived == meeting.running) {
    meeting.arrived = 0;
    ++meeting.number;
  }
  while (meeting.number == number) yield();
  return meeting.slots[number % 2];
}

template <class T>
std::uint64_t to_slot(T x) {
  std::uint64_t slot = 0;
  static_assert(sizeof x <= sizeof slot);
  std::memcpy(&slot, &x, sizeof x);
  return slot;
}

template <class T>
T from_slot(std::uint64_t slot) {
  T x;
  std::memcpy(&x, &slot, sizeof x);
  return x;
}

inline int lane() {
  return machine.current % kWarpSize;
}

template <class T>
const std::uint64_t* exchange(unsigned mask, int kind, T x) {
  Meeting& warp = machine.warps[machine.current / kWarpSize];
  if (mask != 0xFFFFFFFFu || warp.running != kWarpSize) give_up("a warp's exchange without all of its lanes");
  return meet(warp, lane(), kind, to_slot(x));
}

inline void run_block(bool is_reversed) {
  machine.block.running = kThreads;
  for (Meeting& warp : machine.warps) warp.running = kWarpSize;
  for (Fiber& fiber : machine.fibers) fiber.is_done = false;
  for (bool is_running = true; is_running;) {
    is_running = machine.has_moved = false;
    for (int i = 0; i < kThreads; ++i) {
      const int thread = is_reversed ? kThreads - 1 - i : i;
      if (!machine.fibers[thread].is_done) resume(thread);
      is_running |= !machine.fibers[thread].is_done;
    }
    if (is_running && !machine.has_moved) give_up("all threads wait for each other");
  }
}

// `num_at_once` blocks run at the same time; they are taken in ascending order.
inline void launch(unsigned num_blocks, bool is_reversed, int num_at_once, const std::function<void()>& body) {
  std::atomic<unsigned> next{0};
  const auto work = [&] {
    machine.body = &body;
    grid_dim.x = num_blocks;
    while ((block_idx.x = next++) < num_blocks) run_block(is_reversed);
  };
  std::vector<std::thread> others;
  for (int i = 1; i < num_at_once; ++i) others.emplace_back(work);
  work();
  for (std::thread& other : others) other.join();
}

}  // namespace emulation

#define threadIdx (::emulation::thread_idx)
#define blockIdx (::emulation::block_idx)
#define gridDim (::emulation::grid_dim)

inline void __syncthreads() {
  ::emulation::meet(::emulation::machine.block, static_cast<int>(threadIdx.x), 1, 0);
}

inline void __syncwarp() {
  ::emulation::exchange(0xFFFFFFFFu, 2, 0);
}

template <class T>
T __shfl_xor_sync(unsigned mask, T x, int distance) {
  const int source = ::emulation::lane() ^ distance;
  return ::emulation::from_slot<T>(::emulation::exchange(mask, 3, x)[source]);
}

template <class T>
T __shfl_sync(unsigned mask, T x, int source) {
  return ::emulation::from_slot<T>(::emulation::exchange(mask, 4, x)[source & 31]);
}

template <class T>
T __shfl_up_sync(unsigned mask, T x, int distance) {
  const int source = ::emulation::lane() - distance;
  const std::uint64_t* slots = ::emulation::exchange(mask, 5, x);
  return source >= 0 ? ::emulation::from_slot<T>(slots[source]) : x;
}

inline unsigned __reduce_max_sync(unsigned mask, unsigned x) {
  const std::uint64_t* slots = ::emulation::exchange(mask, 6, x);
  std::uint64_t largest = 0;
  for (int i = 0; i < ::emulation::kWarpSize; ++i) largest = slots[i] > largest ? slots[i] : largest;
  return static_cast<unsigned>(largest);
}

inline unsigned __ballot_sync(unsigned mask, int is_set) {
  const std::uint64_t* slots = ::emulation::exchange(mask, 7, is_set != 0);
  unsigned bits = 0;
  for (int i = 0; i < ::emulation::kWarpSize; ++i) bits |= static_cast<unsigned>(slots[i]) << i;
  return bits;
}

inline int __popc(unsigned x) {
  return __builtin_popcount(x);
}

inline int __ffs(int x) {
  return __builtin_ffs(x);
}

inline int __clz(int x) {
  return x == 0 ? 32 : __builtin_clz(static_cast<unsigned>(x));
}

inline double __longlong_as_double(long long bits) {
  return ::emulation::from_slot<double>(static_cast<std::uint64_t>(bits));
}

template <class T>
T atomicAdd(T* at, T x) {
  return __atomic_fetch_add(at, x, __ATOMIC_RELAXED);
}

template <class T>
T atomicMax(T* at, T x) {
  T before = __atomic_load_n(at, __ATOMIC_RELAXED);
  while (before < x && !__atomic_compare_exchange_n(at, &before, x, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return before;
}

inline void __threadfence() {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

// A thread that polls a value of another thread lets the others run.
inline void __nanosleep(unsigned) {
  sched_yield();
  ::emulation::machine.has_moved = true;
  ::emulation::yield();
}
