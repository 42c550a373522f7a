#include "processor.h"

#include <cstdlib>

bool quail::has_fast_pairs() {
#if defined(__AVX512BF16__)
    static const char* const wanted = std::getenv("QUAIL_KERNELS_PAIRS");
    return wanted && *wanted ? *wanted == '1' : bool(__builtin_cpu_is("amd"));
#else
    return false;
#endif
}
