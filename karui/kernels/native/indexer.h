// The indexer of DeepSeek's sparse attention (DeepSeek-V3.2, arXiv 2512.02556, eq. 1-2): which keys a row attends to. As in
// karui/inference/models/latent.py a key's score is the sum over heads of w relu(q . k), and the `top` largest are chosen, among equals
// those that come first. Chosen keys keep their order, so a row that sees no more than `top` keys attends as without an indexer.
//
// Cache of one layer: keys as in attention.h, [slot / 16][dim][16], so that lanes are keys; int8: behind them scales
// turned alike, [dim / group][16] fp32. Codes are multiplied in integers where the products of linears are. A key's score is summed over
// dimensions, then over heads, whatever the key lies beside.
#pragma once
#include <float.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "attention.h"

constexpr int RUN = 256;  // slots of a layer that lie together

struct Indexer {  // of one layer; mirrored in karui/kernels/native/library.py
    int32_t heads, dim, top, padding;
    Linear q;                  // [heads * dim, query_rank]
    Linear k;                  // [dim, hidden]
    Linear weights;            // [heads, hidden]
    const float *norm, *bias;  // of the key, [dim] each
};

struct IndexCache {  // one layer; without data: it has no indexer
    char* data;
    int32_t type, dim, group;
    int32_t integer;  // codes are multiplied as they are, with int8 queries: [dim / 4][16][4], lanes are four numbers of a key
    int64_t unit, stride;  // as of latents
    int scales() const { return type == CACHE_INT8 ? dim / group : 0; }
    int64_t group_bytes() const { return 16 * ((int64_t)dim * cache_bytes(type) + 4 * scales()); }
    int place(int lane, int d) const { return integer ? (d / 4 * 16 + lane) * 4 + d % 4 : d * 16 + lane; }
    char* key(int slot, int d) const { return at(slot) + (int64_t)place(slot % 16, d) * cache_bytes(type); }
    char* at(int slot) const { return data + slot / RUN * stride + slot % RUN / 16 * unit; }
    float* scale(int slot, int g) const { return (float*)(at(slot) + (int64_t)16 * dim) + g * 16 + slot % 16; }
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
            for (int d = 0; d < c.dim; d++) keys[c.place(i, d)] = *(const T*)c.key(s[i], d);
            for (int j = 0; j < c.scales(); j++) scale[j * 16 + i] = *c.scale(s[i], j);
        }
        out.keys[g] = keys;
        out.scale[g] = scale;
    }
}

constexpr int SCORED = W == 16 ? 4 : 2;  // vectors of keys at once

struct RoundedQueries {  // int8 codes of queries, a scale per group of numbers that share one in the cache
    std::vector<int8_t> codes;
    std::vector<float> scale;
    std::vector<int32_t> shift;  // added to a group's sum
    void round(const IndexCache& c, int count, const float* query) {
        const int groups = c.dim / c.group;
        codes.resize((size_t)count * c.dim);
        scale.resize((size_t)count * groups);
        shift.resize((size_t)count * groups);
        for (int q = 0; q < count; q++)
            for (int g = 0; g < groups; g++)
                quantize_row(query + (int64_t)q * c.dim + g * c.group, c.group, c.group, false, Dot<8>::bias - 128,
                             {codes.data() + (int64_t)q * c.dim + g * c.group, &scale[q * groups + g], &shift[q * groups + g], CHUNK, 1});
    }
};

// sum[head][v] = q . k of NH queries from the `first` on and SCORED vectors of keys. between(d): called along the way.
template <typename T, int NH, typename F>
INLINE void dot_keys(const IndexCache& c, const float* query, int first, const T* const* keys, const float* const* scale, F between, V (&sum)[NH][SCORED]) {
    query += (int64_t)first * c.dim;
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < SCORED; v++) sum[h][v] = set1(0.0f);
    const int group = sizeof(T) == 1 ? c.group : c.dim;
    for (int g = 0; g < c.dim; g += group) {
        V factor[SCORED];
        for (int v = 0; v < SCORED; v++) factor[v] = sizeof(T) == 1 ? load(scale[v] + g / group * 16) : set1(1.0f);
        for (int d = g; d < g + group; d++) {
            V k[SCORED];
            between(d);
            for (int v = 0; v < SCORED; v++) k[v] = sizeof(T) == 1 ? mul(load(keys[v] + d * 16), factor[v]) : load(keys[v] + d * 16);
            for (int h = 0; h < NH; h++) {
                const V q = set1(query[h * c.dim + d]);
                for (int v = 0; v < SCORED; v++) sum[h][v] = fma(q, k[v], sum[h][v]);
            }
        }
    }
}
template <typename T, int NH, typename F>
INLINE void dot_keys(const IndexCache& c, const RoundedQueries& query, int first, const T* const* keys, const float* const* scale, F between, V (&sum)[NH][SCORED]) {
    const int groups = c.dim / c.group;
    Dot<8> dot;
    for (int h = 0; h < NH; h++)
        for (int v = 0; v < SCORED; v++) sum[h][v] = set1(0.0f);
    for (int g = 0; g < groups; g++) {
        Dot<8>::P whole[NH][SCORED];
        for (int h = 0; h < NH; h++)
            for (int v = 0; v < SCORED; v++) whole[h][v] = dot.open(iset1(0));
        for (int d = g * c.group; d < (g + 1) * c.group; d += 4) {
            U k[SCORED];
            between(d);
            for (int v = 0; v < SCORED; v++) k[v] = flipped(bytes(keys[v] + d * 16));
            for (int h = 0; h < NH; h++) {
                const U q = quad(query.codes.data() + (int64_t)(first + h) * c.dim + d);
                for (int v = 0; v < SCORED; v++) whole[h][v] = dot.step(whole[h][v], k[v], q);
            }
        }
        for (int h = 0; h < NH; h++) {
            const int at = (first + h) * groups + g;
            for (int v = 0; v < SCORED; v++)
                sum[h][v] = fma(to_float(iadd(dot.close(iset1(0), whole[h][v]), iset1(query.shift[at]))),
                                mul(set1(query.scale[at]), load(scale[v] + g * 16)), sum[h][v]);
        }
    }
}

// out[row * ld + key] of `rows` rows of queries [heads] and weights [heads], for all KEYS keys; no score is NaN. after: keys that are needed
// next, or null.
template <typename T, typename Queries>
static void score_index(const IndexCache& c, const IndexKeys& found, int heads, int rows, const Queries& query, const float* weight, float* out,
                        int64_t ld, const IndexKeys* after) {
    const int lanes = c.integer ? 4 : 1;  // bytes of a key that lie together
    for (int first = 0; first < 16 * found.groups; first += SCORED * W) {
        const T *keys[SCORED], *ahead[SCORED];
        const float* scale[SCORED];
        const float* ahead_scale[SCORED];
        for (int g = 0; after && g < SCORED * W / 16; g++) {
            const int next = std::min(first / 16 + g, after->groups - 1);
            ahead[g] = (const T*)after->keys[next];
            ahead_scale[g] = after->scale[next];
        }
        for (int v = 0; v < SCORED; v++) {
            const int at = first + v * W, g = std::min(at / 16, found.groups - 1);  // past the last: computed, never looked at
            keys[v] = (const T*)found.keys[g] + at % 16 * lanes;
            scale[v] = found.scale[g] + at % 16;
        }
        auto ask = [&](int d) __attribute__((always_inline)) {  // GCC takes a call that only asks for memory for one that does nothing
            if (d * sizeof(T) % 4 == 0)
                for (int g = 0; g < SCORED * W / 16; g++) __builtin_prefetch(ahead[g] + d * 16, 0, 2);
            if (sizeof(T) == 1 && d % c.group == 0)
                for (int g = 0; g < SCORED * W / 16; g++) __builtin_prefetch(ahead_scale[g] + d / c.group * 16, 0, 2);
        };
        for (int r = 0; r < rows; r++) {
            V total[SCORED];
            for (int v = 0; v < SCORED; v++) total[v] = set1(0.0f);
            auto take = [&](auto n, int h, auto between) {
                constexpr int NH = decltype(n)::value;
                V sum[NH][SCORED];
                dot_keys<T, NH>(c, query, r * heads + h, keys, scale, between, sum);
                for (int i = 0; i < NH; i++)
                    for (int v = 0; v < SCORED; v++)
                        total[v] = fma(set1(weight[(int64_t)r * heads + h + i]), vmax(sum[i][v], set1(0.0f)), total[v]);
            };
            int h = 0;
            for (; h + 4 <= heads; h += 4)
                if (after && !r && !h) take(std::integral_constant<int, 4>(), h, ask);
                else take(std::integral_constant<int, 4>(), h, [](int) {});
            for (; h < heads; h++) take(std::integral_constant<int, 1>(), h, [](int) {});
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
