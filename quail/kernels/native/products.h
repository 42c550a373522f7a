// Products of bfloat16 rows with packed weights: the C interface.
#pragma once

#include <cstdint>

extern "C" {

// What rows and weights are brought to. Each has a header of its own. A build without AVX-512 VNNI has none of them,
// one without AVX-512 BF16 has no BFLOAT16; what a build lacks must not be asked for.
enum QuailFormat { BFLOAT16 = 0, INT16 = 1, INT8 = 2 };

// One product. Strides in elements. `out` holds float32 where added to, else bfloat16.
struct QuailProduct {
    const void* x;  // (rows, inner) bfloat16
    int64_t x_stride;
    int64_t rows;
    int64_t inner;
    const void* packed;   // from quail_pack
    const float* scales;  // from quail_pack, null but for INT16
    int64_t columns;      // of out
    const float* bias;    // (columns,) or null
    void* out;            // (rows, columns)
    int64_t out_stride;
    int32_t ending;  // 0 store, 1 add, 2 silu(gate) * up
    int32_t format;  // of QuailFormat
    int32_t threads;
};

// Weights to be packed: the rows of several matrices one after the other, or, gated, of two side by side.
struct QuailPack {
    const void* const* parts;  // (part_rows, inner) bfloat16 each, contiguous
    const int64_t* part_rows;
    int64_t num_parts;
    int64_t inner;
    int32_t gated;
    int32_t format;  // of QuailFormat
    int32_t threads;
    void* packed;   // whole panels of quail_panel_columns() columns, quail_panel_words() words of 4 bytes each
    float* scales;  // INT16: one a column of those panels; else null
};

int64_t quail_panel_columns();
int64_t quail_panel_words(int64_t inner, int32_t format);
int32_t quail_has_format(int32_t format);
int32_t quail_fastest_format();  // on this processor, of those no coarser than bfloat16

void quail_pack(const QuailPack*);
void quail_product(const QuailProduct*);

}  // extern "C"

namespace quail {

constexpr long LEAST_ROWS = 56;  // of a block; fewer read the weights too often

// The part of a product that rows [first, last) have, on the calling thread.
void product_of_rows(const QuailProduct&, long first, long last);

}  // namespace quail
