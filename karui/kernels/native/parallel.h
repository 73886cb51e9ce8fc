// Tasks on the threads of the OpenMP runtime that torch has already started (its GOMP_parallel is handed in): a pool of our own
// would fight with torch's threads, which spin between the matrix products.
#pragma once
#include <algorithm>
#include <atomic>
#include <thread>

typedef void (*Gomp)(void (*)(void*), void*, unsigned, unsigned);

// The calling thread takes tasks from the front, the others from the back: over neighbouring rows each then mostly finds in its caches
// what it wrote in the operation before, and the middle evens out who is faster.
template <class F>
struct Job {
    const F* f;
    int tasks;
    std::thread::id caller = std::this_thread::get_id();
    std::atomic<int> taken{0}, front{0}, back{0};
};

template <class F>
inline void run_job(void* p) {
    auto* job = static_cast<Job<F>*>(p);
    const bool first = std::this_thread::get_id() == job->caller;
    while (job->taken.fetch_add(1, std::memory_order_relaxed) < job->tasks) {
        const int i = (first ? job->front : job->back).fetch_add(1, std::memory_order_relaxed);
        (*job->f)(first ? i : job->tasks - 1 - i);
    }
}

template <class F>
inline void parallel(Gomp gomp, int threads, int tasks, const F& f) {
    Job<F> job{&f, tasks};
    if (gomp && threads > 1 && tasks > 1) gomp(run_job<F>, &job, unsigned(std::min(threads, tasks)), 0);
    else run_job<F>(&job);
}
