// A first trial of a fresh build: products of a few shapes against plain loops.

#include <cmath>
#include <vector>

#include "products.h"
#include "simd.h"

using namespace quail;

namespace {

float value(long i) { return float((i * 2654435761u >> 7) % 2001) / 1000.0f - 1.0f; }

bool product_is_right(int64_t rows, int64_t inner, int64_t columns, int32_t format) {
    std::vector<bf16> x(rows * inner), weights(columns * inner);
    for (long i = 0; i < rows * inner; ++i) x[i] = round_bf16(value(i));
    for (long r = 0; r < rows && format == INT8 && inner > 64; ++r) {  // outliers, also in the last run
        for (long i : {inner / 3, inner - 1}) x[r * inner + i] = round_bf16(50 * widen(x[r * inner + i]));
    }
    for (long i = 0; i < columns * inner; ++i) weights[i] = round_bf16(value(i + 77));
    const long panel = quail_panel_columns(), padded = (columns + panel - 1) / panel * panel;
    std::vector<uint32_t> packed(padded / panel * quail_panel_words(inner, format));
    std::vector<float> scales(padded), out(rows * columns, 1.0f);
    float* const of_columns = format == INT16 ? scales.data() : nullptr;
    const void* part = weights.data();
    const QuailPack packing{&part, &columns, 1, inner, 0, format, 1, packed.data(), of_columns};
    quail_pack(&packing);
    const QuailProduct job{x.data(), inner, rows, inner, packed.data(), of_columns, columns, nullptr,
                           out.data(), columns, 1, format, 1};
    quail_product(&job);
    for (long r = 0; r < rows; ++r) {
        for (long c = 0; c < columns; ++c) {
            double expected = 1, sizes = 0;
            for (long k = 0; k < inner; ++k) {
                const double each = widen(x[r * inner + k]), weight = widen(weights[c * inner + k]);
                expected += each * weight;
                sizes += std::fabs(each) + std::fabs(weight);
            }
            // Half a step of a byte is 1 / 255.
            const double allowed = format == INT8 ? sizes / 200 + 1e-3 : 5e-4 * inner;
            if (!(std::fabs(out[r * columns + c] - expected) < allowed)) return false;
        }
    }
    return true;
}

}  // namespace

extern "C" int quail_check() {
    for (long rows : {1, 13, 40}) {
        for (long inner : {2, 34, 96, 400}) {
            for (long columns : {1, 33, 64}) {
                for (int format : {BFLOAT16, INT16, INT8}) {
                    if (quail_has_format(format) && !product_is_right(rows, inner, columns, format)) return 1;
                }
            }
        }
    }
    return 0;
}
