// Vectors of the widest registers that this build may use, and what the kernels do with them.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace quail {

#if defined(__AVX512F__)
constexpr int LANES = 16;
constexpr int TILE_ROWS = 14;  // 28 accumulators, 2 vectors of the panel, 1 broadcast: 31 of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8;
constexpr int TILE_ROWS = 6;  // 12 accumulators, 2 of the panel, 1 broadcast: 15 of 16 registers
#else
constexpr int LANES = 4;
constexpr int TILE_ROWS = 4;
#endif
constexpr int PANEL = 2 * LANES;  // columns of a panel of packed weights

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

inline Floats splat(float x) { return x - Floats{}; }

inline Ints lane_numbers() {
    Ints found;
    for (int lane = 0; lane < LANES; ++lane) found[lane] = lane;
    return found;
}

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    const uint32_t bits = uint32_t(x.bits) << 16;
    float found;
    std::memcpy(&found, &bits, 4);
    return found;
}

inline bf16 round_bf16(float x) {  // to nearest, ties to even; NaN stays NaN
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    const uint32_t rounded = bits + 0x7fff + ((bits >> 16) & 1);
    return {uint16_t((x != x ? bits | 0x400000 : rounded) >> 16)};
}

inline void put(float* to, float x) { *to = x; }
inline void put(bf16* to, float x) { *to = round_bf16(x); }

inline Floats load(const float* from) {
    Floats found;
    std::memcpy(&found, from, sizeof found);
    return found;
}

inline Floats load(const bf16* from) {
#if defined(__AVX512F__)
    const __m512i words = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    return (Floats)_mm512_slli_epi32(words, 16);
#endif
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline void store(bf16* to, Floats x) {
    const Words bits = (Words)x;
    const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Words kept = x != x ? bits | 0x400000 : rounded;
    const Halves halves = __builtin_convertvector(kept >> 16, Halves);
    std::memcpy(to, &halves, sizeof halves);
}

inline float sum(Floats x) {
    float found = 0;
#if defined(__AVX512F__)
    found = _mm512_reduce_add_ps((__m512)x);
#else
    for (int lane = 0; lane < LANES; ++lane) found += x[lane];
#endif
    return found;
}

// The larger of each two lanes; where one is NaN, b.
inline Floats larger(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}

// 2^x for x <= 0, relative error about 1e-7; 2^-inf = 0, results under 2^-125 are 0, NaN stays NaN.
// x = n + r, |r| <= 1/2, 2^r by the polynomial of degree 6 of least relative error that is 1 at 0.
inline Floats exp2_of_negative(Floats x) {
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats shifted = x + magic;
    const Floats r = x - (shifted - magic);
    Floats p = r * 1.5594678e-4f + 1.3406644e-3f;
    p = p * r + 9.617693e-3f;
    p = p * r + 5.5503104e-2f;
    p = p * r + 2.4022652e-1f;
    p = p * r + 6.9314724e-1f;
    p = p * r + 1.0f;
    const Floats found = p * (Floats)(((Words)shifted << 23) + 0x3f800000);
    return x < -125.0f ? splat(0.0f) : found;
}

// exp(x) for x <= 0, relative error about 1e-7; exp(-inf) = 0, results under 2^-126 are 0, NaN stays NaN.
// x = n ln 2 + r, |r| <= ln 2 / 2, exp(r) by its Taylor series to r^7.
inline Floats exp_of_negative(Floats x) {
    const Floats least = splat(-87.3f);
    const Floats bounded = x < least ? least : x;
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to a whole number
    const Floats shifted = bounded * 1.44269504088896341f + magic;
    const Floats n = shifted - magic;
    Floats r = bounded - n * 0.693145751953125f;
    r = r - n * 1.42860682030941723212e-6f;
    Floats p = r * (1.0f / 5040) + (1.0f / 720);
    p = p * r + (1.0f / 120);
    p = p * r + (1.0f / 24);
    p = p * r + (1.0f / 6);
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Words exponent = ((Words)shifted - (Words)magic + 127) << 23;
    const Floats found = p * (Floats)exponent;
    return x < least ? splat(0.0f) : found;
}

// x * sigmoid(x), by exp(-|x|) so that nothing overflows.
inline Floats silu(Floats x) {
    const Floats e = exp_of_negative(x < 0 ? x : -x);
    return x * (x < 0 ? e : splat(1.0f)) / (1.0f + e);
}

}  // namespace quail
