// The AVX-512 intrinsics that csrc uses, lane by lane, so that the AVX-512 kernels run where the processor has none of
// them: scripts/emulate_avx512 builds the extension with them and runs the tests of the kernels. Plain loops
// that the compiler vectorizes for AVX-512 are not tested, as they become AVX2.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace emulated {

template <class Vector, class Lane>
struct Lanes {
  static constexpr int kCount = sizeof(Vector) / sizeof(Lane);
  Lane lane[kCount];
  Lanes() = default;
  Lanes(Vector v) { std::memcpy(lane, &v, sizeof v); }
  operator Vector() const {
    Vector v;
    std::memcpy(&v, lane, sizeof v);
    return v;
  }
};
using Floats = Lanes<__m512, float>;
using Words = Lanes<__m512i, std::uint32_t>;
using Longs = Lanes<__m512i, std::uint64_t>;

template <class Result, class Function>
Result each(Function function) {
  Result result;
  for (int i = 0; i < Result::kCount; ++i) result.lane[i] = function(i);
  return result;
}

template <class T>
T load(const void* from) {
  T t;
  std::memcpy(&t, from, sizeof t);
  return t;
}
template <class T>
void store(void* to, const T& t) {
  std::memcpy(to, &t, sizeof t);
}

inline __m512 permute(Floats a, int chosen) {  // within each four
  return each<Floats>([&](int i) { return a.lane[i / 4 * 4 + (chosen >> i % 4 * 2 & 3)]; });
}
inline __m512 shuffle_quarters(Floats a, Floats b, int chosen) {
  return each<Floats>([&](int i) { return (i < 8 ? a : b).lane[(chosen >> i / 4 * 2 & 3) * 4 + i % 4]; });
}
inline __m512 mask_sub(Floats otherwise, unsigned mask, Floats a, Floats b) {
  return each<Floats>([&](int i) { return mask >> i & 1 ? a.lane[i] - b.lane[i] : otherwise.lane[i]; });
}
inline __m512 add(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline __m512 mul(Floats a, Floats b) {
  return each<Floats>([&](int i) { return a.lane[i] * b.lane[i]; });
}
inline __m512 fmadd(Floats a, Floats b, Floats c) {
  return each<Floats>([&](int i) { return std::fma(a.lane[i], b.lane[i], c.lane[i]); });
}
inline __m512 blend(unsigned mask, Floats a, Floats b) {
  return each<Floats>([&](int i) { return load<float>(&(mask >> i & 1 ? b : a).lane[i]); });
}
inline __m512i blend_words(unsigned mask, Words a, Words b) {
  return each<Words>([&](int i) { return (mask >> i & 1 ? b : a).lane[i]; });
}
template <int kKind>
unsigned compare(Floats a, Floats b) {
  static_assert(kKind == _CMP_UNORD_Q, "the only comparison that csrc uses");
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(std::isnan(a.lane[i]) || std::isnan(b.lane[i])) << i;
  return mask;
}
inline __m512i all_words(std::uint32_t word) {
  return each<Words>([&](int) { return word; });
}
inline __m512i all_longs(std::uint64_t word) {
  return each<Longs>([&](int) { return word; });
}
inline __m512 all_floats(float x) {
  return each<Floats>([&](int) { return x; });
}
inline __m512i bit_and(Words a, Words b) {
  return each<Words>([&](int i) { return a.lane[i] & b.lane[i]; });
}
inline __m512i sub(Words a, Words b) {
  return each<Words>([&](int i) { return a.lane[i] - b.lane[i]; });
}
inline __m512i bit_xor(Words a, Words b) {
  return each<Words>([&](int i) { return a.lane[i] ^ b.lane[i]; });
}
inline __m512i shift_signed(Words a, int by) {
  return each<Words>([&](int i) { return static_cast<std::uint32_t>(static_cast<std::int32_t>(a.lane[i]) >> by); });
}
inline __m512i larger(Words a, Words b) {
  return each<Words>([&](int i) {
    return static_cast<std::int32_t>(a.lane[i]) > static_cast<std::int32_t>(b.lane[i]) ? a.lane[i] : b.lane[i];
  });
}
inline __m512i smaller(Words a, Words b) {
  return each<Words>([&](int i) {
    return static_cast<std::int32_t>(a.lane[i]) < static_cast<std::int32_t>(b.lane[i]) ? a.lane[i] : b.lane[i];
  });
}
template <__m512i (*kOf)(Words, Words)>
int reduce(Words a) {
  for (int i = 1; i < 16; ++i) a.lane[0] = Words(kOf(all_words(a.lane[0]), all_words(a.lane[i]))).lane[0];
  return static_cast<int>(a.lane[0]);
}
inline unsigned less(Words a, Words b) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= static_cast<unsigned>(a.lane[i] < b.lane[i]) << i;
  return mask;
}
inline unsigned signs(Words a) {
  unsigned mask = 0;
  for (int i = 0; i < 16; ++i) mask |= (a.lane[i] >> 31) << i;
  return mask;
}
inline __m512 to_floats(Words a) {
  return each<Floats>([&](int i) { return static_cast<float>(static_cast<std::int32_t>(a.lane[i])); });
}
template <class Narrow, class From>
__m512i widen(const From& from) {
  return each<Words>([&](int i) {
    return static_cast<std::uint32_t>(load<Narrow>(reinterpret_cast<const char*>(&from) + i * sizeof(Narrow)));
  });
}
inline __m128i narrow(Words a) {
  std::uint8_t bytes[16];
  for (int i = 0; i < 16; ++i) bytes[i] = static_cast<std::uint8_t>(a.lane[i]);
  return load<__m128i>(bytes);
}
inline __m512i mul_long(Longs a, Longs b) {
  return each<Longs>([&](int i) { return (a.lane[i] & 0xFFFFFFFFu) * (b.lane[i] & 0xFFFFFFFFu); });
}
inline __m512i add_long(Longs a, Longs b) {
  return each<Longs>([&](int i) { return a.lane[i] + b.lane[i]; });
}
inline __m512i shift_right(Longs a, int by) {
  return each<Longs>([&](int i) { return a.lane[i] >> by; });
}
inline __m512i shift_left(Longs a, int by) {
  return each<Longs>([&](int i) { return a.lane[i] << by; });
}
inline __m512i ternary(Longs a, Longs b, Longs c, unsigned table) {
  return each<Longs>([&](int i) {
    std::uint64_t result = 0;
    for (int bit = 0; bit < 64; ++bit) {
      const auto row = (a.lane[i] >> bit & 1) << 2 | (b.lane[i] >> bit & 1) << 1 | (c.lane[i] >> bit & 1);
      result |= static_cast<std::uint64_t>(table >> row & 1) << bit;
    }
    return result;
  });
}
inline __m512i permute_both(Longs a, Longs index, Longs b) {
  return each<Longs>([&](int i) { return (index.lane[i] & 8 ? b : a).lane[index.lane[i] & 7]; });
}
inline __m512i longs(std::uint64_t a, std::uint64_t b, std::uint64_t c, std::uint64_t d, std::uint64_t e,
                     std::uint64_t f, std::uint64_t g, std::uint64_t h) {
  const std::uint64_t all[8] = {a, b, c, d, e, f, g, h};
  return load<__m512i>(all);
}

}  // namespace emulated

// The compiler's own are macros too, some of them always, some without optimisation.
#undef _mm512_permute_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_mask_sub_ps
#undef _mm512_add_ps
#undef _mm512_mul_ps
#undef _mm512_fmadd_ps
#undef _mm512_mask_blend_ps
#undef _mm512_mask_blend_epi32
#undef _mm512_cmp_ps_mask
#undef _mm512_set1_ps
#undef _mm512_set1_epi32
#undef _mm512_set1_epi64
#undef _mm512_setr_epi64
#undef _mm512_loadu_ps
#undef _mm512_loadu_si512
#undef _mm512_load_si512
#undef _mm512_storeu_ps
#undef _mm512_storeu_si512
#undef _mm512_stream_si512
#undef _mm512_and_si512
#undef _mm512_castps_si512
#undef _mm512_xor_si512
#undef _mm512_srai_epi32
#undef _mm512_max_epi32
#undef _mm512_min_epi32
#undef _mm512_reduce_max_epi32
#undef _mm512_reduce_min_epi32
#undef _mm512_sub_epi32
#undef _mm512_cmplt_epu32_mask
#undef _mm512_movepi32_mask
#undef _mm512_cvtepi32_ps
#undef _mm512_cvtepu8_epi32
#undef _mm512_cvtepi8_epi32
#undef _mm512_cvtepu16_epi32
#undef _mm512_cvtepi32_epi8
#undef _mm512_mul_epu32
#undef _mm512_add_epi64
#undef _mm512_srli_epi64
#undef _mm512_slli_epi64
#undef _mm512_ternarylogic_epi64
#undef _mm512_permutex2var_epi64

#define _mm512_permute_ps(a, chosen) emulated::permute(a, chosen)
#define _mm512_shuffle_f32x4(a, b, chosen) emulated::shuffle_quarters(a, b, chosen)
#define _mm512_mask_sub_ps(otherwise, mask, a, b) emulated::mask_sub(otherwise, mask, a, b)
#define _mm512_add_ps(a, b) emulated::add(a, b)
#define _mm512_mul_ps(a, b) emulated::mul(a, b)
#define _mm512_fmadd_ps(a, b, c) emulated::fmadd(a, b, c)
#define _mm512_mask_blend_ps(mask, a, b) emulated::blend(mask, a, b)
#define _mm512_mask_blend_epi32(mask, a, b) emulated::blend_words(mask, a, b)
#define _mm512_cmp_ps_mask(a, b, kind) emulated::compare<kind>(a, b)
#define _mm512_set1_ps(x) emulated::all_floats(x)
#define _mm512_set1_epi32(x) emulated::all_words(static_cast<std::uint32_t>(x))
#define _mm512_set1_epi64(x) emulated::all_longs(static_cast<std::uint64_t>(x))
#define _mm512_setr_epi64(...) emulated::longs(__VA_ARGS__)
#define _mm512_loadu_ps(at) emulated::load<__m512>(at)
#define _mm512_loadu_si512(at) emulated::load<__m512i>(at)
#define _mm512_load_si512(at) emulated::load<__m512i>(at)
#define _mm512_storeu_ps(at, x) emulated::store(at, __m512(x))
#define _mm512_storeu_si512(at, x) emulated::store(at, __m512i(x))
#define _mm512_stream_si512(at, x) emulated::store(at, __m512i(x))
#define _mm512_and_si512(a, b) emulated::bit_and(a, b)
#define _mm512_castps_si512(a) emulated::load<__m512i>(&(a))
#define _mm512_xor_si512(a, b) emulated::bit_xor(a, b)
#define _mm512_srai_epi32(a, by) emulated::shift_signed(a, by)
#define _mm512_max_epi32(a, b) emulated::larger(a, b)
#define _mm512_min_epi32(a, b) emulated::smaller(a, b)
#define _mm512_reduce_max_epi32(a) emulated::reduce<emulated::larger>(a)
#define _mm512_reduce_min_epi32(a) emulated::reduce<emulated::smaller>(a)
#define _mm512_sub_epi32(a, b) emulated::sub(a, b)
#define _mm512_cmplt_epu32_mask(a, b) emulated::less(a, b)
#define _mm512_movepi32_mask(a) emulated::signs(a)
#define _mm512_cvtepi32_ps(a) emulated::to_floats(a)
#define _mm512_cvtepu8_epi32(a) emulated::widen<std::uint8_t>(a)
#define _mm512_cvtepi8_epi32(a) emulated::widen<std::int8_t>(a)
#define _mm512_cvtepu16_epi32(a) emulated::widen<std::uint16_t>(a)
#define _mm512_cvtepi32_epi8(a) emulated::narrow(a)
#define _mm512_mul_epu32(a, b) emulated::mul_long(a, b)
#define _mm512_add_epi64(a, b) emulated::add_long(a, b)
#define _mm512_srli_epi64(a, by) emulated::shift_right(a, by)
#define _mm512_slli_epi64(a, by) emulated::shift_left(a, by)
#define _mm512_ternarylogic_epi64(a, b, c, table) emulated::ternary(a, b, c, table)
#define _mm512_permutex2var_epi64(a, index, b) emulated::permute_both(a, index, b)
