// Attention of the rows of a pass over paged KV, earlier rows and themselves.
//
// A task is one KV head and a block of rows whose segments read the same history. The query heads of the KV
// head are stacked as further rows, so that each key and value is brought into packed form once a block. The
// softmax runs along: a row keeps its largest score, the sum of its weights and its weighted values so far, and
// scales them down when a larger score comes (online softmax, arXiv:1805.02867; blocks as in FlashAttention,
// arXiv:2205.14135). What a row reads is cut into blocks from the row's own beginnings, so its result does not
// depend on its neighbours in the pass.

#include <cmath>
#include <vector>

#include "parallel.h"
#include "tile.h"

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

constexpr int KEYS = 128;              // keys of a block
constexpr int KEY_PANELS = KEYS / PANEL;
constexpr int BLOCK_ROWS = 8 * TILE_ROWS;  // stacked rows of a block, about

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

struct Piece {  // rows of one tile: all of one segment
    long row;        // first row of the pass
    int stacked;     // first stacked row of the block
    int first_head;  // stacked row r is row + (first_head + r) / group
    int height;
    long segment;
};

struct Scratch {
    std::vector<float> queries, keys, values, weights, scores, out, largest, total, widened;
    std::vector<Piece> pieces;
};

inline const float* widened(const float* from, long, float*) { return from; }
inline const float* widened(const bf16* from, long count, float* copy) {
    long i = 0;
    for (; i + LANES <= count; i += LANES) store(copy + i, load(from + i));
    for (; i < count; ++i) copy[i] = widen(from[i]);
    return copy;
}

template <class T>
class Attention {
    const QuailAttend& job;
    const long group, dim, padded;

    // Keys and values of tokens [begin, end) of a history.
    void find_history(long segment, long head, long begin, long end, const T** keys, const T** values) const {
        const long slot = job.kv_heads * dim;
        const long paged = job.paged_tokens[segment];
        const int64_t* pages = job.table + (paged ? job.table_row[segment] * job.table_stride : 0);
        long token = begin;
        for (; token < std::min(end, paged); ++token) {
            const long at = (pages[token / job.page_tokens] * job.page_tokens + token % job.page_tokens) * slot;
            *keys++ = static_cast<const T*>(job.k_pages) + at + head * dim;
            *values++ = static_cast<const T*>(job.v_pages) + at + head * dim;
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

    void pack_keys(const T* const* keys, int count, Scratch& s) const {
        for (int first = 0; first < count; first += LANES) {
            const float* rows[LANES] = {};
            for (int lane = 0; lane < LANES && first + lane < count; ++lane) {
                rows[lane] = widened(keys[first + lane], dim, s.widened.data() + lane * dim);
            }
            float* panel = s.keys.data() + first / PANEL * dim * PANEL + first % PANEL;
            transpose(rows, LANES, dim, panel, PANEL);
        }
        if (count % PANEL && count % PANEL <= LANES) {  // the right half of the last panel
            float* panel = s.keys.data() + count / PANEL * dim * PANEL + LANES;
            for (long k = 0; k < dim; ++k) store(panel + k * PANEL, Floats{});
        }
    }

    void pack_values(const T* const* values, int count, Scratch& s) const {
        for (int key = 0; key < count; ++key) {
            float* to = s.values.data() + key * PANEL;
            for (long first = 0; first < padded; first += LANES, to += first % PANEL ? LANES : KEYS * PANEL - LANES) {
                if (first + LANES <= dim) {
                    store(to, load(values[key] + first));
                    continue;
                }
                for (long d = 0; d < LANES; ++d) to[d] = first + d < dim ? widen(values[key][first + d]) : 0.0f;
            }
        }
    }

    // One tile against one packed block of keys. `seen` is the number of the block's keys that stacked row r of
    // the tile sees.
    template <class Seen>
    void meet(const Piece& tile, int most, Scratch& s, const Seen& seen) const {
        const int panels = (most + PANEL - 1) / PANEL, width = panels * PANEL;
        const float* queries = s.queries.data() + tile.stacked * dim;
        const Tile scores_of = packed_tile(tile.height), add_values = adding_tile<KEYS>(tile.height);
        for (int panel = 0; panel < panels; ++panel) {
            scores_of(queries, s.keys.data() + panel * dim * PANEL, dim, s.scores.data() + panel * PANEL, KEYS);
        }
        for (int r = 0; r < tile.height; ++r) {
            float* scores = s.scores.data() + r * KEYS;
            const int limit = seen(r);
            Floats most_of = splat(-INFINITY);
            for (int i = 0; i < width; i += LANES) {
                Floats each = load(scores + i) * job.scale;
                each = lane_numbers() < limit - i ? each : splat(-INFINITY);
                store(scores + i, each);
                most_of = each > most_of ? each : most_of;
            }
            float &before = s.largest[tile.stacked + r], &total = s.total[tile.stacked + r];
            const float now = std::max(before, largest(most_of));
            const float base = now == -INFINITY ? 0 : now;
            if (now > before) {
                const float fade = exp_of_negative(splat(before - base))[0];
                float* out = s.out.data() + (tile.stacked + r) * padded;
                for (long d = 0; d < padded; d += LANES) store(out + d, load(out + d) * fade);
                total *= fade;
                before = now;
            }
            float* weights = s.weights.data() + r * KEYS;
            Floats added = {};
            for (int i = 0; i < width; i += LANES) {
                const Floats each = exp_of_negative(load(scores + i) - base);
                added += each;
                store(weights + i, each);
            }
            total += sum(added);
        }
        float* out = s.out.data() + tile.stacked * padded;
        for (long d = 0; d < padded; d += PANEL) {
            add_values(s.weights.data(), s.values.data() + d * KEYS, most, out + d, padded);
        }
    }

    void cut_pieces(const Block& block, Scratch& s) const {
        s.pieces.clear();
        int stacked = 0;
        for (long segment = block.segment; segment < block.last_segment; ++segment) {
            const long begin = std::max<long>(block.first, job.q_start[segment]);
            const int count = (std::min<long>(block.last, job.q_stop[segment]) - begin) * group;
            const int tiles = (count + TILE_ROWS - 1) / TILE_ROWS;
            for (int t = 0; t < tiles; ++t) {
                const int from = count * t / tiles, height = count * (t + 1) / tiles - from;
                s.pieces.push_back({begin + from / group, stacked + from, int(from % group), height, segment});
            }
            stacked += count;
        }
        const size_t rows = stacked;
        s.queries.resize(std::max<size_t>(s.queries.size(), rows * dim + LANES));
        s.keys.resize(std::max<size_t>(s.keys.size(), KEYS * dim + LANES));
        s.values.resize(std::max<size_t>(s.values.size(), KEYS * padded));
        s.weights.resize(TILE_ROWS * KEYS);
        s.scores.resize(TILE_ROWS * KEYS);
        s.widened.resize(std::max<size_t>(s.widened.size(), LANES * dim));
        s.out.assign(rows * padded, 0.0f);
        s.largest.assign(rows, -INFINITY);
        s.total.assign(rows, 0.0f);
    }

    void pack_queries(long head, Scratch& s) const {
        for (const Piece& tile : s.pieces) {
            const float* rows[LANES];
            for (int r = 0; r < tile.height; ++r) {
                const long at = tile.first_head + r;
                const T* query = static_cast<const T*>(job.q) + (tile.row + at / group) * job.q_stride +
                                 (head * group + at % group) * dim;
                rows[r] = widened(query, dim, s.widened.data() + r * dim);
            }
            transpose(rows, tile.height, dim, s.queries.data() + tile.stacked * dim, tile.height);
        }
    }

    void read_history(const Block& block, long head, Scratch& s) const {
        const T *keys[KEYS], *values[KEYS];
        const long tokens = history_tokens(block.segment);
        for (long begin = 0; begin < tokens; begin += KEYS) {
            const int count = std::min<long>(KEYS, tokens - begin);
            find_history(block.segment, head, begin, begin + count, keys, values);
            pack_keys(keys, count, s);
            pack_values(values, count, s);
            for (const Piece& tile : s.pieces) {
                meet(tile, count, s, [&](int) { return count; });
            }
        }
    }

    void read_own(const Block& block, long head, Scratch& s) const {
        const T *keys[KEYS], *values[KEYS];
        auto tile = s.pieces.begin();
        for (long segment = block.segment; segment < block.last_segment; ++segment) {
            const auto first_tile = tile;
            while (tile != s.pieces.end() && tile->segment == segment) ++tile;
            const long start = job.q_start[segment];
            const long stop = std::min<long>(block.last, job.q_stop[segment]);
            for (long begin = start; begin < stop; begin += KEYS) {
                const int count = std::min<long>(KEYS, stop - begin);
                for (int i = 0; i < count; ++i) {
                    keys[i] = row_of(job.k, job.k_stride, begin + i, head);
                    values[i] = row_of(job.v, job.v_stride, begin + i, head);
                }
                pack_keys(keys, count, s);
                pack_values(values, count, s);
                for (auto each = first_tile; each != tile; ++each) {
                    const Piece& piece = *each;
                    const auto seen = [&](int r) {
                        const long own = piece.row + (piece.first_head + r) / group;
                        return int(std::max<long>(0, std::min<long>(count, own + 1 - begin)));
                    };
                    const int most = seen(piece.height - 1);
                    if (most > 0) meet(piece, most, s, seen);
                }
            }
        }
    }

    void write(long head, Scratch& s) const {
        for (const Piece& tile : s.pieces) {
            for (int r = 0; r < tile.height; ++r) {
                const long at = tile.first_head + r;
                const long place = (tile.row + at / group) * job.heads + head * group + at % group;
                const float total = s.total[tile.stacked + r];
                const float* from = s.out.data() + (tile.stacked + r) * padded;
                T* to = static_cast<T*>(job.out) + place * dim;
                const float share = 1.0f / total;
                long d = 0;
                for (; d + LANES <= dim; d += LANES) store(to + d, load(from + d) * share);
                for (; d < dim; ++d) put(to + d, from[d] * share);
                if (job.lse) job.lse[place] = s.largest[tile.stacked + r] + std::log(total);
            }
        }
    }

  public:
    explicit Attention(const QuailAttend& job)
        : job(job),
          group(job.heads / job.kv_heads),
          dim(job.head_dim),
          padded((dim + PANEL - 1) / PANEL * PANEL) {}

    void run() const {
        const auto blocks = blocks_of(job, std::max<long>(1, BLOCK_ROWS / group));
        parallel(job.threads, long(blocks.size()) * job.kv_heads, [&](long task) {
            static thread_local Scratch scratch;
            const Block& block = blocks[task / job.kv_heads];
            const long head = task % job.kv_heads;
            cut_pieces(block, scratch);
            pack_queries(head, scratch);
            read_history(block, head, scratch);
            read_own(block, head, scratch);
            write(head, scratch);
        });
    }
};

}  // namespace

extern "C" {

void quail_attend_float32(const QuailAttend* job) { Attention<float>(*job).run(); }
void quail_attend_bfloat16(const QuailAttend* job) { Attention<bf16>(*job).run(); }

}  // extern "C"
