// The one inner loop: a tile of rows times a packed panel of columns.
//
// Each element of the result is one chain of additions in the order of the inner dimension, whatever the tile's
// height: a row's result does not depend on the rows around it.
#pragma once

#include <utility>

#include "simd.h"

namespace quail {

// c[r, 0:PANEL] (+)= sum over k of a[r * ROW_STRIDE + k * STEP_STRIDE] * b[k * PANEL, 0:PANEL], rows R... Written
// without loops over rows, so that all sums stay in registers.
template <int ROW_STRIDE, int STEP_STRIDE, bool ADD, int... R>
void tile(std::integer_sequence<int, R...>, const float* a, const float* b, long steps, float* c, long c_stride) {
    Floats left_total[] = {ADD ? load(c + R * c_stride) : Floats{}...};
    Floats right_total[] = {ADD ? load(c + R * c_stride + LANES) : Floats{}...};
    for (long k = 0; k < steps; ++k) {
        const Floats left = load(b + k * PANEL), right = load(b + k * PANEL + LANES);
        Floats each;
        ((each = splat(a[R * ROW_STRIDE + k * STEP_STRIDE]),
          left_total[R] += each * left,
          right_total[R] += each * right),
         ...);
    }
    ((store(c + R * c_stride, left_total[R]), store(c + R * c_stride + LANES, right_total[R])), ...);
}

using Tile = void (*)(const float*, const float*, long, float*, long);

template <int ROWS>
void packed_rows(const float* a, const float* b, long steps, float* c, long c_stride) {
    tile<1, ROWS, false>(std::make_integer_sequence<int, ROWS>(), a, b, steps, c, c_stride);
}

template <int ROWS, int ROW_STRIDE>
void strided_rows(const float* a, const float* b, long steps, float* c, long c_stride) {
    tile<ROW_STRIDE, 1, true>(std::make_integer_sequence<int, ROWS>(), a, b, steps, c, c_stride);
}

// Tiles of 1 to TILE_ROWS rows that lie packed, step by step.
template <int... HEIGHT_LESS_1>
Tile packed_tile(int rows, std::integer_sequence<int, HEIGHT_LESS_1...>) {
    static constexpr Tile tiles[] = {packed_rows<HEIGHT_LESS_1 + 1>...};
    return tiles[rows - 1];
}
inline Tile packed_tile(int rows) { return packed_tile(rows, std::make_integer_sequence<int, TILE_ROWS>()); }

// Tiles of rows of ROW_STRIDE floats each, added to what is there.
template <int ROW_STRIDE, int... HEIGHT_LESS_1>
Tile adding_tile(int rows, std::integer_sequence<int, HEIGHT_LESS_1...>) {
    static constexpr Tile tiles[] = {strided_rows<HEIGHT_LESS_1 + 1, ROW_STRIDE>...};
    return tiles[rows - 1];
}
template <int ROW_STRIDE>
inline Tile adding_tile(int rows) {
    return adding_tile<ROW_STRIDE>(rows, std::make_integer_sequence<int, TILE_ROWS>());
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
