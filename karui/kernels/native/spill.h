// Layers whose weights lie in a file: a thread of its own reads them, in the order of the layers and round and round, into a few buffers,
// always ahead of the layer that is computed. A step then lasts as long as the longer of the two, reading or computing.
//
// A visit is one reading of one such layer; visit v lies in buffer v % BUFFERS until all threads of the team have left it.
#pragma once
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

class Spill {
public:
    static constexpr int BUFFERS = 3;
    static constexpr int64_t PAGE = 4096;  // offsets, sizes and buffers are multiples of it, as direct reads want
    struct Place { int64_t at, bytes; };

    ~Spill() { stop(); }

    // Reads `places` of the file from now on. False: no memory for the buffers.
    bool start(int fd, std::vector<Place> places) {
        stop();
        places_ = std::move(places);
        if (places_.empty()) return true;
        int64_t largest = 0;
        for (const Place& p : places_) largest = p.bytes > largest ? p.bytes : largest;
        for (char*& b : buffer_)
            if (posix_memalign((void**)&b, PAGE, largest)) return false;
        fd_ = fd;
        ready_ = freed_ = visit_ = 0;
        left_ = 0;
        failed_ = stopping_ = false;
        reader_ = std::thread([this] { read(); });
        return true;
    }
    void stop() {
        if (reader_.joinable()) {
            { std::lock_guard<std::mutex> hold(mutex_); stopping_ = true; }
            changed_.notify_all();
            reader_.join();
        }
        for (char*& b : buffer_) { free(b); b = nullptr; }
        places_.clear();
    }
    bool used() const { return !places_.empty(); }
    bool failed() const { return failed_.load(); }
    int64_t first_visit() const { return visit_; }                 // of the step that begins
    void step_done() { visit_ += (int64_t)places_.size(); }

    // Where visit v lies, once it is there. After a failed read what lies there is not to be used: `failed`.
    const char* wait(int64_t v) {
        if (ready_.load(std::memory_order_acquire) <= v) {
            std::unique_lock<std::mutex> hold(mutex_);
            changed_.wait(hold, [&] { return ready_.load() > v || failed_; });
        }
        return buffer_[v % BUFFERS];
    }
    // Called once by each of the team's `threads` when it is done with the visit that all of them are at.
    void leave(int threads) {
        if (left_.fetch_add(1) + 1 < threads) return;
        left_ = 0;
        { std::lock_guard<std::mutex> hold(mutex_); freed_++; }
        changed_.notify_all();
    }

private:
    void read() {
        for (int64_t v = 0;; v++) {
            {
                std::unique_lock<std::mutex> hold(mutex_);
                changed_.wait(hold, [&] { return stopping_ || v < freed_ + BUFFERS; });
                if (stopping_) return;
            }
            const Place& p = places_[v % places_.size()];
            char* to = buffer_[v % BUFFERS];
            int64_t done = 0;
            while (done < p.bytes) {
                const int64_t n = pread(fd_, to + done, p.bytes - done, p.at + done);
                if (n <= 0) break;
                done += n;
            }
            {
                std::lock_guard<std::mutex> hold(mutex_);
                if (done < p.bytes) failed_ = true;
                ready_.store(v + 1, std::memory_order_release);
            }
            changed_.notify_all();
            if (failed_) return;
        }
    }

    std::vector<Place> places_;
    char* buffer_[BUFFERS] = {};
    int fd_ = -1;
    std::thread reader_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::atomic<int64_t> ready_{0};
    int64_t freed_ = 0, visit_ = 0;
    std::atomic<int> left_{0};
    std::atomic<bool> failed_{false};
    bool stopping_ = false;
};
