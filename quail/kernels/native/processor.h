// What this processor does fast, as far as that is not a matter of what it can do.
#pragma once

namespace quail {

// Whether processors add up products of pairs of bfloat16 as fast as those of 16-bit integers, twice as many a second
// as of float32. AMD's do; Intel's of the time of AVX-512 BF16 take twice as long for them as for float32.
// QUAIL_KERNELS_PAIRS of 0 or 1 decides otherwise. Never in a build without AVX-512 BF16.
bool has_fast_pairs();

}  // namespace quail
