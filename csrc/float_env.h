// The floating-point mode that the wire format requires, independent of the calling thread's mode.
#pragma once

#include <cstdint>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace commlib {

// In its scope, rounds to nearest even and keeps denormals (torch.set_flush_denormal and other libraries enable
// flushing), then restores the thread's mode.
class ExactFloatScope {
 public:
  ExactFloatScope() : saved_(read()) {
    if (saved_ & kInexactModes) write(saved_ & ~kInexactModes);
  }
  ~ExactFloatScope() {
    if (saved_ & kInexactModes) write(saved_);
  }
  ExactFloatScope(const ExactFloatScope&) = delete;
  ExactFloatScope& operator=(const ExactFloatScope&) = delete;

 private:
#if defined(__x86_64__)
  using Register = unsigned;
  static constexpr Register kInexactModes = 0xE040;  // FTZ, DAZ and the two rounding bits of MXCSR
  static Register read() { return _mm_getcsr(); }
  static void write(Register value) { _mm_setcsr(value); }
#elif defined(__aarch64__)
  using Register = std::uint64_t;
  static constexpr Register kInexactModes = 0x1C80000;  // FZ, FZ16 and the two rounding bits of FPCR
  static Register read() {
    Register value;
    asm volatile("mrs %0, fpcr" : "=r"(value));
    return value;
  }
  static void write(Register value) { asm volatile("msr fpcr, %0" : : "r"(value)); }
#else
  using Register = unsigned;
  static constexpr Register kInexactModes = 0;
  static Register read() { return 0; }
  static void write(Register) {}
#endif

  Register saved_;
};

}  // namespace commlib
