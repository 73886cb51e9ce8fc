// Tasks on the threads of the OpenMP runtime that torch has already started (its GOMP_parallel is handed in): a pool of our own
// would fight with torch's threads, which spin between the matrix products.
#pragma once
#include <algorithm>
#include <atomic>

typedef void (*Gomp)(void (*)(void*), void*, unsigned, unsigned);

template <class F>
struct Job {
    const F* f;
    std::atomic<int> next{0};
    int tasks;
};

template <class F>
inline void run_job(void* p) {
    auto* job = static_cast<Job<F>*>(p);
    for (int t; (t = job->next.fetch_add(1, std::memory_order_relaxed)) < job->tasks;) (*job->f)(t);
}

template <class F>
inline void parallel(Gomp gomp, int threads, int tasks, const F& f) {
    Job<F> job{&f, {}, tasks};
    if (gomp && threads > 1 && tasks > 1) gomp(run_job<F>, &job, unsigned(std::min(threads, tasks)), 0);
    else run_job<F>(&job);
}
