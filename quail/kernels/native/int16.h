// 16-bit integers: each column of weights is brought to fixed point by its largest element to 13 bits and a sign, each
// 192 neighbours of a row by theirs to 13 bits and a sign. That is finer than bfloat16, whose elements have 8 bits. The
// sum of 192 products is exact: a column whose elements are so large throughout that it could pass 2^31 gets fewer
// bits. Sums of 192 are added up in float32.
#pragma once

#include "integers.h"

namespace quail {
namespace {  // what several builds in a process must not share

struct Int16 : TwoBytes {
    static constexpr int RUN = 192;  // neighbours of a row that share a scale
    static constexpr int RUN_STEPS = RUN / 2;
    static constexpr float MOST_OF_X = 8191, MOST_OF_WEIGHTS = 8191;
    static constexpr float MOST_OF_A_RUN = INT32_MAX / 8191 - RUN;  // magnitudes of weights; RUN is for their rounding

    // Rows in fixed point: tile by tile, run by run, and of those a group of each row after the other.
    class Rows {
        std::vector<uint32_t> words;
        std::vector<float> scales;

      public:
        Tiles tiles;
        long steps, runs;

        const uint32_t* words_of(long tile) const { return words.data() + tiles.begin(tile) * runs * RUN_STEPS; }
        const float* scales_of(long tile) const { return scales.data() + tiles.begin(tile) * runs; }
        const float* scales_of_rows(long) const { return nullptr; }

        void pack(const bf16* x, long stride, long num_rows, long inner) {
            tiles = Tiles(num_rows);
            steps = steps_of(inner);
            runs = (inner + RUN - 1) / RUN;
            words.resize(std::max<size_t>(words.size(), num_rows * runs * RUN_STEPS));
            scales.resize(std::max<size_t>(scales.size(), num_rows * runs));
            for (long tile = 0; tile < tiles.tiles; ++tile) {
                const int height = tiles.height(tile);
                float* scale_of_row = scales.data() + tiles.begin(tile) * runs;
                uint32_t* to = words.data() + tiles.begin(tile) * runs * RUN_STEPS;
                for (long first = 0; first < inner; first += RUN, to += height * (RUN_STEPS - GROUP)) {
                    const long count = std::min<long>(RUN, inner - first);
                    const bf16* from = x + tiles.begin(tile) * stride + first;
                    for (int r = 0; r < height; ++r, from += stride, to += GROUP) {
                        for (long i = 0; i < count; i += PIECE) {
                            __builtin_prefetch(from + height * stride + i);  // of the next tile
                        }
                        const Scale scale = scale_of(magnitude(from, count), MOST_OF_X);
                        to_integers(from, count, scale.of_elements, to, height * GROUP);
                        *scale_of_row++ = scale.of_integers;
                    }
                }
            }
        }
    };

    // c[r, 0:PANEL] = the product of a tile of packed rows with a panel, but for the panel's scales. Meanwhile a line
    // of `next` is asked for with each group of steps.
    template <int ROWS>
    static void tile(const Rows& packed, long tile, const uint32_t* b, const uint32_t* next, float* c) {
        const uint32_t* a = packed.words_of(tile);
        const float* a_scales = packed.scales_of(tile);
        constexpr auto rows = std::make_integer_sequence<int, ROWS>();
        add_run<true>(rows, a, a_scales, b, std::min<long>(packed.steps, RUN_STEPS), next, c);
        for (long done = RUN_STEPS; done < packed.steps; done += RUN_STEPS) {
            const long more = std::min<long>(packed.steps - done, RUN_STEPS);
            a_scales += ROWS;
            add_run<false>(
                rows, a + done * ROWS, a_scales, b + done * PANEL, more, next + done / GROUP * LINE_WORDS, c);
        }
    }

    // Columns side by side; null ones are zeros.
    static void pack_panel(const bf16* const (&columns)[2][LANES], long inner, uint32_t* to, float* scales) {
        const long steps = steps_of(inner);
        std::vector<uint32_t> integers(LANES * steps);
        for (int side = 0; side < 2; ++side) {
            const uint32_t* rows[LANES] = {};
            for (int lane = 0; lane < LANES; ++lane) {
                scales[side * LANES + lane] = 0;
                if (!columns[side][lane]) continue;
                const Scale scale = scale_of_column(columns[side][lane], inner);
                uint32_t* row = integers.data() + lane * steps;
                to_integers(columns[side][lane], inner, scale.of_elements, row, GROUP);
                rows[lane] = row;
                scales[side * LANES + lane] = scale.of_integers;
            }
            transpose_words(rows, LANES, steps, to + side * LANES, PANEL);
        }
    }

  private:
    // Writes round(x * factor) as 16-bit integers, GROUP pairs at a time: `stride` words from one group to the next,
    // zeros behind the last.
    static void to_integers(const bf16* x, long count, float factor, uint32_t* to, long stride) {
        const __m512 factors = _mm512_set1_ps(factor);
        for (long i = 0; i < count; i += PIECE, to += 4 * stride) {
            store_groups(to, stride, rounded(piece_of(x + i, count - i), factors), count - i);
        }
    }

    // What brings a column of weights to fixed point, so that no sum over a run passes 2^31.
    static Scale scale_of_column(const bf16* weights, long inner) {
        float most_of_a_run = 0;
        for (long first = 0; first < inner; first += RUN) {
            float total = 0;
            for (long i = first; i < std::min(inner, first + RUN); ++i) total += std::fabs(widen(weights[i]));
            most_of_a_run = std::max(most_of_a_run, total);
        }
        const float most = magnitude(weights, inner);
        const float limit = MOST_OF_A_RUN * (most / std::max(most_of_a_run, LEAST));
        return scale_of(most, std::min(MOST_OF_WEIGHTS, std::floor(limit)));
    }

    // The product of a run of rows R... with a panel, but for the panel's scales: it begins c[r, 0:PANEL], or is added.
    template <bool BEGINS, int... R>
    static inline void add_run(
        std::integer_sequence<int, R...> rows,
        const uint32_t* a,
        const float* a_scales,
        const uint32_t* b,
        long steps,
        const uint32_t* next,
        float* c) {
        Ints left_total[sizeof...(R)] = {}, right_total[sizeof...(R)] = {};
        add_steps<AddShorts>(rows, left_total, right_total, a, b, steps, next);
        const auto add = [](float* to, Ints total, float scale) {
            const Floats found = __builtin_convertvector(total, Floats) * scale;
            store(to, BEGINS ? found : load(to) + found);
        };
        ((add(c + R * PANEL, left_total[R], a_scales[R]), add(c + R * PANEL + LANES, right_total[R], a_scales[R])),
         ...);
    }
};

}  // namespace
}  // namespace quail
