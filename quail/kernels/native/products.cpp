// Products of bfloat16 rows with packed weights.
//
// Processors with AVX-512 VNNI multiply pairs of 16-bit integers and add them up in 32 bits at twice the rate of
// float32, and fours of 8-bit integers at four times that rate. Some do pairs of bfloat16 at twice the rate, too; where
// they take longer, both sides are brought to fixed point. `bfloat16.h`, `int16.h` and `int8.h` say how. Every row is
// computed alone: its result does not depend on the rows around it.

#include "products.h"

#include <cmath>
#include <type_traits>
#include <vector>

#include "parallel.h"
#include "tile.h"

using namespace quail;

extern "C" {

int64_t quail_panel_columns() { return PANEL; }

#if !defined(__AVX512VNNI__)

int32_t quail_has_format(int32_t) { return 0; }
int32_t quail_fastest_format() { return INT16; }
int64_t quail_panel_words(int64_t, int32_t) { return 0; }
void quail_pack(const QuailPack*) {}
void quail_product(const QuailProduct*) {}

#endif

}  // extern "C"

#if !defined(__AVX512VNNI__)

void quail::product_of_rows(const QuailProduct&, long, long) {}

#else

#include "bfloat16.h"
#include "int16.h"
#include "int8.h"

namespace {

constexpr long BLOCK_BYTES = 768 << 10;  // packed rows of a block: they stay in the second-level cache

enum Ending { STORE = 0, ADD = 1, GATE = 2 };

// Asks for the lines that `finish` will add to: they come while the tile is computed.
void expect_additions(const QuailProduct& job, long row, int rows, long panel) {
    const float* out = static_cast<const float*>(job.out) + row * job.out_stride + panel * PANEL;
    for (int r = 0; r < rows; ++r, out += job.out_stride) {
        __builtin_prefetch(out, 1);
        __builtin_prefetch(out + LANES, 1);
    }
}

// What sums are multiples of: some formats leave it to the end for columns, some for rows.
struct Scales {
    const float* of_columns;  // of the panel, or null
    const float* of_rows;     // of the tile, or null
};

// Brings a tile of sums to the results' scale, adds the bias, and stores, adds or gates them.
template <int ENDING>
void finish(const QuailProduct& job, const float* found, Scales scales, long row, int rows, long panel) {
    constexpr long WIDTH = ENDING == GATE ? LANES : PANEL;
    const long first = panel * WIDTH, width = std::min(WIDTH, job.columns - first);
    Floats left_scale = splat(1), right_scale = left_scale;
    if (scales.of_columns) {
        left_scale = load(scales.of_columns);
        right_scale = load(scales.of_columns + LANES);
    }
    float bias[PANEL] = {};
    if (job.bias) std::copy_n(job.bias + first, width, bias);
    using Out = std::conditional_t<ENDING == ADD, float, bf16>;
    Out* out = static_cast<Out*>(job.out) + row * job.out_stride + first;
    for (int r = 0; r < rows; ++r, found += PANEL, out += job.out_stride) {
        if (scales.of_rows) left_scale = right_scale = splat(scales.of_rows[r]);
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

using Finish = void (*)(const QuailProduct&, const float*, Scales, long, int, long);
constexpr Finish FINISHES[] = {finish<STORE>, finish<ADD>, finish<GATE>};

long panels_of(const QuailProduct& job) {
    const long width = job.ending == GATE ? LANES : PANEL;
    return (job.columns + width - 1) / width;
}

// The part of a product that rows [first, last) and panels [first_panel, last_panel) have.
template <class Format>
void multiply(const QuailProduct& job, long first, long last, long first_panel, long last_panel) {
    static thread_local typename Format::Rows packed;
    packed.pack(static_cast<const bf16*>(job.x) + first * job.x_stride, job.x_stride, last - first, job.inner);
    const Tiles& tiles = packed.tiles;
    const long panel_words = Format::words_of_a_panel(job.inner);
    alignas(64) float found[TILE_ROWS * PANEL];
    for (long panel = first_panel; panel < last_panel; ++panel) {
        const uint32_t* weights = static_cast<const uint32_t*>(job.packed) + panel * panel_words;
        for (long tile = 0; tile < tiles.tiles; ++tile) {
            const int height = tiles.height(tile);
            const long row = first + tiles.begin(tile);
            const bool expects = tile < Format::PARTS && panel + 1 < last_panel;
            const uint32_t* next = expects ? weights + panel_words + tile * (panel_words / Format::PARTS) : weights;
            if (job.ending == ADD) expect_additions(job, row, height, panel);
            tile_of<Format>(height, std::make_integer_sequence<int, TILE_ROWS>())(packed, tile, weights, next, found);
            const Scales scales{job.scales ? job.scales + panel * PANEL : nullptr, packed.scales_of_rows(tile)};
            FINISHES[job.ending](job, found, scales, row, height, panel);
        }
    }
}

// The functions of a format; null where this build lacks it.
struct Functions {
    void (*product)(const QuailProduct&, long first, long last, long first_panel, long last_panel);
    void (*pack_panel)(const bf16* const (&columns)[2][LANES], long inner, uint32_t* to, float* scales);
    long (*words_of_a_panel)(long inner);
    long element_bytes;
};

template <class Format>
constexpr Functions functions() {
    return {multiply<Format>, Format::pack_panel, Format::words_of_a_panel, Format::ELEMENT_BYTES};
}

const Functions& functions_of(int format) {
    static_assert(BFLOAT16 == 0 && INT16 == 1 && INT8 == 2, "they are in this order");
    static constexpr Functions found[] = {
#if defined(__AVX512BF16__)
        functions<Bfloat16>(),
#else
        {},
#endif
        functions<Int16>(),
        functions<Int8>()};
    return found[format];
}

// How a product is cut into tasks: blocks of rows, and of panels where the rows alone are too few.
struct Cut {
    long row_blocks, column_blocks = 1;

    Cut(const QuailProduct& job, long panels) {
        const long row_bytes = functions_of(job.format).element_bytes * job.inner;
        const long fitting = std::max<long>(TILE_ROWS, BLOCK_BYTES / row_bytes);
        const long wanted = 2 * job.threads;
        row_blocks = (job.rows + fitting - 1) / fitting;
        if (job.threads == 1) return;
        if (job.rows >= wanted * LEAST_ROWS) row_blocks = (row_blocks + wanted - 1) / wanted * wanted;
        if (row_blocks < wanted) column_blocks = std::min(panels, (wanted + row_blocks - 1) / row_blocks);
    }
};

}  // namespace

extern "C" {

int32_t quail_has_format(int32_t format) { return functions_of(format).product != nullptr; }
int32_t quail_fastest_format() { return FAST_PAIRS ? BFLOAT16 : INT16; }
int64_t quail_panel_words(int64_t inner, int32_t format) { return functions_of(format).words_of_a_panel(inner); }

void quail_pack(const QuailPack* job) {
    const long inner = job->inner;
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
    const Functions& functions = functions_of(job->format);
    const long panel_words = functions.words_of_a_panel(inner);
    parallel(job->threads, panels, [&](long panel) {
        const bf16* picked[2][LANES];
        for (int side = 0; side < 2; ++side) {
            for (int lane = 0; lane < LANES; ++lane) {
                const long place = job->gated ? panel * LANES + lane : panel * PANEL + side * LANES + lane;
                const bool there = place < (job->gated ? half : columns);
                picked[side][lane] = there ? column(job->gated && side ? half + place : place) : nullptr;
            }
        }
        uint32_t* to = static_cast<uint32_t*>(job->packed) + panel * panel_words;
        functions.pack_panel(picked, inner, to, job->scales ? job->scales + panel * PANEL : nullptr);
    });
}

void quail_product(const QuailProduct* job) {
    if (job->rows == 0) return;
    const long panels = panels_of(*job);
    const Cut cut(*job, panels);
    parallel(job->threads, cut.row_blocks * cut.column_blocks, [&](long task) {
        const long block = task / cut.column_blocks, part = task % cut.column_blocks;
        functions_of(job->format).product(
            *job,
            job->rows * block / cut.row_blocks,
            job->rows * (block + 1) / cut.row_blocks,
            panels * part / cut.column_blocks,
            panels * (part + 1) / cut.column_blocks);
    });
}

}  // extern "C"

void quail::product_of_rows(const QuailProduct& job, long first, long last) {
    functions_of(job.format).product(job, first, last, 0, panels_of(job));
}

#endif
