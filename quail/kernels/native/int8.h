// 8-bit integers. A row has one scale, at which nearly all its elements fit into a signed byte. The few larger ones (the
// outliers, which models have in every row) have a high byte, too, kept in a list and multiplied apart. Weights are
// unsigned bytes between the least and the largest of 64 neighbours in a column. Sums of 64 products are exact and
// added up in float32.
//
// Outliers apart: arXiv:2208.07339.
#pragma once

#include "integers.h"

namespace quail {
namespace {  // what several builds in a process must not share

struct Int8 {
    static constexpr int RUN = 64;  // neighbours in a column that share a scale
    static constexpr int RUN_STEPS = RUN / 4;
    static constexpr int RUN_WORDS = RUN_STEPS * PANEL + 2 * PANEL;  // of a panel: bytes, scales, least elements
    static constexpr float LARGEST_BYTE = 127, HIGH_BYTE = 256;
    static constexpr float MEANS_OF_A_BYTE = 4;  // magnitudes up to so many times the mean of a row fit into a byte,
    static constexpr float MORE_MEANS = 1.5;     // or so many times as much, and so on, until
    static constexpr long LEAST_OF_AN_OUTLIER = 96;  // no more than one element of so many does not
    static constexpr float MOST_BYTES = 250;         // how many times what fits the largest element is, at most
    static constexpr int ELEMENT_BYTES = 1;
    static constexpr int PARTS = RUN_WORDS / (RUN_STEPS / GROUP * LINE_WORDS);  // of a panel: a tile asks for one

    static long runs_of(long inner) { return (inner + RUN - 1) / RUN; }
    static long words_of_a_panel(long inner) { return runs_of(inner) * RUN_WORDS; }

    // What exceeds a byte: it is multiplied with the weights of its run while they are near.
    struct Outlier {
        uint32_t word;  // the high byte at the place of its element in a step, zeros around it
        uint16_t step;  // of the run
        uint16_t row;   // of the tile
    };

    // Rows in bytes: tile by tile, run by run, and of those a group of each row after the other. Vectors only grow.
    class Rows {
        std::vector<uint32_t> words;
        std::vector<float> sums;    // of a run's integers: tile by tile, run by run
        std::vector<float> scales;  // of rows
        std::vector<Outlier> outliers;
        std::vector<long> ends;  // of a run's outliers, tile by tile
        long num_outliers;

      public:
        Tiles tiles;
        long runs;

        const uint32_t* words_of(long tile) const { return words.data() + tiles.begin(tile) * runs * RUN_STEPS; }
        const float* sums_of(long tile) const { return sums.data() + tiles.begin(tile) * runs; }
        const float* scales_of_rows(long tile) const { return scales.data() + tiles.begin(tile); }
        const Outlier* outliers_of(long tile) const { return outliers.data() + (tile ? ends[tile * runs - 1] : 0); }
        const Outlier* end_of_outliers(long tile, long run) const { return outliers.data() + ends[tile * runs + run]; }

        void pack(const bf16* x, long stride, long num_rows, long inner) {
            tiles = Tiles(num_rows);
            runs = runs_of(inner);
            words.resize(std::max<size_t>(words.size(), num_rows * runs * RUN_STEPS));
            sums.resize(std::max<size_t>(sums.size(), num_rows * runs));
            scales.resize(std::max<size_t>(scales.size(), num_rows));
            ends.resize(std::max<size_t>(ends.size(), tiles.tiles * runs));
            uint32_t* to = words.data();
            float* sum = sums.data();
            long* end = ends.data();
            num_outliers = 0;
            for (long tile = 0; tile < tiles.tiles; ++tile) {
                const int height = tiles.height(tile);
                const bf16* const from = x + tiles.begin(tile) * stride;
                const long most = num_outliers + height * runs * RUN + 1;  // and one that is written but not kept
                outliers.resize(std::max<size_t>(outliers.size(), most));
                float factors[TILE_ROWS];
                for (int r = 0; r < height; ++r) {
                    const bf16* row = from + r * stride;
                    for (long i = 0; i < inner; i += PIECE) __builtin_prefetch(row + height * stride + i);
                    const Scale scale = scale_of_row(row, inner);
                    scales[tiles.begin(tile) + r] = scale.of_integers;
                    factors[r] = scale.of_elements;
                }
                for (long i = 0; i < inner; i += RUN, to += height * RUN_STEPS) {
                    for (int r = 0; r < height; ++r) {
                        const bf16* run = from + r * stride + i;
                        *sum++ = pack_run(run, std::min<long>(RUN, inner - i), factors[r], r, height, to + r * GROUP);
                    }
                    *end++ = num_outliers;
                }
            }
        }

      private:
        static Scale scale_of_row(const bf16* x, long inner) {
            __m512i most = _mm512_setzero_si512();
            Floats total[2] = {};
            for (long i = 0; i < inner; i += PIECE) {
                const __m512i piece = magnitudes(x + i, inner - i);
                most = _mm512_max_epu16(most, piece);
                total[0] += (Floats)_mm512_unpacklo_epi16(__m512i{}, piece);
                total[1] += (Floats)_mm512_unpackhi_epi16(__m512i{}, piece);
            }
            const float largest = largest_of(most);
            if (!(largest >= LEAST)) return scale_of(largest, LARGEST_BYTE);
            float limit = MEANS_OF_A_BYTE * (sum(total[0] + total[1]) / inner);
            Below below = below_limit(x, inner, limit);
            while (below.num_others * LEAST_OF_AN_OUTLIER > inner) {
                below = below_limit(x, inner, limit *= MORE_MEANS);
            }
            return scale_of(std::max(below.largest, largest / MOST_BYTES), LARGEST_BYTE);
        }

        struct Below {
            float largest;    // magnitude of those that are not above a limit
            long num_others;  // that are
        };

        static Below below_limit(const bf16* x, long inner, float limit) {
            uint32_t bits;
            std::memcpy(&bits, &limit, sizeof bits);
            const __m512i limits = _mm512_set1_epi16(bits >> 16), ones = _mm512_set1_epi16(1);
            __m512i most = _mm512_setzero_si512(), num_others = most;  // a lane counts up to 2^15, a row to 2^20
            for (long i = 0; i < inner; i += PIECE) {
                const __m512i piece = magnitudes(x + i, inner - i);
                const __mmask32 is_above = _mm512_cmpgt_epu16_mask(piece, limits);
                most = _mm512_mask_max_epu16(most, ~is_above, most, piece);
                num_others = _mm512_mask_add_epi16(num_others, is_above, num_others, ones);
            }
            return {largest_of(most), _mm512_reduce_add_epi32(_mm512_madd_epi16(num_others, ones))};
        }

        // Returns the sum of the integers.
        float pack_run(const bf16* x, long count, float factor, int row, int height, uint32_t* to) {
            const __m512 factors = _mm512_set1_ps(factor);
            const __m512i ones = _mm512_set1_epi16(1), half = _mm512_set1_epi16(128);
            alignas(64) int16_t high_of[RUN];
            __m512i total = _mm512_setzero_si512();
            uint64_t found = 0;
            for (long i = 0; i < RUN; i += PIECE, to += 2 * GROUP * height) {
                const __m512i integers = rounded(piece_of(x + i, std::clamp<long>(count - i, 0, PIECE)), factors);
                total = _mm512_dpwssd_epi32(total, integers, ones);
                const __m256i low = _mm512_cvtepi16_epi8(integers);
                store_group(to, _mm256_castsi256_si128(low));
                store_group(to + GROUP * height, _mm256_extracti128_si256(low, 1));
                const __m512i high = _mm512_srai_epi16(_mm512_add_epi16(integers, half), 8);
                _mm512_store_si512(high_of + i, high);
                found |= uint64_t(_mm512_test_epi16_mask(high, high)) << i;
            }
            // Most runs have one outlier or none: one is written in either case, of any place where there is none. So
            // the processor need not guess which.
            do {
                const int place = __builtin_ctzll(found | 1ull << (RUN - 1));
                const uint32_t byte = uint8_t(high_of[place]);
                outliers[num_outliers] = {byte << (place % 4 * 8), uint16_t(place / 4), uint16_t(row)};
                num_outliers += found != 0;
                found &= found - 1;
            } while (found);
            return float(_mm512_reduce_add_epi32(total));
        }
    };

    // c[r, 0:PANEL] = the product of a tile of packed rows with a panel, but for the rows' scales. Meanwhile a line of
    // `next` is asked for with each group of steps.
    template <int ROWS>
    static void tile(const Rows& packed, long tile, const uint32_t* b, const uint32_t* next, float* c) {
        constexpr auto rows = std::make_integer_sequence<int, ROWS>();
        const uint32_t* a = packed.words_of(tile);
        const float* sums = packed.sums_of(tile);
        const Outlier* outlier = packed.outliers_of(tile);
        for (long run = 0; run < packed.runs; ++run) {
            run ? add_run<false>(rows, a, sums, b, next, c) : add_run<true>(rows, a, sums, b, next, c);
            const Outlier* const end = packed.end_of_outliers(tile, run);
            if (outlier != end) add_outliers(outlier, end, b, c);
            outlier = end;
            a += ROWS * RUN_STEPS;
            sums += ROWS;
            b += RUN_WORDS;
            next += RUN_STEPS / GROUP * LINE_WORDS;
        }
    }

    // Columns side by side; null ones are zeros.
    static void pack_panel(const bf16* const (&columns)[2][LANES], long inner, uint32_t* to, float*) {
        alignas(64) uint8_t bytes[LANES][RUN];
        for (long first = 0; first < inner; first += RUN, to += RUN_WORDS) {
            const long count = std::min<long>(RUN, inner - first);
            float scales[2 * PANEL] = {};
            for (int side = 0; side < 2; ++side) {
                const uint32_t* rows[LANES];
                for (int lane = 0; lane < LANES; ++lane) {
                    rows[lane] = reinterpret_cast<const uint32_t*>(bytes[lane]);
                    std::fill_n(bytes[lane], RUN, 0);
                    const bf16* column = columns[side][lane];
                    float* const scale = scales + side * LANES + lane;
                    if (column) to_bytes(column + first, count, bytes[lane], scale, scale + PANEL);
                }
                transpose_words(rows, LANES, RUN_STEPS, to + side * LANES, PANEL);
            }
            std::memcpy(to + RUN_STEPS * PANEL, scales, sizeof scales);
        }
    }

  private:
    static const float* scales_of_run(const uint32_t* words) { return reinterpret_cast<const float*>(words); }

    static void add_outliers(const Outlier* outlier, const Outlier* end, const uint32_t* run, float* c) {
        const float* scales = scales_of_run(run + RUN_STEPS * PANEL);
        const Floats left_scale = load(scales) * HIGH_BYTE, right_scale = load(scales + LANES) * HIGH_BYTE;
        for (; outlier != end; ++outlier) {
            const uint32_t* step = run + outlier->step * PANEL;
            Ints left{}, right{};
            AddBytes::itself(
                left, right, _mm512_loadu_si512(step), _mm512_loadu_si512(step + LANES), &outlier->word);
            float* to = c + outlier->row * PANEL;
            store(to, __builtin_convertvector(left, Floats) * left_scale + load(to));
            store(to + LANES, __builtin_convertvector(right, Floats) * right_scale + load(to + LANES));
        }
    }

    // Neighbours in a column, between the least and the largest of them: element = byte * scale + least.
    static void to_bytes(const bf16* weights, long count, uint8_t* to, float* scale, float* least) {
        float low = widen(weights[0]), high = low;
        for (long i = 0; i < count; ++i) {
            const float each = widen(weights[i]);
            low = each < low ? each : low;
            high = each > high ? each : high;
        }
        const Scale found = magnitude(weights, count) < INFINITY ? scale_of(high / 255 - low / 255, 1) : Scale{NAN, 0};
        *scale = found.of_integers;
        *least = low;
        for (long i = 0; i < count && found.of_elements > 0; ++i) {
            to[i] = uint8_t(std::nearbyint((widen(weights[i]) - low) * found.of_elements));
        }
    }

    // The product of a run of rows R... with a panel, but for the rows' scales: it begins c[r, 0:PANEL], or is added.
    template <bool BEGINS, int... R>
    static inline void add_run(
        std::integer_sequence<int, R...> rows,
        const uint32_t* a,
        const float* sums,
        const uint32_t* b,
        const uint32_t* next,
        float* c) {
        Ints left_total[sizeof...(R)] = {}, right_total[sizeof...(R)] = {};
        add_steps<AddBytes>(rows, left_total, right_total, a, b, RUN_STEPS, next);
        const float* of_run = scales_of_run(b + RUN_STEPS * PANEL);
        const Floats left_scale = load(of_run), right_scale = load(of_run + LANES);
        const Floats left_least = load(of_run + PANEL), right_least = load(of_run + PANEL + LANES);
        const auto add = [](float* to, Ints total, Floats scale, float sum, Floats least) {
            // Written out, so that compilers round alike for tiles of all heights.
            const __m512 sums = _mm512_set1_ps(sum);
            const __m512 before = BEGINS ? _mm512_mul_ps(sums, (__m512)least)
                                         : _mm512_fmadd_ps(sums, (__m512)least, _mm512_loadu_ps(to));
            _mm512_storeu_ps(to, _mm512_fmadd_ps(_mm512_cvtepi32_ps((__m512i)total), (__m512)scale, before));
        };
        ((add(c + R * PANEL, left_total[R], left_scale, sums[R], left_least),
          add(c + R * PANEL + LANES, right_total[R], right_scale, sums[R], right_least)),
         ...);
    }
};

}  // namespace
}  // namespace quail
