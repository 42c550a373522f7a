// The two products of attention: scores of stacked rows, and sums of values by their weights.
//
// Stacked rows are lanes. A window of them, some vectors wide, meets a block of keys whose elements are broadcast.
#pragma once

#include <algorithm>
#include <utility>

#include "tile.h"

namespace quail {
namespace {  // what several builds in a process must not share

constexpr int KEYS = 128;               // of a block of a history or of a segment
constexpr int SLICE = 64;               // dimensions of keys and values that lie side by side
constexpr int WIDEST = 3;               // vectors of a window: stacked rows that meet a block of keys together
constexpr int WINDOW = WIDEST * LANES;
#if defined(__AVX512F__)
constexpr int TALLEST[] = {16, 14, 8};  // rows of a tile by its vectors: sums, vectors and a broadcast in registers
#else
constexpr int TALLEST[] = {8, 6, 4};
#endif

// scores[key, 0:WIDE vectors] (+)= keys[key] times queries, over the dimensions of a slice, one by one or in PAIRS; keys
// are the tile's rows.
using ScoreTile = void (*)(const float*, const float*, long, long, float*, bool);

template <bool PAIRS, int HIGH, int WIDE>
void score(const float* keys, const float* queries, long stride, long steps, float* scores, bool adds) {
    Floats total[HIGH][WIDE];
#pragma GCC unroll 16
    for (int r = 0; r < HIGH; ++r) {
#pragma GCC unroll 3
        for (int w = 0; w < WIDE; ++w) {
            total[r][w] = adds ? load(scores + r * WINDOW + w * LANES) : Floats{};
        }
    }
    add_products<PAIRS ? SLICE / 2 : SLICE, 1, PAIRS>(total, keys, queries, stride, steps);
#pragma GCC unroll 16
    for (int r = 0; r < HIGH; ++r) {
#pragma GCC unroll 3
        for (int w = 0; w < WIDE; ++w) store(scores + r * WINDOW + w * LANES, total[r][w]);
    }
}

// out[dim, 0:WIDE vectors] = out * fade + values times weights, over keys, one by one or in PAIRS; dimensions are the
// tile's rows. Lanes from `lanes` on are left as they are.
using ValueTile = void (*)(const float*, const float*, long, float*, long, const float*, int);

template <bool PAIRS, int HIGH, int WIDE>
void add_values(
    const float* values, const float* weights, long steps, float* out, long stride, const float* fade, int lanes) {
    Floats total[HIGH][WIDE];
#pragma GCC unroll 16
    for (int r = 0; r < HIGH; ++r) {
#pragma GCC unroll 3
        for (int w = 0; w < WIDE; ++w) total[r][w] = load(out + r * stride + w * LANES) * load(fade + w * LANES);
    }
    add_products<1, SLICE, PAIRS>(total, values, weights, WINDOW, steps);
    const Ints last = lane_numbers() < lanes - (WIDE - 1) * LANES;
#pragma GCC unroll 16
    for (int r = 0; r < HIGH; ++r) {
        float* to = out + r * stride;
#pragma GCC unroll 2
        for (int w = 0; w < WIDE - 1; ++w) store(to + w * LANES, total[r][w]);
        to += (WIDE - 1) * LANES;
        store(to, last ? total[r][WIDE - 1] : load(to));
    }
}

template <bool PAIRS, int WIDE, int... HIGH_LESS_1>
ScoreTile score_tile(int high, std::integer_sequence<int, HIGH_LESS_1...>) {
    static constexpr ScoreTile tiles[] = {score<PAIRS, HIGH_LESS_1 + 1, WIDE>...};
    return tiles[high - 1];
}

template <bool PAIRS, int WIDE, int... HIGH_LESS_1>
ValueTile value_tile(int high, std::integer_sequence<int, HIGH_LESS_1...>) {
    static constexpr ValueTile tiles[] = {add_values<PAIRS, HIGH_LESS_1 + 1, WIDE>...};
    return tiles[high - 1];
}

template <int WIDE>
using Heights = std::make_integer_sequence<int, TALLEST[WIDE - 1]>;

template <bool PAIRS>
ScoreTile score_tile(int high, int wide) {
    if (wide == 1) return score_tile<PAIRS, 1>(high, Heights<1>());
    return wide == 2 ? score_tile<PAIRS, 2>(high, Heights<2>()) : score_tile<PAIRS, 3>(high, Heights<3>());
}

template <bool PAIRS>
ValueTile value_tile(int high, int wide) {
    if (wide == 1) return value_tile<PAIRS, 1>(high, Heights<1>());
    return wide == 2 ? value_tile<PAIRS, 2>(high, Heights<2>()) : value_tile<PAIRS, 3>(high, Heights<3>());
}

// Calls body(begin, high) for tiles of `wide` vectors that make up `rows` rows, about equally high.
template <class Body>
void for_tiles(int rows, int wide, const Body& body) {
    const int most = TALLEST[wide - 1], tiles = (rows + most - 1) / most;
    for (int tile = 0; tile < tiles; ++tile) {
        const int begin = rows * tile / tiles;
        body(begin, rows * (tile + 1) / tiles - begin);
    }
}

}  // namespace
}  // namespace quail
