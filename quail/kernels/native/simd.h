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

// Whether this processor adds up products of pairs of bfloat16 as fast as those of 16-bit integers.
#if defined(__AVX512BF16__) && defined(QUAIL_FAST_PAIRS)
constexpr bool FAST_PAIRS = true;
#else
constexpr bool FAST_PAIRS = false;
#endif

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
#else
    Halves halves;
    std::memcpy(&halves, from, sizeof halves);
    return (Floats)(__builtin_convertvector(halves, Words) << 16);
#endif
}

inline void store(float* to, Floats x) { std::memcpy(to, &x, sizeof x); }

inline void store(bf16* to, Floats x) {
#if defined(__AVX512BF16__)
    const __m256bh halves = _mm512_cvtneps_pbh((__m512)x);  // denormals become 0
#else
    const Words bits = (Words)x;
    const Words rounded = bits + 0x7fff + ((bits >> 16) & 1);
    const Words kept = x != x ? bits | 0x400000 : rounded;
    const Halves halves = __builtin_convertvector(kept >> 16, Halves);
#endif
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

// 2^r for |r| <= 1/2 by the polynomial of degree 6 of least relative error that is 1 at 0.
inline Floats exp2_of_small(Floats r) {
    Floats p = r * 1.5594678e-4f + 1.3406644e-3f;
    p = p * r + 9.617693e-3f;
    p = p * r + 5.5503104e-2f;
    p = p * r + 2.4022652e-1f;
    p = p * r + 6.9314724e-1f;
    return p * r + 1.0f;
}

inline Floats rounder() { return splat(12582912.0f); }  // 1.5 * 2^23: adding it rounds to a whole number

// 2^x for x <= 0, relative error about 1e-7; 2^-inf = 0, results under 2^-125 are 0, NaN stays NaN.
inline Floats exp2_of_negative(Floats x) {
    const Floats shifted = x + rounder();
    const Floats small = exp2_of_small(x - (shifted - rounder()));
    const Floats found = small * (Floats)(((Words)shifted << 23) + 0x3f800000);
    return x < -125.0f ? splat(0.0f) : found;
}

// log2 of x > 0 that is no denormal, error under 4e-7, by the polynomial of degree 7 of about least error. NaN stays
// NaN.
inline Floats log2_of(Floats x) {
    const Ints exponent = ((Ints)x - 0x3f3504f3) >> 23;  // x = 2^exponent * (1 + t), 1 + t in [sqrt(1/2), sqrt(2))
    const Floats t = (Floats)((Ints)x - (exponent << 23)) - 1.0f;
    Floats p = t * 0.16683395f - 0.27051278f;
    p = p * t + 0.29753877f;
    p = p * t - 0.35924162f;
    p = p * t + 0.48047248f;
    p = p * t - 0.7213676f;
    p = p * t + 1.4426993f;
    return p * t + __builtin_convertvector(exponent, Floats) + (x - x);
}

// x * sigmoid(x) = x / (1 + 2^(-x log2 e)), relative error about 1e-7 * |x|; below -87 it is 0.
inline Floats silu(Floats x) {
    const Floats power = x * -1.44269504f;
#if defined(__AVX512F__)
    const __mmask16 fits = _mm512_cmp_ps_mask((__m512)power, _mm512_set1_ps(126), _CMP_NGT_UQ);
    const Floats n = (power + rounder()) - rounder();
    const Floats whole = 1.0f + (Floats)_mm512_scalef_ps((__m512)exp2_of_small(power - n), (__m512)n);
    const Floats about = (Floats)_mm512_rcp14_ps((__m512)whole);
    // A step of Newton's doubles the 14 bits.
    return x * (Floats)_mm512_maskz_mul_ps(fits, (__m512)about, (__m512)(2.0f - whole * about));
#else
    const Floats e = exp2_of_negative(power < 0 ? power : -power);  // nothing overflows
    return x * (x < 0 ? e : splat(1.0f)) / (1.0f + e);
#endif
}

}  // namespace quail
