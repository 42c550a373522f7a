// What rows and weights need to become integers, and the loops over tiles of them.
#pragma once

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "tile.h"

namespace quail {
namespace {  // what several builds in a process must not share

constexpr int LINE_WORDS = 16;   // of a line of the caches
constexpr int GROUP = 4;         // words of a packed row that lie together
constexpr float LEAST = 1e-30f;  // less counts as zero
constexpr int PIECE = 2 * LANES;  // elements of bfloat16 in a register

// The `rest` elements at x, at most a piece, and zeros behind them.
inline __m512i piece_of(const bf16* x, long rest) {
    return rest >= PIECE ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16((1u << rest) - 1, x);
}

// Their magnitudes, which are in the order of their bits.
inline __m512i magnitudes(const bf16* x, long rest) {
    return _mm512_and_si512(piece_of(x, rest), _mm512_set1_epi16(0x7fff));
}

// The largest of a piece of magnitudes; NaN if one of them is not finite.
inline float largest_of(__m512i magnitudes) {
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitudes), _mm512_extracti64x4_epi64(magnitudes, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i all_bits = _mm_set1_epi16(-1);  // the least of the complements is the complement of the largest
    const int least = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, all_bits)), 0);
    const uint16_t found = uint16_t(~least);
    return found >= 0x7f80 ? NAN : widen(bf16{found});
}

// The largest magnitude of `count` elements; NaN if one of them is not finite.
inline float magnitude(const bf16* x, long count) {
    __m512i most = _mm512_setzero_si512();
    for (long i = 0; i < count; i += PIECE) most = _mm512_max_epu16(most, magnitudes(x + i, count - i));
    return largest_of(most);
}

// round(piece * factors) as 16-bit integers. Elements are widened and narrowed within quarters of the register, so that
// they keep their order.
inline __m512i rounded(__m512i piece, __m512 factors) {
    const auto whole = [&](__m512i elements) { return _mm512_cvtps_epi32(_mm512_castsi512_ps(elements) * factors); };
    return _mm512_packs_epi32(
        whole(_mm512_unpacklo_epi16(__m512i{}, piece)), whole(_mm512_unpackhi_epi16(__m512i{}, piece)));
}

inline void store_group(uint32_t* to, __m128i group) {
    static_assert(GROUP == 4, "a quarter of a register");
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), group);
}

struct Scale {
    float of_integers, of_elements;  // element = integer * of_integers; integer = element * of_elements
};

Scale scale_of(float most, float limit) {
    if (most != most) return {NAN, 0};
    if (most < LEAST) return {0, 0};
    return {most / limit, limit / most};
}

// Rows cut into tiles.
struct Tiles {
    long rows, tiles;

    explicit Tiles(long rows = 0) : rows(rows), tiles((rows + TILE_ROWS - 1) / TILE_ROWS) {}
    long begin(long tile) const { return rows * tile / tiles; }
    int height(long tile) const { return int(begin(tile + 1) - begin(tile)); }
};

// Adds the products of a word of a row, at `word`, with those of a panel's columns: of two 16-bit integers, or of four
// signed bytes with the columns' unsigned ones. Two rows of three read the word as part of each multiplication, which
// saves an instruction; the third reads it once for both, as the processor reads no more than two operands while it
// multiplies two.
template <bool BYTES, bool ITSELF>
inline void add_word(Ints& left_total, Ints& right_total, __m512i left, __m512i right, const uint32_t* word) {
    if constexpr (ITSELF && BYTES) {
        asm("vpdpbusd %2%{1to16%}, %3, %0\n\tvpdpbusd %2%{1to16%}, %4, %1"
            : "+v"(left_total), "+v"(right_total)
            : "m"(*word), "v"(left), "v"(right));
    } else if constexpr (ITSELF) {
        asm("vpdpwssd %2%{1to16%}, %3, %0\n\tvpdpwssd %2%{1to16%}, %4, %1"
            : "+v"(left_total), "+v"(right_total)
            : "m"(*word), "v"(left), "v"(right));
    } else {
        __m512i each;
        if constexpr (BYTES) {
            asm("vpbroadcastd %3, %2\n\tvpdpbusd %2, %4, %0\n\tvpdpbusd %2, %5, %1"
                : "+v"(left_total), "+v"(right_total), "=&v"(each)
                : "m"(*word), "v"(left), "v"(right));
        } else {
            asm("vpbroadcastd %3, %2\n\tvpdpwssd %2, %4, %0\n\tvpdpwssd %2, %5, %1"
                : "+v"(left_total), "+v"(right_total), "=&v"(each)
                : "m"(*word), "v"(left), "v"(right));
        }
    }
}

// Adds the products of `steps` words of packed rows R... with a panel's columns. Meanwhile a line of `next` is asked
// for with each group. Written without loops over rows, so that all sums stay in registers.
template <bool BYTES, int... R>
inline __attribute__((always_inline)) void add_steps(
    std::integer_sequence<int, R...>,
    Ints (&left_total)[sizeof...(R)],
    Ints (&right_total)[sizeof...(R)],
    const uint32_t* a,
    const uint32_t* b,
    long steps,
    const uint32_t* next) {
    constexpr int ROWS = sizeof...(R);
    for (long k = 0; k < steps; k += GROUP, a += ROWS * GROUP, b += GROUP * PANEL, next += LINE_WORDS) {
        __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) {
            const __m512i left = _mm512_loadu_si512(b + i * PANEL);
            const __m512i right = _mm512_loadu_si512(b + i * PANEL + LANES);
            (add_word<BYTES, R % 3 != 0>(left_total[R], right_total[R], left, right, a + R * GROUP + i), ...);
        }
    }
    asm volatile("" ::: "memory");  // else compilers keep sums of runs before, too, in registers, and spill all of them
}

// The function of a format for tiles of so many rows.
template <class Format, int... HEIGHT_LESS_1>
auto tile_of(int rows, std::integer_sequence<int, HEIGHT_LESS_1...>) {
    static constexpr decltype(&Format::template tile<1>) tiles[] = {Format::template tile<HEIGHT_LESS_1 + 1>...};
    return tiles[rows - 1];
}

}  // namespace
}  // namespace quail
