// One team of threads that runs a step together: every thread executes the same function and meets the others at barriers.
//
// Waiting spins first (a hand-over costs ~0.2 us) and then yields or sleeps, so that a team sharing its cores with other
// work does not burn them. Between steps the workers spin for two milliseconds, then sleep on a condition variable.
//
// When more threads want to run than there are cores, a thread that lost its core makes the whole team wait for a scheduler's turn
// (milliseconds) at the next barrier. So thread 0 keeps account of the time it waited; once a smaller team would have been faster, the team
// is halved for a while, then tried in full again. Results do not depend on the size of the team.
#pragma once
#include <sched.h>
#include <stdint.h>

#include <algorithm>
#include <atomic>
#include <chrono>
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
    explicit Team(int size) : size_(size), active_(size) {
        for (int i = 1; i < size; i++) workers_.emplace_back([this, i] { work(i); });
    }
    ~Team() {
        { std::lock_guard<std::mutex> hold(mutex_); stop_ = true; epoch_.fetch_add(1 << 16); }
        wake_.notify_all();
        for (auto& w : workers_) w.join();
    }
    int size() const { return size_; }
    int active() const { return active_; }  // threads of the current or next run

    // Calls job(argument, thread) on the active threads, the caller being thread 0; returns when all are done.
    void run(void (*job)(void*, int), void* argument) {
        if (active_ == 1 && size_ == 1) { job(argument, 0); return; }
        const int64_t begin = now();
        waited_ = 0;
        if (active_ > 1) {
            job_ = job; argument_ = argument;
            // The low bits tell a worker that wakes late whether it is part of this run.
            const uint64_t next = ((epoch_.load(std::memory_order_relaxed) >> 16) + 1) << 16 | (uint64_t)active_;
            { std::lock_guard<std::mutex> hold(mutex_); epoch_.store(next, std::memory_order_release); }
            if (sleeping_.load() > 0) wake_.notify_all();
        }
        job(argument, 0);
        barrier(0);
        resize(begin, now());
    }

    // Returns once every active thread has arrived.
    void barrier(int thread) {
        if (active_ == 1) return;
        int round = round_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == active_ - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            round_.store(round + 1, std::memory_order_release);
            return;
        }
        int spins = 0;
        for (; spins < kSpins && round_.load(std::memory_order_acquire) == round; spins++) relax();
        if (spins < kSpins) return;
        const int64_t begin = thread ? 0 : now();
        while (round_.load(std::memory_order_acquire) == round) sched_yield();
        if (!thread) waited_ += now() - begin;
    }

private:
    static int64_t now() {
        return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    // With n threads thread 0 worked for (ran - waited); half the team would take twice that. Sums decay over about eight runs.
    void resize(int64_t begin, int64_t end) {
        ran_ = ran_ * 7 / 8 + (end - begin);
        waits_ = waits_ * 7 / 8 + waited_;
        if (active_ > 1 && ran_ > 4 * (end - begin) && waits_ > ran_ / 2) {
            active_ /= 2;
            hold_ = std::min(hold_ * 2, kLongestHold);
            until_ = end + hold_;
            ran_ = waits_ = 0;
        } else if (active_ < size_ && end > until_) {
            active_ = std::min(size_, active_ * 2);
            ran_ = waits_ = 0;
            until_ = end + kGood;
        } else if (active_ == size_ && end > until_) {
            hold_ = kShortestHold;
        }
    }

    void work(int index) {
        uint64_t seen = 0;
        bool part = true;  // of the last run
        for (;;) {
            if (part)  // waking a sleeper takes longer than a small model's step leaves it idle
                for (const int64_t end = now() + kIdle; now() < end && epoch_.load(std::memory_order_acquire) == seen;)
                    for (int i = 0; i < 64 && epoch_.load(std::memory_order_acquire) == seen; i++) relax();
            if (epoch_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> hold(mutex_);
                sleeping_.fetch_add(1);
                wake_.wait(hold, [&] { return epoch_.load() != seen; });
                sleeping_.fetch_sub(1);
            }
            seen = epoch_.load(std::memory_order_acquire);
            if (stop_) return;
            part = index < (int)(seen & 0xffff);
            if (!part) continue;
            job_(argument_, index);
            barrier(index);
        }
    }

    static constexpr int kSpins = 4000;
    static constexpr int64_t kIdle = 2'000'000;  // ns
    static constexpr int64_t kShortestHold = 25'000'000, kLongestHold = 800'000'000, kGood = 200'000'000;  // ns
    const int size_;
    int active_;
    int64_t ran_ = 0, waits_ = 0, waited_ = 0, until_ = 0, hold_ = kShortestHold;
    std::vector<std::thread> workers_;
    std::mutex mutex_;
    std::condition_variable wake_;
    alignas(64) std::atomic<uint64_t> epoch_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> round_{0};
    std::atomic<int> sleeping_{0};
    std::atomic<bool> stop_{false};
    void (*job_)(void*, int) = nullptr;
    void* argument_ = nullptr;
};
