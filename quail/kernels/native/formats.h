// What formats of packed rows and weights share: rows cut into tiles, and the loops over tiles of them.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "tile.h"

namespace quail {
namespace {  // what several builds in a process must not share

constexpr int LINE_WORDS = 16;    // of a line of the caches
constexpr int GROUP = 4;          // words of a packed row that lie together
constexpr int PIECE = 2 * LANES;  // elements of bfloat16 in a register

// The `rest` elements at x, at most a piece, and zeros behind them.
inline __m512i piece_of(const bf16* x, long rest) {
    return rest >= PIECE ? _mm512_loadu_si512(x) : _mm512_maskz_loadu_epi16((1u << rest) - 1, x);
}

inline void store_group(uint32_t* to, __m128i group) {
    static_assert(GROUP == 4, "a quarter of a register");
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), group);
}

// Stores the groups of a piece that `rest` elements, at least one, reach into, `stride` words from one to the next.
inline void store_groups(uint32_t* to, long stride, __m512i piece, long rest) {
    store_group(to, _mm512_castsi512_si128(piece));
    if (rest > 8) store_group(to + stride, _mm512_extracti32x4_epi32(piece, 1));
    if (rest > 16) store_group(to + 2 * stride, _mm512_extracti32x4_epi32(piece, 2));
    if (rest > 24) store_group(to + 3 * stride, _mm512_extracti32x4_epi32(piece, 3));
}

// Rows cut into tiles.
struct Tiles {
    long rows, tiles;

    explicit Tiles(long rows = 0) : rows(rows), tiles((rows + TILE_ROWS - 1) / TILE_ROWS) {}
    long begin(long tile) const { return rows * tile / tiles; }
    int height(long tile) const { return int(begin(tile + 1) - begin(tile)); }
};

// What formats of two bytes an element share.
struct TwoBytes {
    static constexpr int ELEMENT_BYTES = 2;
    static constexpr int PARTS = GROUP * PANEL / LINE_WORDS;  // of a panel: a tile asks for one

    static long steps_of(long inner) { return (inner + 2 * GROUP - 1) / (2 * GROUP) * GROUP; }
    static long words_of_a_panel(long inner) { return steps_of(inner) * PANEL; }
};

// Each adds the products of a word of a row, at `word`, with those of a panel's columns. Two rows of three read the
// word as part of each multiplication (`itself`), which saves an instruction; the third reads it once for both, as the
// processor reads no more than two operands while it multiplies two.
#define QUAIL_ADD_WORD(NAME, TOTAL, INSTRUCTION)                                                                       \
    struct NAME {                                                                                                      \
        using Total = TOTAL;                                                                                           \
        static void itself(Total& left_total, Total& right_total, __m512i left, __m512i right, const uint32_t* word) { \
            asm(INSTRUCTION " %2%{1to16%}, %3, %0\n\t" INSTRUCTION " %2%{1to16%}, %4, %1"                              \
                : "+&v"(left_total), "+v"(right_total)                                                                 \
                : "m"(*word), "v"(left), "v"(right));                                                                  \
        }                                                                                                              \
        static void once(Total& left_total, Total& right_total, __m512i left, __m512i right, const uint32_t* word) {   \
            __m512i each;                                                                                              \
            asm("vpbroadcastd %3, %2\n\t" INSTRUCTION " %2, %4, %0\n\t" INSTRUCTION " %2, %5, %1"                      \
                : "+&v"(left_total), "+v"(right_total), "=&v"(each)                                                    \
                : "m"(*word), "v"(left), "v"(right));                                                                  \
        }                                                                                                              \
    };

QUAIL_ADD_WORD(AddBytes, Ints, "vpdpbusd")       // four signed bytes, with the columns' unsigned ones
QUAIL_ADD_WORD(AddShorts, Ints, "vpdpwssd")      // two 16-bit integers
#if defined(__AVX512BF16__)
QUAIL_ADD_WORD(AddBfloats, Floats, "vdpbf16ps")  // two of bfloat16; denormals count as 0
#endif

#undef QUAIL_ADD_WORD

template <class Add, bool ITSELF>
inline __attribute__((always_inline)) void add_word(
    typename Add::Total& left_total,
    typename Add::Total& right_total,
    __m512i left,
    __m512i right,
    const uint32_t* word) {
    ITSELF ? Add::itself(left_total, right_total, left, right, word)
           : Add::once(left_total, right_total, left, right, word);
}

// Adds the products of `steps` words of packed rows R... with a panel's columns. Meanwhile a line of `next` is asked
// for with each group. Written without loops over rows, so that all sums stay in registers.
template <class Add, int... R>
inline __attribute__((always_inline)) void add_steps(
    std::integer_sequence<int, R...>,
    typename Add::Total (&left_total)[sizeof...(R)],
    typename Add::Total (&right_total)[sizeof...(R)],
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
            (add_word<Add, R % 3 != 0>(left_total[R], right_total[R], left, right, a + R * GROUP + i), ...);
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
