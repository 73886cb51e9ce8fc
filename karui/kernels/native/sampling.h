// Draws of tokens from rows of logits: the same definition as karui/inference/sampling.py, whose order of steps is temperature, top-k,
// top-p, min-p, then the inverse of the cumulative distribution, ids ascending, in double.
#pragma once
#include <algorithm>
#include <vector>

#include "simd.h"

struct Draw {
    float temperature, top_p, min_p;  // temperature 0: the first of equal largest
    int32_t top_k;                    // 0: all
    double u;                         // in [0, 1)
};

class Sampler {  // holds the work space of one thread
public:
    void draw(const float* logits, int n, const Draw& want, int32_t& token, float& probability) {
        token = 0;
        probability = 0.0f;
        e_.resize(n + W);
        float largest = -INFINITY;
        if (want.temperature <= 0) {
            for (int i = 0; i < n; i++) if (logits[i] > largest) { largest = logits[i]; token = i; }
            probability = 1.0f;
            return;
        }
        scale(logits, n, want.temperature, largest);
        ids_.clear();
        if (want.top_k > 0 && want.top_k < n) {
            const float least = kth_largest(n, want.top_k);
            for (int i = 0; i < n; i++) if (e_[i] >= least) ids_.push_back(i);
            p_.resize(ids_.size() + W);
            for (size_t i = 0; i < ids_.size(); i++) p_[i] = e_[ids_[i]];
            for (size_t i = 0; i < ids_.size(); i += W) store(&p_[i], vexp(sub(load(&p_[i]), set1(largest))));
            p_.resize(ids_.size());
        } else {
            for (int i = 0; i < n; i += W) store(&e_[i], vexp(sub(load(&e_[i]), set1(largest))));
            if (want.top_p >= 1 && want.min_p <= 0) return pick_all(n, want.u, token, probability);
            double total = sum(e_.data(), n);
            // What lies below this is not in the nucleus (see _nucleus), and what is below min_p's share of the largest, 1, goes too.
            const float nucleus = want.top_p < 1 ? (float)(0.99 * (1 - want.top_p) / n * total) : 0.0f;
            for (int i = 0; i < n; i++) if (e_[i] >= nucleus) ids_.push_back(i);
            p_.resize(ids_.size());
            for (size_t i = 0; i < ids_.size(); i++) p_[i] = (float)(e_[ids_[i]] / total);
            cut(want);
            return pick(want.u, token, probability);
        }
        const double total = sum(p_.data(), (int)p_.size());
        for (float& p : p_) p = (float)(p / total);
        cut(want);
        pick(want.u, token, probability);
    }

private:
    void scale(const float* logits, int n, float temperature, float& largest) {
        V m = set1(-INFINITY);
        const V t = set1(temperature);
        int i = 0;
        for (; i + W <= n; i += W) { V v = div(load(logits + i), t); m = vmax(m, v); store(&e_[i], v); }
        largest = hmax(m);
        for (; i < n; i++) { e_[i] = logits[i] / temperature; largest = std::max(largest, e_[i]); }
        for (; i < n + W; i++) e_[i] = -INFINITY;
    }
    float kth_largest(int n, int k) {
        if (k > 256) {
            sorted_.assign(e_.begin(), e_.begin() + n);
            std::nth_element(sorted_.begin(), sorted_.begin() + k - 1, sorted_.end(), std::greater<float>());
            return sorted_[k - 1];
        }
        sorted_.clear();  // the k largest so far, largest first
        for (int i = 0; i < n; i += W) {
            if ((int)sorted_.size() == k && !(hmax(load(&e_[i])) > sorted_.back())) continue;
            for (int j = i; j < std::min(i + W, n); j++) {
                if ((int)sorted_.size() == k) { if (!(e_[j] > sorted_.back())) continue; sorted_.pop_back(); }
                sorted_.insert(std::upper_bound(sorted_.begin(), sorted_.end(), e_[j], std::greater<float>()), e_[j]);
            }
        }
        return sorted_.back();
    }
    // Keeps the smallest set of the likeliest whose mass reaches top_p; the lower id first among equals. Only the tokens that share the
    // border's bin (their float's exponent and 7 bits of mantissa) are sorted.
    void nucleus(float top_p) {
        auto bin_of = [](float p) { uint32_t b; memcpy(&b, &p, 4); return b >> 16; };  // p in [0, 1]: at most 0x3f80
        bins_.assign(0x3f81, 0.0);
        for (float p : p_) bins_[bin_of(p)] += p;
        double mass = 0;
        uint32_t border = 0x3f80;
        while (border > 0 && mass + bins_[border] < (double)top_p) mass += bins_[border--];
        order_.clear();
        for (size_t i = 0; i < p_.size(); i++) if (bin_of(p_[i]) == border) order_.push_back((int)i);
        std::stable_sort(order_.begin(), order_.end(), [&](int a, int b) { return p_[a] > p_[b]; });
        size_t keep = 0;
        while (keep < order_.size()) { mass += p_[order_[keep++]]; if (mass >= (double)top_p) break; }
        order_.resize(keep);
        std::sort(order_.begin(), order_.end());
        size_t kept = 0, next = 0;
        for (size_t i = 0; i < p_.size(); i++) {
            const uint32_t bin = bin_of(p_[i]);
            const bool listed = next < keep && order_[next] == (int)i;
            next += listed;
            if (bin > border || listed) { ids_[kept] = ids_[i]; p_[kept++] = p_[i]; }
        }
        ids_.resize(kept);
        p_.resize(kept);
    }
    void cut(const Draw& want) {
        if (want.top_p < 1) nucleus(want.top_p);
        if (want.min_p > 0 && !p_.empty()) {
            const float least = want.min_p * *std::max_element(p_.begin(), p_.end());
            size_t kept = 0;
            for (size_t i = 0; i < p_.size(); i++) if (p_[i] >= least) { ids_[kept] = ids_[i]; p_[kept++] = p_[i]; }
            ids_.resize(kept);
            p_.resize(kept);
        }
    }
    void pick(double u, int32_t& token, float& probability) {
        double total = 0, mass = 0;
        for (float p : p_) total += p;
        size_t last = 0;
        for (size_t i = 0; i < p_.size(); i++) {
            if (p_[i] > 0) last = i;
            if ((mass += p_[i]) > u * total) break;
        }
        if (p_.empty()) return;
        token = ids_[last];
        probability = (float)(p_[last] / total);
    }
    void pick_all(int n, double u, int32_t& token, float& probability) {
        const double total = sum(e_.data(), n);
        double mass = 0;
        int i = 0, last = 0;
        for (; i + kBlock < n; i += kBlock) {
            const double block = sum(&e_[i], kBlock);
            if (mass + block > u * total) break;
            mass += block;
        }
        for (int j = std::max(0, i - kBlock); j < i; j++) if (e_[j] > 0) last = j;
        for (; i < n; i++) {
            if (e_[i] > 0) last = i;
            if ((mass += e_[i]) > u * total) break;
        }
        token = last;
        probability = (float)(e_[last] / total);
    }
    static double sum(const float* x, int n) {
        double s[8] = {0};
        int i = 0;
        for (; i + 8 <= n; i += 8) for (int j = 0; j < 8; j++) s[j] += x[i + j];
        for (; i < n; i++) s[0] += x[i];
        return ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
    }

    static constexpr int kBlock = 1024;
    std::vector<float> e_, p_, sorted_;
    std::vector<double> bins_;
    std::vector<int> ids_, order_;
};
