// What happens to rows between products: the C interface, and the same on a part of the rows.
#pragma once

#include <cstdint>

extern "C" {

// Root-mean-square norm of float32 rows.
struct QuailNorm {
    const float* x;       // (rows, width), contiguous
    const float* weight;  // (width,)
    void* out;            // (rows, width), contiguous
    int64_t rows;
    int64_t width;
    float eps;
    int32_t threads;
};

// Norms of query and key heads, rotary positions, then keys and values into pages; in place.
struct QuailRotate {
    void* heads;           // (rows, q_heads + 2 kv_heads, head_dim), contiguous
    const float* cos;      // (rows, head_dim / 2)
    const float* sin;
    const float* q_norm;   // (head_dim,) or null
    const float* k_norm;
    void* k_pages;         // (slots, kv_heads, head_dim), contiguous
    void* v_pages;
    const int64_t* slots;  // (rows,) slot of a row's KV, -1 where it is not kept
    int64_t rows;
    int64_t q_heads;
    int64_t kv_heads;
    int64_t head_dim;
    float eps;
    int32_t threads;
};

// silu(gate) * up of rows that hold both, side by side.
struct QuailGate {
    const void* gate_up;  // (rows, 2 width), contiguous
    void* out;            // (rows, width), contiguous
    int64_t rows;
    int64_t width;
    int32_t threads;
};

void quail_gate_float32(const QuailGate*);
void quail_gate_bfloat16(const QuailGate*);
void quail_norm_float32(const QuailNorm*);
void quail_norm_bfloat16(const QuailNorm*);
void quail_rotate_float32(const QuailRotate*);
void quail_rotate_bfloat16(const QuailRotate*);

}  // extern "C"

namespace quail {

// Rows [first, last) of bfloat16, on the calling thread.
void norm_of_rows(const QuailNorm&, long first, long last);
void rotate_rows(const QuailRotate&, long first, long last);

}  // namespace quail
