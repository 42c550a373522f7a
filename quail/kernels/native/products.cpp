// Products of bfloat16 rows with packed weights, by 16-bit integers.
//
// Processors with AVX-512 VNNI multiply pairs of 16-bit integers and add them up in 32 bits at twice the rate of
// float32 (on many of them bfloat16 products run at half of it). So both sides are brought to fixed point: each
// column of the weights by its largest element to 13 bits and a sign, each 192 neighbours of a row by theirs to 13
// bits and a sign. That is finer than bfloat16, whose elements have 8 bits. The sum of 192 products is exact: a
// column whose elements are so large throughout that it could pass 2^31 gets fewer bits. Sums of 192 are added up in
// float32. Every row is computed alone: its result does not depend on the rows around it.

#include "products.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "tile.h"

using namespace quail;

extern "C" {

int64_t quail_panel_columns() { return PANEL; }

int64_t quail_inner_multiple() { return 2 * GROUP; }

#if !defined(__AVX512VNNI__)

int32_t quail_has_products() { return 0; }
void quail_pack(const QuailPack*) {}
void quail_product(const QuailProduct*) {}

#else

int32_t quail_has_products() { return 1; }

#endif

}  // extern "C"

#if !defined(__AVX512VNNI__)

void quail::product_of_rows(const QuailProduct&, long, long) {}

#else

namespace {

constexpr int RUN = 192;  // neighbours of a row that share a scale
constexpr int RUN_STEPS = RUN / 2;
constexpr int LINE_WORDS = 16;  // of a line of the caches
constexpr float MOST_OF_X = 8191, MOST_OF_WEIGHTS = 8191;
constexpr float MOST_OF_A_RUN = INT32_MAX / 8191 - RUN;  // magnitudes of weights added up; RUN is for their rounding
constexpr float LEAST = 1e-30f;                          // less counts as zero
constexpr long BLOCK_BYTES = 768 << 10;  // packed rows of a block: they stay in the second-level cache

enum Ending { STORE = 0, ADD = 1, GATE = 2 };

// Pairs of an inner dimension, up to whole groups.
constexpr long steps_of(long inner) { return (inner + 2 * GROUP - 1) / (2 * GROUP) * GROUP; }

// The largest magnitude of `count` elements; NaN if one of them is not finite. Magnitudes of bfloat16 are in the
// order of their bits.
float magnitude(const bf16* x, long count) {
    constexpr int WIDTH = 2 * LANES;
    __m512i most = _mm512_setzero_si512();
    const __m512i unsigned_bits = _mm512_set1_epi16(0x7fff);
    long i = 0;
    for (; i + WIDTH <= count; i += WIDTH) {
        most = _mm512_max_epu16(most, _mm512_and_si512(_mm512_loadu_si512(x + i), unsigned_bits));
    }
    if (i < count) {
        const __m512i rest = _mm512_maskz_loadu_epi16((1u << (count - i)) - 1, x + i);
        most = _mm512_max_epu16(most, _mm512_and_si512(rest, unsigned_bits));
    }
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(most), _mm512_extracti64x4_epi64(most, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i all_bits = _mm_set1_epi16(-1);  // the least of the complements is the complement of the largest
    const int least = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, all_bits)), 0);
    const uint16_t found = uint16_t(~least);
    return found >= 0x7f80 ? NAN : widen(bf16{found});
}

// Writes round(x * factor) as 16-bit integers, GROUP pairs at a time: `stride` words from one group to the next, zeros
// behind the last.
void to_integers(const bf16* x, long count, float factor, uint32_t* to, long stride) {
    static_assert(GROUP == 4, "a quarter of a register");
    constexpr int WIDTH = 2 * LANES;
    const __m512 factors = _mm512_set1_ps(factor);
    const auto whole = [&](__m512i elements) { return _mm512_cvtps_epi32(_mm512_castsi512_ps(elements) * factors); };
    for (long i = 0; i < count; i += WIDTH, to += 4 * stride) {
        const long rest = count - i;
        const __m512i elements =
            _mm512_maskz_loadu_epi16(rest < WIDTH ? (1u << rest) - 1 : ~0u, x + i);
        // Widened and narrowed within quarters of the register, so that elements keep their order.
        const __m512i integers = _mm512_packs_epi32(
            whole(_mm512_unpacklo_epi16(__m512i{}, elements)), whole(_mm512_unpackhi_epi16(__m512i{}, elements)));
        const auto put_group = [&](int number, __m128i group) {
            if (rest > 8 * number) _mm_storeu_si128(reinterpret_cast<__m128i*>(to + number * stride), group);
        };
        put_group(0, _mm512_castsi512_si128(integers));
        put_group(1, _mm512_extracti32x4_epi32(integers, 1));
        put_group(2, _mm512_extracti32x4_epi32(integers, 2));
        put_group(3, _mm512_extracti32x4_epi32(integers, 3));
    }
}

struct Scale {
    float of_integers, of_elements;  // element = integer * of_integers; integer = element * of_elements
};

Scale scale_of(float most, float limit) {
    if (most != most) return {NAN, 0};
    if (most < LEAST) return {0, 0};
    return {most / limit, limit / most};
}

// What brings a column of weights to fixed point, so that no sum over a run passes 2^31.
Scale scale_of_column(const bf16* weights, long inner) {
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

// Adds the products of a pair of a row's integers, at `pair`, with those of a panel's columns. Two rows of three read
// the pair as part of each multiplication, which saves an instruction; the third reads it once for both, as the
// processor reads no more than two operands while it multiplies two.
template <int ROW>
inline void add_pair(Ints& left_total, Ints& right_total, __m512i left, __m512i right, const uint32_t* pair) {
    if constexpr (ROW % 3) {
        asm("vpdpwssd %2%{1to16%}, %3, %0\n\tvpdpwssd %2%{1to16%}, %4, %1"
            : "+v"(left_total), "+v"(right_total)
            : "m"(*pair), "v"(left), "v"(right));
    } else {
        __m512i each;
        asm("vpbroadcastd %3, %2\n\tvpdpwssd %4, %2, %0\n\tvpdpwssd %5, %2, %1"
            : "+v"(left_total), "+v"(right_total), "=&v"(each)
            : "m"(*pair), "v"(left), "v"(right));
    }
}

// The product of a run of packed rows R... with a panel, but for the panel's scales: it begins c[r, 0:PANEL], or is
// added. Written without loops over rows, so that all sums stay in registers.
template <bool BEGINS, int... R>
inline void add_run(
    std::integer_sequence<int, R...>,
    const uint32_t* a,
    const float* a_scales,
    const uint32_t* b,
    long steps,
    const uint32_t* next,
    float* c) {
    constexpr int ROWS = sizeof...(R);
    Ints left_total[ROWS] = {}, right_total[ROWS] = {};
    for (long k = 0; k < steps; k += GROUP, a += ROWS * GROUP, b += GROUP * PANEL, next += LINE_WORDS) {
        __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 4
        for (int i = 0; i < GROUP; ++i) {
            const __m512i left = _mm512_loadu_si512(b + i * PANEL);
            const __m512i right = _mm512_loadu_si512(b + i * PANEL + LANES);
            (add_pair<R>(left_total[R], right_total[R], left, right, a + R * GROUP + i), ...);
        }
    }
    asm volatile("" ::: "memory");  // else compilers keep c, too, in registers across runs, and spill all of them
    const auto add = [](float* to, Ints total, float scale) {
        const Floats found = __builtin_convertvector(total, Floats) * scale;
        store(to, BEGINS ? found : load(to) + found);
    };
    ((add(c + R * PANEL, left_total[R], a_scales[R]), add(c + R * PANEL + LANES, right_total[R], a_scales[R])), ...);
}

using IntegerTile = void (*)(const uint32_t*, const float*, const uint32_t*, long, const uint32_t*, float*);

// c[r, 0:PANEL] = the product of ROWS packed rows with a panel, but for the panel's scales. Meanwhile a line of `next`
// is asked for with each group of steps.
template <int ROWS>
void tile_of_integers(
    const uint32_t* a, const float* a_scales, const uint32_t* b, long steps, const uint32_t* next, float* c) {
    constexpr auto rows = std::make_integer_sequence<int, ROWS>();
    add_run<true>(rows, a, a_scales, b, std::min<long>(steps, RUN_STEPS), next, c);
    for (long done = RUN_STEPS; done < steps; done += RUN_STEPS) {
        const long more = std::min<long>(steps - done, RUN_STEPS);
        a_scales += ROWS;
        add_run<false>(rows, a + done * ROWS, a_scales, b + done * PANEL, more, next + done / GROUP * LINE_WORDS, c);
    }
}

template <int... HEIGHT_LESS_1>
IntegerTile integer_tile(int rows, std::integer_sequence<int, HEIGHT_LESS_1...>) {
    static constexpr IntegerTile tiles[] = {tile_of_integers<HEIGHT_LESS_1 + 1>...};
    return tiles[rows - 1];
}

// Rows of x in fixed point: tile by tile, run by run, and of those a group of each row after the other.
class PackedRows {
    std::vector<uint32_t> words;
    std::vector<float> scales;

  public:
    long rows, tiles, steps, runs;

    long begin(long tile) const { return rows * tile / tiles; }
    int height(long tile) const { return int(begin(tile + 1) - begin(tile)); }
    const uint32_t* words_of(long tile) const { return words.data() + begin(tile) * runs * RUN_STEPS; }
    const float* scales_of(long tile) const { return scales.data() + begin(tile) * runs; }

    void pack(const bf16* x, long stride, long num_rows, long inner) {
        rows = num_rows;
        tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        steps = steps_of(inner);
        runs = (inner + RUN - 1) / RUN;
        words.resize(std::max<size_t>(words.size(), rows * runs * RUN_STEPS));
        scales.resize(std::max<size_t>(scales.size(), rows * runs));
        for (long tile = 0; tile < tiles; ++tile) {
            const int height = this->height(tile);
            float* scale_of_row = scales.data() + begin(tile) * runs;
            uint32_t* to = words.data() + begin(tile) * runs * RUN_STEPS;
            for (long first = 0; first < inner; first += RUN, to += height * (RUN_STEPS - GROUP)) {
                const long count = std::min<long>(RUN, inner - first);
                const bf16* from = x + begin(tile) * stride + first;
                for (int r = 0; r < height; ++r, from += stride, to += GROUP) {
                    for (long i = 0; i < count; i += 2 * LINE_WORDS) {
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

// Asks for the lines that `finish` will add to: they come while the tile is computed.
void expect_additions(const QuailProduct& job, long row, int rows, long panel) {
    const float* out = static_cast<const float*>(job.out) + row * job.out_stride + panel * PANEL;
    for (int r = 0; r < rows; ++r, out += job.out_stride) {
        __builtin_prefetch(out, 1);
        __builtin_prefetch(out + LANES, 1);
    }
}

// Brings a tile of sums to the results' scale, adds the bias, and stores, adds or gates them.
template <int ENDING>
void finish(const QuailProduct& job, const float* found, long row, int rows, long panel) {
    constexpr long WIDTH = ENDING == GATE ? LANES : PANEL;
    const long first = panel * WIDTH, width = std::min(WIDTH, job.columns - first);
    const Floats left_scale = load(job.scales + panel * PANEL);
    const Floats right_scale = load(job.scales + panel * PANEL + LANES);
    float bias[PANEL] = {};
    if (job.bias) std::copy_n(job.bias + first, width, bias);
    using Out = std::conditional_t<ENDING == ADD, float, bf16>;
    Out* out = static_cast<Out*>(job.out) + row * job.out_stride + first;
    for (int r = 0; r < rows; ++r, found += PANEL, out += job.out_stride) {
        Floats left = load(found) * left_scale, right = load(found + LANES) * right_scale;
        if constexpr (ENDING == GATE) left = silu(left) * right;
        left += load(bias);
        right += load(bias + LANES);
        Out rest[PANEL] = {};
        Out* to = out;
        if (width < WIDTH) to = std::copy_n(out, width, rest) - width;
        if constexpr (ENDING == ADD) {
            left += load(to);
            right += load(to + LANES);
        }
        store(to, left);
        if constexpr (ENDING != GATE) store(to + LANES, right);
        if (width < WIDTH) std::copy_n(rest, width, out);
    }
}

using Finish = void (*)(const QuailProduct&, const float*, long, int, long);
constexpr Finish FINISHES[] = {finish<STORE>, finish<ADD>, finish<GATE>};

long panels_of(const QuailProduct& job) {
    const long width = job.ending == GATE ? LANES : PANEL;
    return (job.columns + width - 1) / width;
}

// The part of a product that rows [first, last) and panels [first_panel, last_panel) have.
void multiply(const QuailProduct& job, long first, long last, long first_panel, long last_panel) {
    static thread_local PackedRows packed;
    packed.pack(static_cast<const bf16*>(job.x) + first * job.x_stride, job.x_stride, last - first, job.inner);
    const long panel_words = packed.steps * PANEL;
    constexpr int PARTS = GROUP * PANEL / LINE_WORDS;  // of the next panel: a tile asks for one
    alignas(64) float found[TILE_ROWS * PANEL];
    for (long panel = first_panel; panel < last_panel; ++panel) {
        const uint32_t* weights = static_cast<const uint32_t*>(job.packed) + panel * panel_words;
        for (long tile = 0; tile < packed.tiles; ++tile) {
            const int height = packed.height(tile);
            const long row = first + packed.begin(tile);
            const bool expects = tile < PARTS && panel + 1 < last_panel;
            const uint32_t* next = expects ? weights + panel_words + tile * (panel_words / PARTS) : weights;
            if (job.ending == ADD) expect_additions(job, row, height, panel);
            integer_tile(height, std::make_integer_sequence<int, TILE_ROWS>())(
                packed.words_of(tile), packed.scales_of(tile), weights, packed.steps, next, found);
            FINISHES[job.ending](job, found, row, height, panel);
        }
    }
}

// How a product is cut into tasks: blocks of rows, and of panels where the rows alone are too few.
struct Cut {
    long row_blocks, column_blocks = 1;

    Cut(const QuailProduct& job, long panels) {
        const long fitting = std::max<long>(TILE_ROWS, BLOCK_BYTES / (2 * job.inner));
        const long wanted = 2 * job.threads;
        row_blocks = (job.rows + fitting - 1) / fitting;
        if (job.threads == 1) return;
        if (job.rows >= wanted * LEAST_ROWS) row_blocks = (row_blocks + wanted - 1) / wanted * wanted;
        if (row_blocks < wanted) column_blocks = std::min(panels, (wanted + row_blocks - 1) / row_blocks);
    }
};

}  // namespace

extern "C" {

void quail_pack(const QuailPack* job) {
    const long inner = job->inner, steps = steps_of(inner);
    long columns = 0;
    for (long part = 0; part < job->num_parts; ++part) columns += job->part_rows[part];
    const auto column = [&](long index) -> const bf16* {
        for (long part = 0; part < job->num_parts; ++part) {
            if (index < job->part_rows[part]) return static_cast<const bf16*>(job->parts[part]) + index * inner;
            index -= job->part_rows[part];
        }
        return nullptr;
    };
    const long half = columns / 2;
    const long panels = job->gated ? (half + LANES - 1) / LANES : (columns + PANEL - 1) / PANEL;
    parallel(job->threads, panels, [&](long panel) {
        uint32_t* to = static_cast<uint32_t*>(job->packed) + panel * steps * PANEL;
        std::vector<uint32_t> integers(LANES * steps);
        for (int side = 0; side < 2; ++side) {
            const uint32_t* picked[LANES];
            for (int lane = 0; lane < LANES; ++lane) {
                const long place = job->gated ? panel * LANES + lane : panel * PANEL + side * LANES + lane;
                const bool there = place < (job->gated ? half : columns);
                float& kept = job->scales[panel * PANEL + side * LANES + lane];
                picked[lane] = nullptr;
                kept = 0;
                if (!there) continue;
                const bf16* weights = column(job->gated && side ? half + place : place);
                const Scale scale = scale_of_column(weights, inner);
                uint32_t* row = integers.data() + lane * steps;
                to_integers(weights, inner, scale.of_elements, row, GROUP);
                picked[lane] = row;
                kept = scale.of_integers;
            }
            transpose_words(picked, LANES, steps, to + side * LANES, PANEL);
        }
    });
}

void quail_product(const QuailProduct* job) {
    if (job->rows == 0) return;
    const long panels = panels_of(*job);
    const Cut cut(*job, panels);
    parallel(job->threads, cut.row_blocks * cut.column_blocks, [&](long task) {
        const long block = task / cut.column_blocks, part = task % cut.column_blocks;
        multiply(
            *job,
            job->rows * block / cut.row_blocks,
            job->rows * (block + 1) / cut.row_blocks,
            panels * part / cut.column_blocks,
            panels * (part + 1) / cut.column_blocks);
    });
}

}  // extern "C"

void quail::product_of_rows(const QuailProduct& job, long first, long last) {
    multiply(job, first, last, 0, panels_of(job));
}

#endif
