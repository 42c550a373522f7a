// What happens to rows between products: norms, rotary positions, KV into pages.

#include "rows.h"

#include <cmath>

#include "parallel.h"
#include "simd.h"

using namespace quail;

namespace {

constexpr long ROWS_OF_A_TASK = 32;

inline float mean_square(const float* x, long width) {
    Floats total[4] = {};
    long i = 0;
    for (; i + 4 * LANES <= width; i += 4 * LANES) {
        for (int part = 0; part < 4; ++part) {
            const Floats each = load(x + i + part * LANES);
            total[part] += each * each;
        }
    }
    float found = sum((total[0] + total[1]) + (total[2] + total[3]));
    for (; i < width; ++i) found += x[i] * x[i];
    return found / width;
}

template <class T>
inline void scaled(const float* x, float scale, const float* weight, T* out, long width) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
    for (; i < width; ++i) put(out + i, x[i] * scale * weight[i]);
}

// Calls body(job, first, last) for parts of a job's rows on its threads.
template <class Job>
void in_parts(const Job& job, void (*body)(const Job&, long, long)) {
    parallel(job.threads, (job.rows + ROWS_OF_A_TASK - 1) / ROWS_OF_A_TASK, [&](long task) {
        body(job, task * ROWS_OF_A_TASK, std::min<long>(job.rows, (task + 1) * ROWS_OF_A_TASK));
    });
}

template <class T>
void norm(const QuailNorm& job, long first, long last) {
    for (long row = first; row < last; ++row) {
        const float* x = job.x + row * job.width;
        const float scale = 1.0f / std::sqrt(mean_square(x, job.width) + job.eps);
        scaled(x, scale, job.weight, static_cast<T*>(job.out) + row * job.width, job.width);
    }
}

// One head: its norm, then the rotation of the pairs (i, i + head_dim / 2).
template <class T>
inline void turn(T* head, const float* norm, float eps, const float* cos, const float* sin, long head_dim) {
    const long half = head_dim / 2;
    float scale = 1.0f;
    if (norm) {
        float total = 0;
        for (long i = 0; i < head_dim; ++i) total += widen(head[i]) * widen(head[i]);
        scale = 1.0f / std::sqrt(total / head_dim + eps);
    }
    long i = 0;
    for (; i + LANES <= half; i += LANES) {
        Floats a = load(head + i), b = load(head + half + i);
        if (norm) {
            a = a * scale * load(norm + i);
            b = b * scale * load(norm + half + i);
        }
        const Floats c = load(cos + i), s = load(sin + i);
        store(head + i, a * c - b * s);
        store(head + half + i, b * c + a * s);
    }
    for (; i < half; ++i) {
        float a = widen(head[i]), b = widen(head[half + i]);
        if (norm) {
            a = a * scale * norm[i];
            b = b * scale * norm[half + i];
        }
        put(head + i, a * cos[i] - b * sin[i]);
        put(head + half + i, b * cos[i] + a * sin[i]);
    }
}

template <class T>
void rotate(const QuailRotate& job, long first, long last) {
    const long head_dim = job.head_dim, kv_width = job.kv_heads * head_dim;
    for (long row = first; row < last; ++row) {
        T* heads = static_cast<T*>(job.heads) + row * (job.q_heads * head_dim + 2 * kv_width);
        const float *cos = job.cos + row * (head_dim / 2), *sin = job.sin + row * (head_dim / 2);
        for (long h = 0; h < job.q_heads + job.kv_heads; ++h) {
            const float* norm = h < job.q_heads ? job.q_norm : job.k_norm;
            turn(heads + h * head_dim, norm, job.eps, cos, sin, head_dim);
        }
        if (job.slots[row] >= 0) {
            const long to = job.slots[row] * kv_width;
            const T* keys = heads + job.q_heads * head_dim;
            std::memcpy(static_cast<T*>(job.k_pages) + to, keys, kv_width * sizeof(T));
            std::memcpy(static_cast<T*>(job.v_pages) + to, keys + kv_width, kv_width * sizeof(T));
        }
    }
}

template <class T>
void gate(const QuailGate& job, long first, long last) {
    for (long row = first; row < last; ++row) {
        const T* gate = static_cast<const T*>(job.gate_up) + 2 * row * job.width;
        const T* up = gate + job.width;
        T* out = static_cast<T*>(job.out) + row * job.width;
        long i = 0;
        for (; i + LANES <= job.width; i += LANES) store(out + i, silu(load(gate + i)) * load(up + i));
        for (; i < job.width; ++i) put(out + i, silu(splat(widen(gate[i])))[0] * widen(up[i]));
    }
}

}  // namespace

extern "C" {

void quail_gate_float32(const QuailGate* job) { in_parts(*job, gate<float>); }
void quail_gate_bfloat16(const QuailGate* job) { in_parts(*job, gate<bf16>); }
void quail_norm_float32(const QuailNorm* job) { in_parts(*job, norm<float>); }
void quail_norm_bfloat16(const QuailNorm* job) { in_parts(*job, norm<bf16>); }
void quail_rotate_float32(const QuailRotate* job) { in_parts(*job, rotate<float>); }
void quail_rotate_bfloat16(const QuailRotate* job) { in_parts(*job, rotate<bf16>); }

}  // extern "C"

void quail::norm_of_rows(const QuailNorm& job, long first, long last) { norm<bf16>(job, first, last); }
void quail::rotate_rows(const QuailRotate& job, long first, long last) { rotate<bf16>(job, first, last); }
