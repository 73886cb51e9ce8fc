// The indexer of DeepSeek's sparse attention (DeepSeek-V3.2, arXiv 2512.02556, eq. 1-2): which keys a row attends to. As in
// karui/inference/models/latent.py a key's score is the sum over heads of w relu(q . k), and the `top` largest are chosen, among equals
// those that come first. Chosen keys keep their order, so a row that sees no more than `top` keys attends as without an indexer.
//
// Cache of one layer: keys as in attention.h, [slot / 16][dim][16], so that lanes are keys; int8: behind them scales
// [16][dim / group] turned alike, [dim / group][16] fp32. A key's score is summed over dimensions, then over heads, whatever it lies beside.
#pragma once
#include <float.h>

#include <algorithm>

#include "attention.h"

struct Indexer {  // of one layer; mirrored in karui/kernels/native/library.py
    int32_t heads, dim, top, padding;
    Linear q;                  // [heads * dim, query_rank]
    Linear k;                  // [dim, hidden]
    Linear weights;            // [heads, hidden]
    const float *norm, *bias;  // of the key, [dim] each
};

struct IndexCache {  // one layer; without data: it has no indexer
    char* data;
    int32_t type, dim, group, padding;
    int64_t stride;  // bytes from one group of 16 slots to the next
    int scales() const { return type == CACHE_INT8 ? dim / group : 0; }
    int64_t group_bytes() const { return 16 * ((int64_t)dim * cache_bytes(type) + 4 * scales()); }
    char* key(int slot, int d) const { return data + slot / 16 * stride + ((int64_t)d * 16 + slot % 16) * cache_bytes(type); }
    float* scale(int slot, int g) const { return (float*)(data + slot / 16 * stride + (int64_t)16 * dim) + g * 16 + slot % 16; }
};

static void write_index(const IndexCache& c, int slot, const float* x) {
    if (c.type == CACHE_FP32)
        for (int d = 0; d < c.dim; d++) *(float*)c.key(slot, d) = x[d];
    else if (c.type == CACHE_FP16)
        for (int d = 0; d < c.dim; d++) {
            uint16_t half[W];
            store(half, set1(x[d]));
            memcpy(c.key(slot, d), half, 2);
        }
    else
        for (int g = 0; g < c.scales(); g++) {
            const float* part = x + g * c.group;
            float largest = 1e-12f;
            for (int i = 0; i < c.group; i++) largest = std::max(largest, fabsf(part[i]));
            const float scale = *c.scale(slot, g) = largest / 127.0f;
            for (int i = 0; i < c.group; i++) *c.key(slot, g * c.group + i) = (char)(int8_t)lrintf(part[i] / scale);
        }
}

static void copy_index(const IndexCache& c, int from, int to) {
    for (int d = 0; d < c.dim; d++) memcpy(c.key(to, d), c.key(from, d), cache_bytes(c.type));
    for (int g = 0; g < c.scales(); g++) *c.scale(to, g) = *c.scale(from, g);
}

// As move_latent(); a layer without an indexer gives zeros and takes nothing.
static void move_index(const IndexCache& c, int slot, char* data, float* scale, bool write) {
    const int size = cache_bytes(c.type);
    if (!c.data) {
        if (write) return;
        memset(data, 0, (size_t)c.dim * size);
        for (int g = 0; g < c.scales(); g++) scale[g] = 0.0f;
        return;
    }
    auto move = [&](void* own, void* other, int bytes) { write ? memcpy(own, other, bytes) : memcpy(other, own, bytes); };
    for (int d = 0; d < c.dim; d++) move(c.key(slot, d), data + d * size, size);
    for (int g = 0; g < c.scales(); g++) move(c.scale(slot, g), scale + g, 4);
}

// ---- scores -------------------------------------------------------------------------------------------------------------------------

struct IndexKeys {  // up to 64 keys, in groups of 16 lanes that lie in the cache or were gathered
    int groups;
    const void* keys[GROUPS];
    const float* scale[GROUPS];
};

// own: room for KEYS keys and their scales as floats, [GROUPS][dim][16] and [GROUPS][dim / group][16].
template <typename T> static void find_index(const IndexCache& c, const int32_t* slots, int count, float* own, IndexKeys& out) {
    out.groups = (count + 15) / 16;
    for (int g = 0; g < out.groups; g++) {
        const int32_t* s = slots + 16 * g;
        const int n = std::min(16, count - 16 * g);
        bool aligned = s[0] % 16 == 0;
        for (int i = 1; i < n && aligned; i++) aligned = s[i] == s[0] + i;
        out.keys[g] = c.key(s[0], 0);
        out.scale[g] = c.scale(s[0], 0);
        if (aligned) continue;
        T* keys = (T*)(own + (int64_t)g * c.dim * 16);
        float* scale = own + (int64_t)GROUPS * c.dim * 16 + (int64_t)g * c.scales() * 16;
        for (int i = 0; i < n; i++) {
            for (int d = 0; d < c.dim; d++) keys[d * 16 + i] = *(const T*)c.key(s[i], d);
            for (int j = 0; j < c.scales(); j++) scale[j * 16 + i] = *c.scale(s[i], j);
        }
        out.keys[g] = keys;
        out.scale[g] = scale;
    }
}

constexpr int SCORED = W == 16 ? 4 : 2;  // vectors of keys at once, and heads

// total[v] += w relu(q . k) of NH heads in order. after: with AHEAD, groups of keys to ask for, as many as are computed.
template <typename T, int NH, bool AHEAD>
INLINE void add_heads(const IndexCache& c, const T* const* keys, const float* const* scale, const float* query, const float* weight, V* total,
                      const T* const* after) {
    V sum[NH][SCORED];
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < SCORED; v++) sum[h][v] = set1(0.0f);
    const int group = sizeof(T) == 1 ? c.group : c.dim;
    for (int first = 0; first < c.dim; first += group) {
        V factor[SCORED];
        for (int v = 0; v < SCORED; v++) factor[v] = sizeof(T) == 1 ? load(scale[v] + first / group * 16) : set1(1.0f);
        for (int d = first; d < first + group; d++) {
            V k[SCORED];
            if (AHEAD && d * sizeof(T) % 4 == 0)
                for (int g = 0; g < SCORED * W / 16; g++) __builtin_prefetch(after[g] + d * 16, 0, 2);
            for (int v = 0; v < SCORED; v++) k[v] = sizeof(T) == 1 ? mul(load(keys[v] + d * 16), factor[v]) : load(keys[v] + d * 16);
            for (int h = 0; h < NH; h++) {
                const V q = set1(query[h * c.dim + d]);
                for (int v = 0; v < SCORED; v++) sum[h][v] = fma(q, k[v], sum[h][v]);
            }
        }
    }
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < SCORED; v++) total[v] = fma(set1(weight[h]), vmax(sum[h][v], set1(0.0f)), total[v]);
}

// out[row * ld + key] of `rows` rows of queries [heads][dim] and weights [heads], for all KEYS keys; no score is NaN. after: keys that are
// needed next and lie in the cache, or null.
template <typename T>
static void score_index(const IndexCache& c, const IndexKeys& found, int heads, int rows, const float* query, const float* weight, float* out,
                        int64_t ld, const IndexKeys* after) {
    for (int first = 0; first < 16 * found.groups; first += SCORED * W) {
        const T* keys[SCORED];
        const float* scale[SCORED];
        const T* ahead[SCORED];
        for (int g = 0; after && g < SCORED * W / 16; g++) ahead[g] = (const T*)after->keys[std::min(first / 16 + g, after->groups - 1)];
        for (int v = 0; v < SCORED; v++) {
            const int at = first + v * W, g = std::min(at / 16, found.groups - 1);  // past the last: computed, never looked at
            keys[v] = (const T*)found.keys[g] + at % 16;
            scale[v] = found.scale[g] + at % 16;
        }
        for (int r = 0; r < rows; r++) {
            const float *q = query + (int64_t)r * heads * c.dim, *w = weight + (int64_t)r * heads;
            V total[SCORED];
            for (int v = 0; v < SCORED; v++) total[v] = set1(0.0f);
            int h = 0;
            for (; h + 4 <= heads; h += 4)
                if (after && !r && !h) add_heads<T, 4, true>(c, keys, scale, q, w, total, ahead);
                else add_heads<T, 4, false>(c, keys, scale, q + (int64_t)h * c.dim, w + h, total, nullptr);
            for (; h < heads; h++) add_heads<T, 1, false>(c, keys, scale, q + (int64_t)h * c.dim, w + h, total, nullptr);
            for (int v = 0; v < SCORED; v++) store(out + r * ld + first + v * W, vmax(total[v], set1(-FLT_MAX)));
        }
    }
}

// ---- choice -------------------------------------------------------------------------------------------------------------------------

// Numbers in the order of floats, and back.
INLINE int32_t ordered(float x) {
    int32_t b;
    memcpy(&b, &x, 4);
    return b < 0 ? b ^ 0x7fffffff : b;
}
INLINE float unordered(int32_t b) { return bits_to_float((uint32_t)(b < 0 ? b ^ 0x7fffffff : b)); }

static int count_from(const float* x, int n, float limit) {  // x >= limit
    V count[2] = {set1(0.0f), set1(0.0f)};
    const V one = set1(1.0f);
    int i = 0;
    for (; i + 2 * W <= n; i += 2 * W)
        for (int v = 0; v < 2; v++) count[v] = add(count[v], zero_below(one, load(x + i + v * W), limit));
    int total = (int)hsum(count[0]) + (int)hsum(count[1]);
    for (; i < n; i++) total += x[i] >= limit;
    return total;
}

// Which of x [n], n > top, are the `top` largest, those in front among equals; in ascending order. The smallest of them is found by halving
// the range of numbers it can be: that takes as long whatever the numbers are, and stops where exactly `top` lie above.
static void choose(const float* x, int n, int top, int32_t* out) {
    V most = set1(-FLT_MAX), least = most;
    int i = 0;
    for (; i + W <= n; i += W) {
        most = vmax(most, load(x + i));
        least = vmax(least, sub(set1(0.0f), load(x + i)));
    }
    float largest = hmax(most), smallest = -hmax(least);
    for (; i < n; i++) largest = std::max(largest, x[i]), smallest = std::min(smallest, x[i]);
    int64_t low = ordered(smallest), high = (int64_t)ordered(largest) + 1;  // as many as are asked for from `low` on, fewer from `high` on
    int above = 0;                                                          // from `high` on
    int equals = INT32_MAX;                                                 // of the smallest that are taken
    while (true) {
        if (high - low == 1) { equals = top - above; break; }
        const int64_t middle = low + (high - low) / 2;
        const int count = count_from(x, n, unordered((int32_t)middle));
        if (count >= top) low = middle;
        else high = middle, above = count;
        if (count == top) break;
    }
    const float limit = unordered((int32_t)low);
    int held = 0;
    for (i = 0; i < n; i += W) {
        if (i + W <= n && hmax(load(x + i)) < limit) continue;
        for (int j = i; j < std::min(i + W, n) && held < top; j++)
            if (x[j] > limit || (x[j] == limit && equals-- > 0)) out[held++] = j;
    }
}
