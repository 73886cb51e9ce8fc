// One team of threads that runs a step together: every thread executes the same function and meets the others at barriers.
//
// Waiting spins first (a hand-over costs ~0.2 us) and then yields or sleeps, so that a team sharing its cores with other
// work does not burn them. Between steps the workers spin for about a millisecond, then sleep on a condition variable.
#pragma once
#include <sched.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
static inline void relax() { _mm_pause(); }
#else
static inline void relax() {}
#endif

class Team {
public:
    explicit Team(int size) : size_(size) {
        for (int i = 1; i < size; i++) workers_.emplace_back([this, i] { work(i); });
    }
    ~Team() {
        { std::lock_guard<std::mutex> hold(mutex_); stop_ = true; epoch_.fetch_add(1); }
        wake_.notify_all();
        for (auto& w : workers_) w.join();
    }
    int size() const { return size_; }

    // Calls job(argument, thread) on every thread of the team, the caller being thread 0; returns when all are done.
    void run(void (*job)(void*, int), void* argument) {
        if (size_ > 1) {
            job_ = job; argument_ = argument;
            { std::lock_guard<std::mutex> hold(mutex_); epoch_.fetch_add(1, std::memory_order_release); }
            if (sleeping_.load() > 0) wake_.notify_all();
        }
        job(argument, 0);
        barrier();
    }

    // Returns once every thread of the team has arrived.
    void barrier() {
        if (size_ == 1) return;
        int round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == size_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; round_.load(std::memory_order_acquire) == round; spins++) {
            if (spins < 4000) relax(); else sched_yield();
        }
    }

private:
    void work(int index) {
        int seen = 0;
        for (;;) {
            for (int spins = 0; spins < kIdleSpins && epoch_.load(std::memory_order_acquire) == seen; spins++) relax();
            if (epoch_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> hold(mutex_);
                sleeping_.fetch_add(1);
                wake_.wait(hold, [&] { return epoch_.load() != seen; });
                sleeping_.fetch_sub(1);
            }
            seen = epoch_.load(std::memory_order_acquire);
            if (stop_) return;
            job_(argument_, index);
            barrier();
        }
    }

    static constexpr int kIdleSpins = 30000;
    const int size_;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    alignas(64) std::atomic<int> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    void (*job_)(void*, int) = nullptr;
    void* argument_ = nullptr;
};
