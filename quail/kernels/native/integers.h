// What rows and weights need to become integers.
#pragma once

#include <cmath>

#include "formats.h"

namespace quail {
namespace {  // what several builds in a process must not share

constexpr float LEAST = 1e-30f;  // less counts as zero

// The magnitudes of a piece, which are in the order of their bits.
inline __m512i magnitudes(const bf16* x, long rest) {
    return _mm512_and_si512(piece_of(x, rest), _mm512_set1_epi16(0x7fff));
}

// The largest of a piece of magnitudes; NaN if one of them is not finite.
inline float largest_of(__m512i magnitudes) {
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(magnitudes), _mm512_extracti64x4_epi64(magnitudes, 1));
    const __m128i quarter = _mm_max_epu16(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
    const __m128i all_bits = _mm_set1_epi16(-1);  // the least of the complements is the complement of the largest
    const int least = _mm_extract_epi16(_mm_minpos_epu16(_mm_xor_si128(quarter, all_bits)), 0);
    const uint16_t found = uint16_t(~least);
    return found >= 0x7f80 ? NAN : widen(bf16{found});
}

// The largest magnitude of `count` elements; NaN if one of them is not finite.
inline float magnitude(const bf16* x, long count) {
    __m512i most = _mm512_setzero_si512();
    for (long i = 0; i < count; i += PIECE) most = _mm512_max_epu16(most, magnitudes(x + i, count - i));
    return largest_of(most);
}

// round(piece * factors) as 16-bit integers. Elements are widened and narrowed within quarters of the register, so that
// they keep their order.
inline __m512i rounded(__m512i piece, __m512 factors) {
    const auto whole = [&](__m512i elements) { return _mm512_cvtps_epi32(_mm512_castsi512_ps(elements) * factors); };
    return _mm512_packs_epi32(
        whole(_mm512_unpacklo_epi16(__m512i{}, piece)), whole(_mm512_unpackhi_epi16(__m512i{}, piece)));
}

struct Scale {
    float of_integers, of_elements;  // element = integer * of_integers; integer = element * of_elements
};

Scale scale_of(float most, float limit) {
    if (most != most) return {NAN, 0};
    if (most < LEAST) return {0, 0};
    return {most / limit, limit / most};
}

}  // namespace
}  // namespace quail
