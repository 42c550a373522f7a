// Loops over tasks on the threads of the OpenMP runtime that the process has loaded already.
//
// torch brings one; a second pool beside it would fight for the cores while either spins. Its entry points
// (GOMP_parallel, the same in GNU's, LLVM's and Intel's runtime) are looked up when first needed, so this
// builds without OpenMP. Without a runtime the caller's thread does everything.
#pragma once

#include <algorithm>
#include <atomic>
#include <dlfcn.h>

namespace quail {

using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

inline GompParallel gomp_parallel() {
    static const GompParallel found = (GompParallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
    return found;
}

// Calls body(task) for each task in [0, tasks), each once, on up to `threads` threads.
template <class Body>
void parallel(int threads, long tasks, const Body& body) {
    struct Shared {
        const Body& body;
        const long tasks;
        std::atomic<long> next{0};
        void run() {
            for (long task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) body(task);
        }
    } shared{body, tasks};
    const long team = std::min<long>(threads, tasks);
    if (team > 1 && gomp_parallel()) {
        gomp_parallel()([](void* each) { static_cast<Shared*>(each)->run(); }, &shared, unsigned(team), 0);
    } else {
        shared.run();
    }
}

}  // namespace quail
