// Products of bfloat16 rows with packed weights, by 16-bit integers.
//
// Processors with AVX-512 VNNI multiply pairs of 16-bit integers and add them up in 32 bits at twice the rate of
// float32 (on many of them bfloat16 products run at half of it). So both sides are brought to fixed point: each
// column of the weights by its largest element to 13 bits and a sign, each 64 neighbours of a row by theirs to 12
// bits and a sign. That is finer than bfloat16, whose elements have 8 bits. The sum of 64 products is exact, since
// 64 * 4095 * 8191 < 2^31; sums of 64 are added up in float32. Every row is computed alone: its result does not
// depend on the rows around it.

#include "products.h"

#include <cmath>
#include <vector>

#include "parallel.h"
#include "tile.h"

using namespace quail;

extern "C" {

int64_t quail_panel_columns() { return PANEL; }

#if !defined(__AVX512VNNI__)

int32_t quail_has_products() { return 0; }
void quail_pack(const QuailPack*) {}
void quail_product(const QuailProduct*) {}

#else

int32_t quail_has_products() { return 1; }

#endif

}  // extern "C"

#if defined(__AVX512VNNI__)

namespace {

constexpr int RUN = 64;                       // neighbours of a row that share a scale
constexpr int RUN_STEPS = RUN / 2;
constexpr float MOST_OF_X = 4095, MOST_OF_WEIGHTS = 8191;
constexpr float LEAST = 1e-30f;               // less counts as zero
constexpr long BLOCK_BYTES = 768 << 10;       // packed rows of a block: they stay in the second-level cache
constexpr long LEAST_ROWS = 4 * TILE_ROWS;    // of a block, where rows are divided among threads

enum Ending { STORE = 0, ADD = 1, GATE = 2 };

// The largest magnitude of `count` elements; NaN if one of them is not finite.
float magnitude(const bf16* x, long count) {
    Ints most = {};
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Ints each = (Ints)load(x + i) & 0x7fffffff;
        most = each > most ? each : most;
    }
    int32_t found = _mm512_reduce_max_epi32((__m512i)most);
    for (; i < count; ++i) found = std::max(found, int32_t(x[i].bits & 0x7fff) << 16);
    if (found >= 0x7f800000) return NAN;
    float value;
    std::memcpy(&value, &found, 4);
    return value;
}

// Writes round(x * factor) as 16-bit integers; at an odd end, a zero behind the last.
void to_integers(const bf16* x, long count, float factor, int16_t* to) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const __m512i whole = _mm512_cvtps_epi32((__m512)(load(x + i) * factor));
        _mm256_storeu_si256((__m256i*)(to + i), _mm512_cvtepi32_epi16(whole));
    }
    for (; i < count; ++i) to[i] = int16_t(std::lrintf(widen(x[i]) * factor));
    if (count % 2) to[count] = 0;
}

struct Scale {
    float of_integers, of_elements;  // element = integer * of_integers; integer = element * of_elements
};

Scale scale_of(float most, float limit) {
    if (most != most) return {NAN, 0};
    if (most < LEAST) return {0, 0};
    return {most / limit, limit / most};
}

// c[r, 0:PANEL] = the product of packed rows R... with a panel, but for the panel's scales. Written without loops
// over rows, so that all sums stay in registers.
template <int... R>
void tile_of_integers(
    std::integer_sequence<int, R...>,
    const uint32_t* a,
    const float* a_scales,
    const uint32_t* b,
    long steps,
    float* c) {
    constexpr int ROWS = sizeof...(R);
    for (int i = 0; i < ROWS * PANEL; i += LANES) store(c + i, Floats{});
    for (long first = 0; first < steps; first += RUN_STEPS, a_scales += ROWS) {
        const long last = std::min(steps, first + RUN_STEPS);
        Ints left_total[ROWS] = {}, right_total[ROWS] = {};
        for (long k = first; k < last; ++k) {
            const __m512i left = _mm512_loadu_si512(b + k * PANEL);
            const __m512i right = _mm512_loadu_si512(b + k * PANEL + LANES);
            __m512i each;
            ((each = _mm512_set1_epi32(int32_t(a[k * ROWS + R])),
              left_total[R] = (Ints)_mm512_dpwssd_epi32((__m512i)left_total[R], each, left),
              right_total[R] = (Ints)_mm512_dpwssd_epi32((__m512i)right_total[R], each, right)),
             ...);
        }
        asm volatile("" ::: "memory");  // else compilers keep c, too, in registers across runs, and spill all of them
        const auto add = [](float* to, Ints total, float scale) {
            store(to, load(to) + __builtin_convertvector(total, Floats) * scale);
        };
        ((add(c + R * PANEL, left_total[R], a_scales[R]),
          add(c + R * PANEL + LANES, right_total[R], a_scales[R])),
         ...);
    }
}

using IntegerTile = void (*)(const uint32_t*, const float*, const uint32_t*, long, float*);

template <int ROWS>
void tile_of_height(const uint32_t* a, const float* a_scales, const uint32_t* b, long steps, float* c) {
    tile_of_integers(std::make_integer_sequence<int, ROWS>(), a, a_scales, b, steps, c);
}

template <int... HEIGHT_LESS_1>
IntegerTile integer_tile(int rows, std::integer_sequence<int, HEIGHT_LESS_1...>) {
    static constexpr IntegerTile tiles[] = {tile_of_height<HEIGHT_LESS_1 + 1>...};
    return tiles[rows - 1];
}

// Rows of x in fixed point, tile by tile, step by step.
class PackedRows {
    std::vector<uint32_t> words;
    std::vector<float> scales;
    std::vector<int16_t> integers;

  public:
    long rows, tiles, steps, runs;

    long begin(long tile) const { return rows * tile / tiles; }
    int height(long tile) const { return int(begin(tile + 1) - begin(tile)); }
    const uint32_t* words_of(long tile) const { return words.data() + begin(tile) * steps; }
    const float* scales_of(long tile) const { return scales.data() + begin(tile) * runs; }

    void pack(const bf16* x, long stride, long num_rows, long inner) {
        rows = num_rows;
        tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
        steps = (inner + 1) / 2;
        runs = (inner + RUN - 1) / RUN;
        words.resize(std::max<size_t>(words.size(), rows * steps + LANES));
        scales.resize(std::max<size_t>(scales.size(), rows * runs));
        integers.resize(std::max<size_t>(integers.size(), TILE_ROWS * 2 * steps));
        for (long tile = 0; tile < tiles; ++tile) {
            const uint32_t* picked[LANES];
            for (int r = 0; r < height(tile); ++r) {
                const bf16* row = x + (begin(tile) + r) * stride;
                int16_t* to = integers.data() + r * 2 * steps;
                for (long run = 0; run < runs; ++run) {
                    const long first = run * RUN, count = std::min<long>(RUN, inner - first);
                    const Scale scale = scale_of(magnitude(row + first, count), MOST_OF_X);
                    to_integers(row + first, count, scale.of_elements, to + first);
                    scales[begin(tile) * runs + run * height(tile) + r] = scale.of_integers;
                }
                picked[r] = reinterpret_cast<const uint32_t*>(to);
            }
            transpose_words(picked, height(tile), steps, words.data() + begin(tile) * steps, height(tile));
        }
    }
};

void finish(const QuailProduct& job, const float* found, long row, int rows, long panel) {
    const bool gate = job.ending == GATE;
    const long first = panel * (gate ? LANES : PANEL);
    const long width = std::min<long>(gate ? LANES : PANEL, job.columns - first);
    const float* scales = job.scales + panel * PANEL;
    for (int r = 0; r < rows; ++r, found += PANEL) {
        const long place = (row + r) * job.out_stride + first;
        float line[PANEL];
        const Floats left = load(found) * load(scales), right = load(found + LANES) * load(scales + LANES);
        store(line, gate ? silu(left) * right : left);
        if (!gate) store(line + LANES, right);
        if (job.bias) {
            for (long i = 0; i < width; ++i) line[i] += job.bias[first + i];
        }
        long i = 0;
        if (job.ending == ADD) {
            float* out = static_cast<float*>(job.out) + place;
            for (; i + LANES <= width; i += LANES) store(out + i, load(out + i) + load(line + i));
            for (; i < width; ++i) out[i] += line[i];
        } else {
            bf16* out = static_cast<bf16*>(job.out) + place;
            for (; i + LANES <= width; i += LANES) store(out + i, load(line + i));
            for (; i < width; ++i) put(out + i, line[i]);
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
    const long inner = job->inner, steps = (inner + 1) / 2;
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
        std::vector<int16_t> integers(LANES * 2 * steps);
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
                const Scale scale = scale_of(magnitude(weights, inner), MOST_OF_WEIGHTS);
                int16_t* row = integers.data() + lane * 2 * steps;
                to_integers(weights, inner, scale.of_elements, row);
                picked[lane] = reinterpret_cast<const uint32_t*>(row);
                kept = scale.of_integers;
            }
            transpose_words(picked, LANES, steps, to + side * LANES, PANEL);
        }
    });
}

void quail_product(const QuailProduct* job) {
    const long steps = (job->inner + 1) / 2;
    const long width = job->ending == GATE ? LANES : PANEL;
    const long panels = (job->columns + width - 1) / width;
    const Cut cut(*job, panels);
    parallel(job->threads, cut.row_blocks * cut.column_blocks, [&](long task) {
        const long block = task / cut.column_blocks, part = task % cut.column_blocks;
        const long first = job->rows * block / cut.row_blocks, last = job->rows * (block + 1) / cut.row_blocks;
        static thread_local PackedRows packed;
        packed.pack(static_cast<const bf16*>(job->x) + first * job->x_stride, job->x_stride, last - first, job->inner);
        alignas(64) float found[TILE_ROWS * PANEL];
        const long last_panel = panels * (part + 1) / cut.column_blocks;
        for (long panel = panels * part / cut.column_blocks; panel < last_panel; ++panel) {
            const uint32_t* weights = static_cast<const uint32_t*>(job->packed) + panel * steps * PANEL;
            for (long tile = 0; tile < packed.tiles; ++tile) {
                const int height = packed.height(tile);
                integer_tile(height, std::make_integer_sequence<int, TILE_ROWS>())(
                    packed.words_of(tile), packed.scales_of(tile), weights, steps, found);
                finish(*job, found, first + packed.begin(tile), height, panel);
            }
        }
    });
}

}  // extern "C"

#endif  // __AVX512VNNI__
