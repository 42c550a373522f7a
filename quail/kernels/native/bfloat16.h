// Pairs of bfloat16 as they are, for processors that add them up as fast as pairs of 16-bit integers. All products of a
// row and a column are added up in one chain in float32, pair by pair.
#pragma once

#include "formats.h"

#if defined(__AVX512BF16__)

namespace quail {
namespace {  // what several builds in a process must not share

struct Bfloat16 : TwoBytes {
    // Rows tile by tile, and of those a group of each row after the other.
    class Rows {
        std::vector<uint32_t> words;

      public:
        Tiles tiles;
        long steps;

        const uint32_t* words_of(long tile) const { return words.data() + tiles.begin(tile) * steps; }
        const float* scales_of_rows(long) const { return nullptr; }

        void pack(const bf16* x, long stride, long num_rows, long inner) {
            tiles = Tiles(num_rows);
            steps = steps_of(inner);
            words.resize(std::max<size_t>(words.size(), num_rows * steps));
            for (long tile = 0; tile < tiles.tiles; ++tile) {
                const int height = tiles.height(tile);
                const bf16* from = x + tiles.begin(tile) * stride;
                uint32_t* to = words.data() + tiles.begin(tile) * steps;
                for (int r = 0; r < height; ++r, from += stride) to_groups(from, inner, to + r * GROUP, height * GROUP);
            }
        }
    };

    // c[r, 0:PANEL] = the product of a tile of packed rows with a panel. Meanwhile a line of `next` is asked for with
    // each group of steps.
    template <int ROWS>
    static void tile(const Rows& packed, long tile, const uint32_t* b, const uint32_t* next, float* c) {
        add_rows(std::make_integer_sequence<int, ROWS>(), packed.words_of(tile), b, packed.steps, next, c);
    }

    // Columns side by side; null ones are zeros.
    static void pack_panel(const bf16* const (&columns)[2][LANES], long inner, uint32_t* to, float*) {
        const long steps = steps_of(inner);
        std::vector<uint32_t> words(LANES * steps);
        for (int side = 0; side < 2; ++side) {
            const uint32_t* rows[LANES] = {};
            for (int lane = 0; lane < LANES; ++lane) {
                if (!columns[side][lane]) continue;
                uint32_t* row = words.data() + lane * steps;
                to_groups(columns[side][lane], inner, row, GROUP);
                rows[lane] = row;
            }
            transpose_words(rows, LANES, steps, to + side * LANES, PANEL);
        }
    }

  private:
    // Writes x, GROUP pairs at a time: `stride` words from one group to the next, zeros behind the last.
    static void to_groups(const bf16* x, long count, uint32_t* to, long stride) {
        for (long i = 0; i < count; i += PIECE, to += 4 * stride) {
            store_groups(to, stride, piece_of(x + i, count - i), count - i);
        }
    }

    template <int... R>
    static inline void add_rows(
        std::integer_sequence<int, R...> rows,
        const uint32_t* a,
        const uint32_t* b,
        long steps,
        const uint32_t* next,
        float* c) {
        Floats left_total[sizeof...(R)] = {}, right_total[sizeof...(R)] = {};
        add_steps<AddBfloats>(rows, left_total, right_total, a, b, steps, next);
        ((store(c + R * PANEL, left_total[R]), store(c + R * PANEL + LANES, right_total[R])), ...);
    }
};

}  // namespace
}  // namespace quail

#endif
