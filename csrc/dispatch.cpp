// Detects the instruction sets of this machine and holds the active kernel table.
#include <atomic>
#include <cstring>
#include <stdexcept>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace commlib {
namespace {

#if defined(__x86_64__)
bool is_zen5() {
  unsigned version = 0, vendor[3] = {}, unused = 0;
  if (__get_cpuid(0, &unused, &vendor[0], &vendor[2], &vendor[1]) == 0) return false;
  if (std::memcmp(vendor, "AuthenticAMD", sizeof vendor) != 0) return false;
  unsigned features[3] = {};
  if (__get_cpuid(1, &version, &features[0], &features[1], &features[2]) == 0) return false;
  const unsigned family = (version >> 8 & 0xF) + (version >> 20 & 0xFF);
  return family == 0x1A;
}

bool has_avx2() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

bool has_avx512() {
#if defined(COMMLIB_EMULATED_AVX512)
  return has_avx2();
#else
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
}
#else
bool is_zen5() {
  return false;
}
bool has_avx2() {
  return false;
}
bool has_avx512() {
  return false;
}
#endif

std::vector<const Kernels*> find_kernels() {
  std::vector<const Kernels*> found;
  if (has_avx512()) found.push_back(avx512_kernels());
  if (has_avx2()) found.push_back(avx2_kernels());
  if (neon_kernels()) found.push_back(neon_kernels());
  found.push_back(scalar_kernels());
  return found;
}

const std::vector<const Kernels*>& supported_kernels() {
  static const std::vector<const Kernels*> supported = find_kernels();
  return supported;
}

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> kernels{supported_kernels().front()};
  return kernels;
}

}  // namespace

const bool kPrefetchesToFirstCache = is_zen5();

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Kernels* kernels : supported_kernels()) names.emplace_back(kernels->name);
  return names;
}

const Kernels& active_kernels() {
  return *active().load(std::memory_order_acquire);
}

void select_isa(const std::string& name) {
  for (const Kernels* kernels : supported_kernels()) {
    if (name == kernels->name) {
      active().store(kernels, std::memory_order_release);
      return;
    }
  }
  throw std::invalid_argument("this machine does not run the instruction set '" + name + "'");
}

}  // namespace commlib
