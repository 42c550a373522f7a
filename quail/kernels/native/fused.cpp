// Steps between two attentions, run together. Each treats every row alone, so a block of rows goes through all of them
// while it is in the second-level cache, before the next block does.

#include <algorithm>
#include <chrono>
#include <vector>

#include "parallel.h"
#include "products.h"
#include "rows.h"
#include "simd.h"

using namespace quail;

extern "C" {

enum QuailStepKind { NORM = 0, PRODUCT = 1, ROTATE = 2 };

// One step over bfloat16 rows.
struct QuailStep {
    int64_t kind;  // of QuailStepKind: whose job it is
    const void* job;
    double seconds;  // of all threads together; written
};

struct QuailFused {
    QuailStep* steps;
    int64_t num_steps;
    int64_t rows;    // of each step
    int64_t widest;  // elements of a row that a product multiplies, at most
    int32_t threads;
};

}  // extern "C"

namespace {

constexpr long BLOCK_BYTES = 512 << 10;  // the widest rows of a block: with what else they have they stay near
constexpr long ROWS_OF_A_PIECE = 40;     // of a block that is cut, at least

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

void run_rows(const QuailStep& step, long first, long last) {
    if (step.kind == NORM) norm_of_rows(*static_cast<const QuailNorm*>(step.job), first, last);
    if (step.kind == PRODUCT) product_of_rows(*static_cast<const QuailProduct*>(step.job), first, last);
    if (step.kind == ROTATE) rotate_rows(*static_cast<const QuailRotate*>(step.job), first, last);
}

void run_alone(const QuailStep& step) {
    if (step.kind == NORM) quail_norm_bfloat16(static_cast<const QuailNorm*>(step.job));
    if (step.kind == PRODUCT) quail_product(static_cast<const QuailProduct*>(step.job));
    if (step.kind == ROTATE) quail_rotate_bfloat16(static_cast<const QuailRotate*>(step.job));
}

// Where the blocks of rows end: a multiple of the threads, those of the last round in pieces, so that no thread waits
// long for another. None where the rows are too few or too wide for blocks.
std::vector<long> ends_of_blocks(const QuailFused& fused) {
    const long fitting = BLOCK_BYTES / (2 * fused.widest), round = fitting * fused.threads;
    std::vector<long> ends;
    if (fitting < LEAST_ROWS) return ends;
    const long rounds = std::min((fused.rows + round - 1) / round, fused.rows / (LEAST_ROWS * fused.threads));
    const long blocks = rounds * fused.threads;
    for (long block = 0; block < blocks; ++block) {
        const long begin = fused.rows * block / blocks, rows = fused.rows * (block + 1) / blocks - begin;
        const bool is_last = fused.threads > 1 && block >= blocks - fused.threads;
        const long pieces = is_last ? std::clamp<long>(rows / ROWS_OF_A_PIECE, 1, 4) : 1;
        for (long piece = 1; piece <= pieces; ++piece) ends.push_back(begin + rows * piece / pieces);
    }
    return ends;
}

}  // namespace

extern "C" void quail_fused(const QuailFused* fused) {
    QuailStep* const steps = fused->steps;
    const long num_steps = fused->num_steps;
    const std::vector<long> ends = ends_of_blocks(*fused);
    std::vector<double> seconds(std::max<size_t>(1, ends.size()) * num_steps);  // of each step in each block
    if (ends.empty()) {
        for (long i = 0; i < num_steps; ++i) {
            const double began = now();
            run_alone(steps[i]);
            seconds[i] = now() - began;
        }
    }
    parallel(fused->threads, long(ends.size()), [&](long block) {
        double began = now();
        for (long i = 0; i < num_steps; ++i) {
            run_rows(steps[i], block ? ends[block - 1] : 0, ends[block]);
            const double ended = now();
            seconds[block * num_steps + i] = ended - began;
            began = ended;
        }
    });
    for (long i = 0; i < num_steps; ++i) steps[i].seconds = 0;
    for (size_t i = 0; i < seconds.size(); ++i) steps[i % num_steps].seconds += seconds[i];
}
