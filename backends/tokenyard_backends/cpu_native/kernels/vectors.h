// Vectors of float32 in GNU vector extensions, which g++ and clang++ compile to AVX-512, AVX2, NEON or what there is;
// the element types of caches and tensors; exponentials. No flag may allow reassociation: `exponential` depends on it.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

#if defined(__AVX512F__)
constexpr int W = 16;     // floats of a vector register
constexpr int PANEL = 4;  // vectors side by side in a register tile
constexpr const char* ISA = "AVX-512";
#define EACH_LANE(f) f(0), f(4), f(8), f(12)
#define ZIP_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define ZIP_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif defined(__AVX2__)
constexpr int W = 8;
constexpr int PANEL = 2;  // 16 registers instead of 32
constexpr const char* ISA = "AVX2";
#define EACH_LANE(f) f(0), f(4)
#define ZIP_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define ZIP_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
constexpr int W = 4;
constexpr int PANEL = 4;
#if defined(__ARM_NEON)
constexpr const char* ISA = "NEON";
#else
constexpr const char* ISA = "128-bit vectors";
#endif
#define EACH_LANE(f) f(0)
#define ZIP_LOW 0, 4, 1, 5
#define ZIP_HIGH 2, 6, 3, 7
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
typedef uint16_t vh __attribute__((vector_size(W * 2)));

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (vi){__VA_ARGS__})
#endif
#define UNROLL _Pragma("GCC unroll 16")
#define INLINE inline __attribute__((always_inline))

struct Bf16 { uint16_t bits; };
struct Half { uint16_t bits; };

INLINE vf splat(float x) { return vf{} + x; }
INLINE vf bits_to_float(vu x) { return (vf)x; }
INLINE vf choose(vi mask, vf yes, vf no) { return (vf)((mask & (vi)yes) | (~mask & (vi)no)); }
INLINE vf larger(vf a, vf b) { return choose(a > b, a, b); }

INLINE vf load(const float* from) { vf x; memcpy(&x, from, sizeof x); return x; }
INLINE vu load_bits(const void* from) { vh x; memcpy(&x, from, sizeof x); return __builtin_convertvector(x, vu); }
INLINE vf load(const Bf16* from) { return bits_to_float(load_bits(from) << 16); }
INLINE vf load(const Half* from) {
  vu bits = load_bits(from), magnitude = bits & 0x7fff;
  vf value = bits_to_float(magnitude << 13) * 0x1p112f;  // moves the exponent's bias, exactly; subnormals too
  vu special = (vu)(magnitude >= 0x7c00) & 0x7f800000;
  return bits_to_float((vu)value | special | (bits & 0x8000) << 16);
}

INLINE void store(float* to, vf x) { memcpy(to, &x, sizeof x); }
INLINE void store_bits(void* to, vu bits) { vh x = __builtin_convertvector(bits, vh); memcpy(to, &x, sizeof x); }
INLINE void store(Bf16* to, vf x) {  // to nearest, ties to even
  vu bits = (vu)x, nan = (vu)(x != x);
  vu rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  store_bits(to, (nan & (bits >> 16 | 0x40)) | (~nan & rounded));
}
INLINE void store(Half* to, vf x) {  // to nearest, ties to even
  vu bits = (vu)x, magnitude = bits & 0x7fffffff;
  vu normal = (magnitude + 0xfff + (magnitude >> 13 & 1) - (112u << 23)) >> 13;
  normal = (vu)choose(normal > 0x7c00, bits_to_float(vu{} + 0x7c00), bits_to_float(normal));
  vf shifted = bits_to_float(magnitude) * 0x1p24f + 0x1.8p23f;  // a subnormal, as an integer in the low bits
  vi is_small = (vi)(magnitude < 0x38800000), nan = (vi)(x != x);
  vf result = choose(is_small, bits_to_float((vu)shifted & 0xffff), bits_to_float(normal));
  store_bits(to, (vu)choose(nan, bits_to_float(vu{} + 0x7e00), result) | (bits >> 16 & 0x8000));
}

// e^x for x <= 88, within 1.5 ulp; 0 below -87.3 (no subnormal results); NaN stays. 2^n * e^r with |r| <= ln(2) / 2.
INLINE vf exponential(vf x) {
  vi vanishes = x < -87.3f;
  x = choose(vanishes, splat(-87.3f), x);
  vf shifted = x * 1.44269504f + 0x1.8p23f;  // the low bits hold n, rounded
  vf n = shifted - 0x1.8p23f;
  vf r = x - n * 0x1.62e4p-1f - n * 0x1.7f7d1cp-20f;  // ln(2) in two parts; the first times n is exact
  vf p = splat(0x1.6a2352p-10f);                      // minimax on this interval
  p = p * r + 0x1.123a6cp-7f;
  p = p * r + 0x1.5558f4p-5f;
  p = p * r + 0x1.555490p-3f;
  p = p * r + 0x1.fffffcp-2f;
  p = (p * r) * r + r + 1.0f;
  vf power = bits_to_float(((vu)shifted + 127) << 23);
  return (vf)((vi)(p * power) & ~vanishes);
}

INLINE vf hyperbolic_tangent(vf x) {
  vf size = choose(x < 0.0f, -x, x);
  vf e = exponential(choose(size > 20.0f, splat(-40.0f), size * -2.0f));
  vf large = (1.0f - e) / (1.0f + e);
  vf z = x * x;
  vf p = splat(-0.005905867554247379f);  // minimax of (tanh(x) / x - 1) / x^2 for x < 0.6
  p = p * z + 0.02080538310110569f;
  p = p * z - 0.053786683827638626f;
  p = p * z + 0.13331958651542664f;
  p = p * z - 0.33333298563957214f;
  return choose(size < 0.6f, x + x * (z * p), choose(x < 0.0f, -large, large));
}

#define LOW_PAIR(i) i, i + 1, W + i, W + i + 1
#define HIGH_PAIR(i) i + 2, i + 3, W + i + 2, W + i + 3
#define EVEN(i) i, i + 2, W + i, W + i + 2
#define ODD(i) i + 1, i + 3, W + i + 1, W + i + 3

// Sums of W vectors at once, first half: W / 4 vectors become one that has 4 lanes of partial sums for each of them.
INLINE vf fold(const vf* x) {
#if defined(__AVX512F__)
  vf ab = SHUFFLE(x[0], x[1], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
          SHUFFLE(x[0], x[1], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  vf cd = SHUFFLE(x[2], x[3], 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
          SHUFFLE(x[2], x[3], 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
  return SHUFFLE(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
         SHUFFLE(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
#elif defined(__AVX2__)
  return SHUFFLE(x[0], x[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(x[0], x[1], 4, 5, 6, 7, 12, 13, 14, 15);
#else
  return x[0];
#endif
}

// Second half: of 4 folded vectors, lane 4 * j + g of the result is the sum of slot j of vector g.
INLINE vf sum_lanes(const vf* x) {
  vf ab = SHUFFLE(x[0], x[1], EACH_LANE(LOW_PAIR)) + SHUFFLE(x[0], x[1], EACH_LANE(HIGH_PAIR));
  vf cd = SHUFFLE(x[2], x[3], EACH_LANE(LOW_PAIR)) + SHUFFLE(x[2], x[3], EACH_LANE(HIGH_PAIR));
  return SHUFFLE(ab, cd, EACH_LANE(EVEN)) + SHUFFLE(ab, cd, EACH_LANE(ODD));
}

INLINE float sum_of(vf x) {
  float sum = 0;
  for (int i = 0; i < W; ++i) sum += x[i];
  return sum;
}
INLINE float largest_of(vf x) {
  float top = x[0];
  for (int i = 1; i < W; ++i) top = x[i] > top ? x[i] : top;
  return top;
}
INLINE float exponential_of(float x) { return exponential(splat(x))[0]; }

INLINE int64_t rounded_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }
INLINE int64_t smaller_of(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

// `n` elements -> floats times `factor`, with zeros up to `padded` (a multiple of W).
template <class T> void unpack(const T* from, int64_t n, float* to, int64_t padded, float factor) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i) * factor);
  for (; i < padded; i += W) {
    T tail[W] = {};
    if (i < n) memcpy(tail, from + i, (n - i) * sizeof(T));
    store(to + i, load(tail) * factor);
  }
}

template <class T> void pack(const float* from, int64_t n, T* to, float factor) {
  int64_t i = 0;
  for (; i + W <= n; i += W) store(to + i, load(from + i) * factor);
  if (i == n) return;
  T tail[W];
  store(tail, load(from + i) * factor);  // `from` is padded to a multiple of W
  memcpy(to + i, tail, (n - i) * sizeof(T));
}

}  // namespace
