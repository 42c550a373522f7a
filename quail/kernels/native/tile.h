// Inner loops over tiles: sums of products that stay in registers, and rows turned into columns.
#pragma once

#include "simd.h"

namespace quail {

// total + a * b; with PAIRS elements are pairs of bfloat16, whose two products are added.
template <bool PAIRS>
inline Floats add_product(Floats total, Floats a, Floats b) {
#if defined(__AVX512BF16__)
    if constexpr (PAIRS) return (Floats)_mm512_dpbf16_ps((__m512)total, (__m512bh)a, (__m512bh)b);
#else
    static_assert(!PAIRS, "needs AVX-512 BF16");
#endif
    return total + a * b;
}

// total[r] += sum over k of a[r * ROW_STRIDE + k * STEP_STRIDE] * b[k * b_stride, 0:WIDE vectors].
//
// Each element of the result is one chain of additions in the order of the inner dimension, whatever the shape of
// the tile: a lane's result does not depend on the lanes around it.
template <int ROW_STRIDE, int STEP_STRIDE, bool PAIRS = false, int HIGH, int WIDE>
inline __attribute__((always_inline)) void add_products(
    Floats (&total)[HIGH][WIDE], const float* a, const float* b, long b_stride, long steps) {
    for (long k = 0; k < steps; ++k, a += STEP_STRIDE, b += b_stride) {
        Floats columns[WIDE];
#pragma GCC unroll 3
        for (int w = 0; w < WIDE; ++w) columns[w] = load(b + w * LANES);
#pragma GCC unroll 16
        for (int r = 0; r < HIGH; ++r) {
            const Floats each = splat(a[r * ROW_STRIDE]);
#pragma GCC unroll 3
            for (int w = 0; w < WIDE; ++w) total[r][w] = add_product<PAIRS>(total[r][w], each, columns[w]);
        }
    }
}

#if defined(__AVX512F__)
inline void transpose_16(__m512i (&r)[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
        t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
        r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
        r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
    }
}
#endif

// to[k * stride + r] = rows[r][k] for k < words, r < num_rows <= LANES; a null row counts as zeros. Lanes from
// num_rows to LANES of each step may be overwritten with zeros, before the next step is written.
inline void transpose_words(
    const uint32_t* const* rows, int num_rows, long words, uint32_t* to, long stride) {
    long k = 0;
#if defined(__AVX512F__)
    for (; k + 16 <= words; k += 16) {
        __m512i r[16];
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) {
            r[i] = i < num_rows && rows[i] ? _mm512_loadu_si512(rows[i] + k) : _mm512_setzero_si512();
        }
        transpose_16(r);
#pragma GCC unroll 16
        for (int i = 0; i < 16; ++i) _mm512_storeu_si512(to + (k + i) * stride, r[i]);
    }
#endif
    for (; k < words; ++k) {
        for (int r = 0; r < num_rows; ++r) {
            uint32_t word = 0;
            if (rows[r]) std::memcpy(&word, rows[r] + k, 4);
            std::memcpy(to + k * stride + r, &word, 4);
        }
        for (int r = num_rows; r < LANES; ++r) std::memset(to + k * stride + r, 0, 4);
    }
}

inline void transpose(const float* const* rows, int num_rows, long count, float* to, long stride) {
    const uint32_t* words[LANES] = {};
    for (int r = 0; r < num_rows; ++r) words[r] = reinterpret_cast<const uint32_t*>(rows[r]);
    transpose_words(words, num_rows, count, reinterpret_cast<uint32_t*>(to), stride);
}

}  // namespace quail
