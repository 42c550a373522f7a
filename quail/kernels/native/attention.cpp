// Attention of the rows of a pass over paged KV, earlier rows and themselves.
//
// A task is one KV head and a block of rows whose segments read the same history. The query heads of the KV head
// are stacked as further rows, and stacked rows are the lanes of vectors: queries are turned into columns once, keys
// and values are broadcast as they lie, and everything that a row keeps for itself is a lane among others. The
// softmax runs along: a row keeps its largest score, the sum of its weights and its weighted values so far, and
// scales them down when a larger score comes (online softmax, arXiv:1805.02867; blocks as in FlashAttention,
// arXiv:2205.14135). What a row reads is cut into blocks from its first token on, wherever that lies. So a row's result
// has the same bits whatever its neighbours are, and whether what it reads was computed before or in its own pass. That
// is where all values are finite: a weight of 0 times infinity is NaN.

#include <cmath>
#include <vector>

#include "parallel.h"
#include "window.h"

using namespace quail;

extern "C" {

// Strides in elements. A row sees `paged_tokens` of its segment's table, then the segment's context ranges,
// then its own segment up to itself.
struct QuailAttend {
    const void* q;               // (rows, heads, head_dim), heads contiguous
    const void* k;               // (rows, kv_heads, head_dim)
    const void* v;
    const void* k_pages;         // (pages, page_tokens, kv_heads, head_dim), contiguous
    const void* v_pages;
    void* out;                   // (rows, heads, head_dim), contiguous
    float* lse;                  // (rows, heads) or null
    int64_t q_stride;            // of rows
    int64_t k_stride;
    int64_t v_stride;
    int64_t heads;
    int64_t kv_heads;
    int64_t head_dim;
    int64_t page_tokens;
    int64_t segments;
    const int64_t* q_start;      // (segments,)
    const int64_t* q_stop;
    const int64_t* paged_tokens;
    const int64_t* table_row;
    const int64_t* table;        // (tables, table_stride) page ids
    int64_t table_stride;
    const int64_t* context;      // (ranges, 2) rows
    const int64_t* context_end;  // (segments,) ranges before and including those of a segment
    const int64_t* history;      // (segments,) equal for neighbours that read the same history
    float scale;
    int32_t threads;
};

}  // extern "C"

namespace {

constexpr int BLOCK_ROWS = 9 * WINDOW;  // stacked rows of a block, about
constexpr int LINE = 64;                // bytes of a line of the cache
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.693147180559945309f;

struct Block {  // rows [first, last), segments [segment, last_segment)
    long first, last, segment, last_segment;
};

std::vector<Block> blocks_of(const QuailAttend& job, long rows_of_a_block) {
    std::vector<Block> found;
    for (long s = 0; s < job.segments; ++s) {
        long row = job.q_start[s];
        while (row < job.q_stop[s]) {
            const bool joins = !found.empty() && row == job.q_start[s] && s > 0 &&
                               job.history[s] == job.history[s - 1] &&
                               row - found.back().first < rows_of_a_block;
            if (!joins) found.push_back({row, row, s, s});
            const long stop = std::min(job.q_stop[s], found.back().first + rows_of_a_block);
            found.back().last = stop;
            found.back().last_segment = s + 1;
            row = stop;
        }
    }
    return found;
}

class Room {  // floats that begin with a line of the cache
    struct alignas(64) Line {
        float floats[16];
    };
    std::vector<Line> lines;

  public:
    float* of(size_t count) {
        if (lines.size() * 16 < count) lines.resize((count + 15) / 16);
        return lines.data()->floats;
    }
};

struct Lane {  // a stacked row
    long query;  // element of q at which its query begins
    long place;  // row of the pass * heads + head
};

// A task at work.
struct Stack {
    long head;                  // of keys and values
    int lanes;                  // stacked rows
    long stride;                // of a dimension: room for a vector from any lane on
    float *queries, *out;       // (head_dim, stride)
    float *largest, *total;     // (stride,) largest score so far times the factor, sum of weights
    std::vector<Lane> lane;     // (lanes,)
    std::vector<int32_t> own;   // (stride,) rows of its segment before a lane's
};

struct Span {  // of stacked rows: all those of one segment in a block
    long segment;
    int begin, end;
};

struct Scratch {
    Stack stack;
    std::vector<Span> spans;
    Room queries, out, largest, total, keys, values, weights, turned;
};

// The elements of two rows in words, side by side; those of no second row are 0.
void side_by_side(const bf16* low, const bf16* high, long count, float* to) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) {
        const Words above = high ? (Words)load(high + i) : Words{};
        store(to + i, (Floats)((Words)load(low + i) >> 16 | above));
    }
    for (; i < count; ++i) {
        const uint32_t word = low[i].bits | (high ? uint32_t(high[i].bits) << 16 : 0);
        std::memcpy(to + i, &word, sizeof word);
    }
}

// Two vectors rounded to bfloat16, lane by lane side by side in words.
template <bool PAIRS>
Floats side_by_side(Floats low, Floats high) {
#if defined(__AVX512BF16__)
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    const __m512i places = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
        16, 0);
    return (Floats)_mm512_permutexvar_epi16(places, halves);
#else
    static_assert(!PAIRS, "needs AVX-512 BF16");
    return low;
#endif
}

// With PAIRS elements are bfloat16, two side by side: of queries and keys two dimensions, of weights and values those
// of two keys. Weights are rounded to it; their sum is not.
template <class T, bool PAIRS>
class Attention {
    static constexpr int ELEMENTS = PAIRS ? 2 : 1;  // in a word

    const QuailAttend& job;
    const long group, dim, slices;
    const float factor;  // a weight is 2 to the power of a score times this

    // Keys and values of tokens [begin, end) of a history.
    void find_history(long segment, long head, long begin, long end, const T** keys, const T** values) const {
        const long slot = job.kv_heads * dim;
        const long paged = job.paged_tokens[segment];
        const int64_t* pages = job.table + (paged ? job.table_row[segment] * job.table_stride : 0);
        long token = begin;
        while (token < std::min(end, paged)) {
            const long page = token / job.page_tokens, first = page * job.page_tokens;
            const long stop = std::min(std::min(end, paged), first + job.page_tokens);
            long at = (pages[page] * job.page_tokens + token - first) * slot + head * dim;
            for (; token < stop; ++token, at += slot) {
                *keys++ = static_cast<const T*>(job.k_pages) + at;
                *values++ = static_cast<const T*>(job.v_pages) + at;
            }
        }
        long before = paged;
        for (long range = segment ? job.context_end[segment - 1] : 0; range < job.context_end[segment]; ++range) {
            const long row = job.context[2 * range], size = job.context[2 * range + 1] - row;
            for (; token < std::min(end, before + size); ++token) {
                *keys++ = row_of(job.k, job.k_stride, row + token - before, head);
                *values++ = row_of(job.v, job.v_stride, row + token - before, head);
            }
            before += size;
        }
    }

    const T* row_of(const void* base, long stride, long row, long head) const {
        return static_cast<const T*>(base) + row * stride + head * dim;
    }

    long history_tokens(long segment) const {
        long found = job.paged_tokens[segment];
        for (long range = segment ? job.context_end[segment - 1] : 0; range < job.context_end[segment]; ++range) {
            found += job.context[2 * range + 1] - job.context[2 * range];
        }
        return found;
    }

    // `to`, with elements widened.
    static const float* widened(const T* from, long count, float* to) {
        long i = 0;
        for (; i + LANES <= count; i += LANES) store(to + i, load(from + i));
        for (; i < count; ++i) to[i] = widen(from[i]);
        return to;
    }

    // Brings rows of keys side by side, in slices of (count, SLICE / ELEMENTS) words.
    void gather_keys(const T* const* rows, int count, float* to) const {
        for (long slice = 0; slice < dim; slice += SLICE, to += KEYS * SLICE / ELEMENTS) {
            const long dims = std::min<long>(SLICE, dim - slice);
            for (int key = 0; key < count; ++key) {
                float* row = to + key * SLICE / ELEMENTS;
                if constexpr (PAIRS) {
                    std::memcpy(row, rows[key] + slice, dims * sizeof(T));
                } else {
                    widened(rows[key] + slice, dims, row);
                }
            }
        }
    }

    // Brings rows of values side by side, in slices of (count / ELEMENTS, SLICE) words: with PAIRS those of two keys.
    void gather_values(const T* const* rows, int count, float* to) const {
        for (long slice = 0; slice < dim; slice += SLICE, to += KEYS / ELEMENTS * SLICE) {
            const long dims = std::min<long>(SLICE, dim - slice);
            for (int key = 0; key < count; key += ELEMENTS) {
                float* row = to + key / ELEMENTS * SLICE;
                if constexpr (PAIRS) {
                    side_by_side(rows[key] + slice, key + 1 < count ? rows[key + 1] + slice : nullptr, dims, row);
                } else {
                    widened(rows[key] + slice, dims, row);
                }
            }
        }
    }

    // Lanes [begin, end) of a block, a window or less, against the first `most` of the gathered keys. Lanes see all of
    // them but for those from `least` on, of which lane r sees those before own[r] - first.
    void meet(const Stack& stack, int begin, int end, int least, int most, long first, Scratch& s) const {
        const int wide = (end - begin + LANES - 1) / LANES;
        const float *keys = s.keys.of(0), *values = s.values.of(0);
        float* weights = s.weights.of(0);
        for (long slice = 0; slice < dim; slice += SLICE) {
            const float* queries = stack.queries + slice / ELEMENTS * stack.stride + begin;
            const float* key = keys + slice / ELEMENTS * KEYS;
            const long steps = std::min<long>(SLICE, dim - slice) / ELEMENTS;
            for_tiles(most, wide, [&](int row, int high) {
                score_tile<PAIRS>(high, wide)(
                    key + row * SLICE / ELEMENTS, queries, stack.stride, steps, weights + row * WINDOW, slice > 0);
            });
        }
        alignas(64) float fade[WINDOW];
        for (int w = 0; w < wide; ++w) {
            const int lane = begin + w * LANES;
            store(fade + w * LANES, weigh(stack, lane, end, least, most, first, weights + w * LANES));
        }
        const long steps = (most + ELEMENTS - 1) / ELEMENTS;
        for (long slice = 0; slice < dim; slice += SLICE) {
            float* out = stack.out + slice * stack.stride + begin;
            const float* value = values + slice * KEYS / ELEMENTS;
            for_tiles(std::min<long>(SLICE, dim - slice), wide, [&](int d, int high) {
                value_tile<PAIRS>(high, wide)(
                    value + d, weights, steps, out + d * stack.stride, stack.stride, fade, end - begin);
            });
        }
    }

    // Turns a vector of lanes' scores into weights, with PAIRS those of two keys in a word. What the lanes had before
    // is to be multiplied with the result.
    Floats weigh(const Stack& stack, int lane, int end, int least, int most, long first, float* scores) const {
        if (least < most) {
            Ints own;
            std::memcpy(&own, stack.own.data() + lane, sizeof own);
            own -= int32_t(first);
            for (int key = least; key < most; ++key) {
                const Floats each = load(scores + key * WINDOW);
                store(scores + key * WINDOW, own >= key ? each : splat(-INFINITY));
            }
        }
        const Floats before = load(stack.largest + lane);
        Floats now = splat(-INFINITY), next = now;  // of even and of odd keys
        for (int key = 0; key + 1 < most; key += 2) {
            now = larger(load(scores + key * WINDOW), now);
            next = larger(load(scores + (key + 1) * WINDOW), next);
        }
        if (most % 2) now = larger(load(scores + (most - 1) * WINDOW), now);
        now = larger(before, larger(next, now) * factor);
        const Ints there = lane_numbers() < end - lane;
        store(stack.largest + lane, there ? now : before);
        const Floats base = now == splat(-INFINITY) ? Floats{} : now;
        const Floats fade = exp2_of_negative(before - base);
        const Floats total_before = load(stack.total + lane);
        Floats total = total_before * fade;
        const auto weight_of = [&](int key) {
            const Floats found = exp2_of_negative(load(scores + key * WINDOW) * factor - base);
            total += found;
            return found;
        };
        for (int key = 0; key < most; key += ELEMENTS) {
            Floats found = weight_of(key);
            if constexpr (PAIRS) found = side_by_side<PAIRS>(found, key + 1 < most ? weight_of(key + 1) : Floats{});
            store(scores + key / ELEMENTS * WINDOW, found);
        }
        store(stack.total + lane, there ? total : total_before);
        return fade;
    }

    void stack_rows(const Block& block, long head, Scratch& s) const {
        Stack& stack = s.stack;
        stack.head = head;
        stack.lane.clear();
        stack.own.clear();
        s.spans.clear();
        for (long segment = block.segment; segment < block.last_segment; ++segment) {
            const long start = job.q_start[segment], stop = std::min<long>(block.last, job.q_stop[segment]);
            const int begin = stack.lane.size();
            for (long row = std::max<long>(block.first, start); row < stop; ++row) {
                for (long each = 0; each < group; ++each) {
                    const long of_query = head * group + each;
                    stack.lane.push_back({row * job.q_stride + of_query * dim, row * job.heads + of_query});
                    stack.own.push_back(row - start);
                }
            }
            s.spans.push_back({segment, begin, int(stack.lane.size())});
        }
        stack.lanes = stack.lane.size();
        const int vectors = (stack.lanes + 2 * LANES - 2) / LANES;
        stack.stride = (vectors | 1) * LANES;  // odd: lines of a column lie apart in the cache
        stack.own.resize(stack.stride);
        stack.queries = s.queries.of(dim * stack.stride + LANES);
        stack.out = s.out.of(dim * stack.stride);
        stack.largest = s.largest.of(stack.stride);
        stack.total = s.total.of(stack.stride);
        std::fill_n(stack.out, dim * stack.stride, 0.0f);
        std::fill_n(stack.total, stack.stride, 0.0f);
        std::fill_n(stack.largest, stack.stride, -INFINITY);
        s.keys.of(slices * SLICE * KEYS);
        s.values.of(slices * SLICE * KEYS);
        s.weights.of(WINDOW * KEYS);
        s.turned.of(LANES * (dim + LANES));
    }

    // Queries as columns.
    void turn_queries(const Stack& stack, Scratch& s) const {
        float* turned = s.turned.of(0);
        for (int first = 0; first < stack.lanes; first += LANES) {
            const float* rows[LANES];
            const int count = std::min(LANES, stack.lanes - first);
            for (int r = 0; r < count; ++r) {
                const T* query = static_cast<const T*>(job.q) + stack.lane[first + r].query;
                const int later = first + r + 2 * LANES;
                for (long d = 0; d < dim && later < stack.lanes; d += LINE / sizeof(T)) {
                    __builtin_prefetch(static_cast<const T*>(job.q) + stack.lane[later].query + d);
                }
                rows[r] = PAIRS ? reinterpret_cast<const float*>(query) : widened(query, dim, turned + r * dim);
            }
            transpose(rows, count, dim / ELEMENTS, stack.queries + first, stack.stride);
        }
    }

    // The whole blocks of the history, all rows together.
    void read_history(const Block& block, Scratch& s) const {
        const T *keys[KEYS], *values[KEYS];
        const Stack& stack = s.stack;
        const long tokens = history_tokens(block.segment);
        for (long begin = 0; begin + KEYS <= tokens; begin += KEYS) {
            find_history(block.segment, stack.head, begin, begin + KEYS, keys, values);
            gather_keys(keys, KEYS, s.keys.of(0));
            gather_values(values, KEYS, s.values.of(0));
            for (int lane = 0; lane < stack.lanes; lane += WINDOW) {
                meet(stack, lane, std::min(stack.lanes, lane + WINDOW), KEYS, KEYS, 0, s);
            }
        }
    }

    // What the history has beyond them, and the rows themselves, segment by segment.
    void read_own(Scratch& s) const {
        const T *keys[KEYS], *values[KEYS];
        const Stack& stack = s.stack;
        for (const Span& span : s.spans) {
            const long start = job.q_start[span.segment], rows = stack.own[span.end - 1] + 1;
            const long tokens = history_tokens(span.segment), rest = tokens % KEYS;
            for (long first = -rest; first < rows; first += KEYS) {
                const int count = std::min<long>(KEYS, rows - first), before = std::max<long>(0, -first);
                if (before) find_history(span.segment, stack.head, tokens - rest, tokens, keys, values);
                for (int i = before; i < count; ++i) {
                    keys[i] = row_of(job.k, job.k_stride, start + first + i, stack.head);
                    values[i] = row_of(job.v, job.v_stride, start + first + i, stack.head);
                }
                gather_keys(keys, count, s.keys.of(0));
                gather_values(values, count, s.values.of(0));
                for (int lane = span.begin; lane < span.end; lane += WINDOW) {
                    const int end = std::min(span.end, lane + WINDOW);
                    const int most = std::min<long>(count, stack.own[end - 1] + 1 - first);
                    const int least = std::max<long>(0, stack.own[lane] + 1 - first);
                    if (most > 0) meet(stack, lane, end, least, most, first, s);
                }
            }
        }
    }

    void write(const Stack& stack, Scratch& s) const {
        const long width = (dim + LANES - 1) / LANES * LANES;
        float* turned = s.turned.of(0);
        for (int first = 0; first < stack.lanes; first += LANES) {
            for (long d = 0; d < dim; d += LANES) {
                const float* columns[LANES];
                const int count = std::min<long>(LANES, dim - d);
                for (int i = 0; i < count; ++i) columns[i] = stack.out + (d + i) * stack.stride + first;
                transpose(columns, count, LANES, turned + d, width);
            }
            for (int later = first + LANES; later < std::min(stack.lanes, first + 2 * LANES); ++later) {
                const T* to = static_cast<const T*>(job.out) + stack.lane[later].place * dim;
                for (long d = 0; d < dim; d += LINE / sizeof(T)) __builtin_prefetch(to + d, 1);
            }
            const Floats total = load(stack.total + first), shares = 1.0f / total;
            const Floats lse = (load(stack.largest + first) + log2_of(total)) * LN_2;
            for (int lane = first; lane < std::min(stack.lanes, first + LANES); ++lane) {
                const long place = stack.lane[lane].place;
                const float share = shares[lane - first];
                const float* from = turned + (lane - first) * width;
                T* to = static_cast<T*>(job.out) + place * dim;
                long d = 0;
                for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d) * share);
                for (; d < dim; ++d) put(to + d, from[d] * share);
                if (job.lse) job.lse[place] = lse[lane - first];
            }
        }
    }

  public:
    explicit Attention(const QuailAttend& job)
        : job(job),
          group(job.heads / job.kv_heads),
          dim(job.head_dim),
          slices((dim + SLICE - 1) / SLICE),
          factor(job.scale * LOG2_E) {}

    void run() const {
        const auto blocks = blocks_of(job, std::max<long>(1, BLOCK_ROWS / group));
        parallel(job.threads, long(blocks.size()) * job.kv_heads, [&](long task) {
            static thread_local Scratch scratch;
            const Block& block = blocks[task / job.kv_heads];
            const long head = task % job.kv_heads;
            stack_rows(block, head, scratch);
            turn_queries(scratch.stack, scratch);
            read_history(block, scratch);
            read_own(scratch);
            write(scratch.stack, scratch);
        });
    }
};

}  // namespace

extern "C" {

void quail_attend_float32(const QuailAttend* job) { Attention<float, false>(*job).run(); }

void quail_attend_bfloat16(const QuailAttend* job) {
#if defined(__AVX512BF16__)
    if (FAST_PAIRS && job->head_dim % 2 == 0) return Attention<bf16, true>(*job).run();
#endif
    Attention<bf16, false>(*job).run();
}

}  // extern "C"
