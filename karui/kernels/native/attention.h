// Paged attention with grouped queries over fp32, fp16 or int8 caches, as online softmax over fixed chunks of 64 keys.
//
// Cache of one layer, slots in groups of 16 (slot = block * block_size + offset), head_dim padded to a multiple of 16:
//   keys    [slot / 16][kv_head][dim][16]     so that lanes are keys and a score needs no horizontal sum
//   values  [slot / 16][kv_head][16][dim]     so that lanes are dimensions
//   scales  [slot / 16][kv_head][16] fp32, one for keys and one for values (int8: max|x| / 127 of the token's head)
//
// A query sees a list of keys, numbered in the order of the sequence. Key i always falls into chunk i / 64 and lane i % 64, and
// chunks are merged in order, so the result does not depend on how queries were batched or how chunks were spread over
// threads. A row of a speculation tree sees its own path as the list: same arithmetic as if the path had been decoded plainly.
#pragma once
#include "ops.h"

constexpr int KEYS = 64, GROUPS = KEYS / 16;
constexpr float NONE = -1e30f;  // the score of a key that is not seen

enum CacheType : int32_t { CACHE_FP32 = 0, CACHE_FP16 = 1, CACHE_INT8 = 2 };

struct Cache {
    void *keys, *values;
    float *key_scale, *value_scale;
    int32_t type, kv_heads, dim, dim_padded;
    float cap;       // scores s become cap tanh(s / cap); 0: they stay
    int64_t stride;  // bytes from one group of 16 slots to the next: all layers of a group lie together
};
constexpr int cache_bytes(int type) { return type == CACHE_FP32 ? 4 : type == CACHE_FP16 ? 2 : 1; }

INLINE int64_t key_at(const Cache& c, int slot, int head, int d) {
    return (slot / 16) * (c.stride / cache_bytes(c.type)) + ((int64_t)head * c.dim_padded + d) * 16 + slot % 16;
}
INLINE int64_t value_at(const Cache& c, int slot, int head) {
    return (slot / 16) * (c.stride / cache_bytes(c.type)) + ((int64_t)head * 16 + slot % 16) * c.dim_padded;
}
INLINE int64_t scale_at(const Cache& c, int slot, int head) { return (slot / 16) * (c.stride / 4) + (int64_t)head * 16 + slot % 16; }

// Writes one token's key and value of one head (dim_padded floats each, padding zero).
static void write_cache(const Cache& c, int slot, int head, const float* key, const float* value) {
    const int64_t k = key_at(c, slot, head, 0), v = value_at(c, slot, head);
    const int n = c.dim_padded;
    if (c.type == CACHE_FP32) {
        for (int d = 0; d < n; d++) ((float*)c.keys)[k + d * 16] = key[d];
        memcpy((float*)c.values + v, value, n * 4);
    } else if (c.type == CACHE_FP16) {
        for (int d = 0; d < n; d += W) {
            uint16_t t[W];
            store(t, load(key + d));
            for (int i = 0; i < W; i++) ((uint16_t*)c.keys)[k + (d + i) * 16] = t[i];
            store((uint16_t*)c.values + v + d, load(value + d));
        }
    } else {
        int8_t codes[1024];
        int32_t sum;
        const int64_t s = scale_at(c, slot, head);
        quantize_row(key, n, n, true, 0, {codes, c.key_scale + s, &sum, CHUNK, 1});
        for (int d = 0; d < n; d++) ((int8_t*)c.keys)[k + d * 16] = codes[d];
        quantize_row(value, n, n, true, 0, {(int8_t*)c.values + v, c.value_scale + s, &sum, CHUNK, 1});
    }
}

static void copy_slot(const Cache& c, int from, int to) {
    const int size = cache_bytes(c.type);
    for (int h = 0; h < c.kv_heads; h++) {
        for (int d = 0; d < c.dim_padded; d++)
            memcpy((char*)c.keys + key_at(c, to, h, d) * size, (char*)c.keys + key_at(c, from, h, d) * size, size);
        memcpy((char*)c.values + value_at(c, to, h) * size, (char*)c.values + value_at(c, from, h) * size, c.dim_padded * size);
        if (c.type == CACHE_INT8) {
            c.key_scale[scale_at(c, to, h)] = c.key_scale[scale_at(c, from, h)];
            c.value_scale[scale_at(c, to, h)] = c.value_scale[scale_at(c, from, h)];
        }
    }
}

// One slot of a layer out of the cache or, with `write`, into it: key and value [kv_heads][dim] and, for int8, their scales [kv_heads].
static void move_slot(const Cache& c, int slot, char* key, char* value, float* key_scale, float* value_scale, bool write) {
    const int size = cache_bytes(c.type);
    auto move = [&](void* own, void* other, int bytes) { write ? memcpy(own, other, bytes) : memcpy(other, own, bytes); };
    for (int h = 0; h < c.kv_heads; h++) {
        for (int d = 0; d < c.dim; d++) move((char*)c.keys + key_at(c, slot, h, d) * size, key + (h * c.dim + d) * size, size);
        move((char*)c.values + value_at(c, slot, h) * size, value + h * c.dim * size, c.dim * size);
        if (c.type == CACHE_INT8) {
            move(c.key_scale + scale_at(c, slot, h), key_scale + h, 4);
            move(c.value_scale + scale_at(c, slot, h), value_scale + h, 4);
        }
    }
}

// Up to 64 keys of one head, in groups of 16 lanes that lie in the cache or were gathered into `Gathered`.
struct Chunk {
    int count, groups;  // keys, and groups of 16 holding them
    const void *keys[GROUPS], *values[GROUPS];
    const float *key_scale[GROUPS], *value_scale[GROUPS];
};
// The groups of the chunk that a thread reads next, GROUPS of them, some more than once. They are asked for line by line while the one before is
// computed with, and into L2, which takes more of them at a time than L1: half of the time of asking for all at once.
struct Soon {
    const char *keys[GROUPS], *values[GROUPS];
};
struct Gathered {  // room for one chunk at the widest type
    float keys[KEYS * 512], values[KEYS * 512], key_scale[KEYS], value_scale[KEYS];
};

template <typename T> static void find_chunk(const Cache& c, int head, const int32_t* slots, int count, Gathered& own, Chunk& out) {
    out.count = count;
    out.groups = (count + 15) / 16;
    for (int g = 0; g < out.groups; g++) {
        const int32_t* s = slots + 16 * g;
        const int n = count - 16 * g < 16 ? count - 16 * g : 16;
        bool aligned = s[0] % 16 == 0;
        for (int i = 1; i < n && aligned; i++) aligned = s[i] == s[0] + i;
        if (aligned) {
            out.keys[g] = (const T*)c.keys + key_at(c, s[0], head, 0);
            out.values[g] = (const T*)c.values + value_at(c, s[0], head);
            out.key_scale[g] = c.key_scale + scale_at(c, s[0], head);
            out.value_scale[g] = c.value_scale + scale_at(c, s[0], head);
            continue;
        }
        T* keys = (T*)own.keys + g * 16 * c.dim_padded;
        T* values = (T*)own.values + g * 16 * c.dim_padded;
        for (int i = 0; i < n; i++) {
            for (int d = 0; d < c.dim_padded; d++) keys[d * 16 + i] = ((const T*)c.keys)[key_at(c, s[i], head, d)];
            memcpy(values + i * c.dim_padded, (const T*)c.values + value_at(c, s[i], head), c.dim_padded * sizeof(T));
            if (c.type == CACHE_INT8) {
                own.key_scale[16 * g + i] = c.key_scale[scale_at(c, s[i], head)];
                own.value_scale[16 * g + i] = c.value_scale[scale_at(c, s[i], head)];
            }
        }
        out.keys[g] = keys;
        out.values[g] = values;
        out.key_scale[g] = own.key_scale + 16 * g;
        out.value_scale[g] = own.value_scale + 16 * g;
    }
}

// scores[q][key] = query . key for NQ queries and NV vectors of the chunk's keys from `first` on, summed over dimensions in order. Asks for
// ASKED of the groups `soon`.
template <typename T, int NQ, int NV, int ASKED>
INLINE void score_vectors(const Cache& c, const Chunk& chunk, const float* const* query, int first, float* scores, const char* const* soon) {
    constexpr int each = 64 / (16 * (int)sizeof(T));  // dimensions in a line
    const T* keys[NV];
    V sum[NQ][NV];
    for (int v = 0; v < NV; v++) {
        int g = (first + v * W) / 16;
        if (g >= chunk.groups) g = chunk.groups - 1;  // AVX-512, odd number of groups: computed twice, stored in its place only
        keys[v] = (const T*)chunk.keys[g] + (first + v * W) % 16;
    }
    for (int q = 0; q < NQ; q++)
        for (int v = 0; v < NV; v++) sum[q][v] = set1(0.0f);
    for (int d = 0; d < c.dim; d++) {
        if (ASKED && d % each == 0)
            for (int g = 0; g < ASKED; g++) __builtin_prefetch(soon[g] + d / each * 64, 0, 2);
        V k[NV];
        for (int v = 0; v < NV; v++) k[v] = load(keys[v] + d * 16);
        for (int q = 0; q < NQ; q++) {
            const V x = set1(query[q][d]);
            for (int v = 0; v < NV; v++) sum[q][v] = fma(x, k[v], sum[q][v]);
        }
    }
    for (int v = 0; v < NV; v++) {
        const int at = first + v * W, g = at / 16;
        if (g >= chunk.groups) break;
        for (int q = 0; q < NQ; q++)
            store(scores + q * KEYS + at, sizeof(T) == 1 ? mul(sum[q][v], load(chunk.key_scale[g] + at % 16)) : sum[q][v]);
    }
}
template <typename T, int NQ, bool AHEAD>
static void score(const Cache& c, const Chunk& chunk, const float* const* query, float* scores, const Soon* soon) {
    const char* const* asked = AHEAD ? soon->keys : nullptr;
    if constexpr (W == 16) {
        if (chunk.groups > 2) score_vectors<T, NQ, 4, AHEAD ? GROUPS : 0>(c, chunk, query, 0, scores, asked);
        else if (chunk.groups) score_vectors<T, NQ, 2, AHEAD ? GROUPS : 0>(c, chunk, query, 0, scores, asked);
    } else {
        for (int first = 0; first < 16 * chunk.groups; first += 2 * W)
            score_vectors<T, NQ, 2, AHEAD ? 1 : 0>(c, chunk, query, first, scores, AHEAD ? asked + first / 16 : nullptr);
    }
}

// out[q][d] = sum over keys in order of weight[q][key] * value[key][d].
template <typename T, int NQ, int ND, bool AHEAD>
static void weigh_values(const Cache& c, const Chunk& chunk, const float* weights, int d, float* out, const Soon* soon) {
    V sum[NQ][ND];
    for (int q = 0; q < NQ; q++)
        for (int v = 0; v < ND; v++) sum[q][v] = set1(0.0f);
    for (int g = 0; g < chunk.groups; g++) {
        const int n = chunk.count - 16 * g < 16 ? chunk.count - 16 * g : 16;
        const T* value = (const T*)chunk.values[g] + d;
        for (int i = 0; i < n; i++, value += c.dim_padded) {
            for (int at = 0; AHEAD && at < ND * W * (int)sizeof(T); at += 64)
                __builtin_prefetch(soon->values[g] + (i * c.dim_padded + d) * (int)sizeof(T) + at, 0, 2);
            V x[ND];
            for (int v = 0; v < ND; v++) x[v] = load(value + v * W);
            for (int q = 0; q < NQ; q++) {
                const V p = set1(weights[q * KEYS + 16 * g + i]);
                for (int v = 0; v < ND; v++) sum[q][v] = fma(p, x[v], sum[q][v]);
            }
        }
    }
    for (int q = 0; q < NQ; q++)
        for (int v = 0; v < ND; v++) store(out + q * c.dim_padded + d + v * W, sum[q][v]);
}

// What one query has gathered from the keys so far.
struct Partial { float largest, sum; };

// Scores of a chunk to weights e^(score - largest), of keys [from, to). cap: see Cache.
INLINE Partial soften(float* s, int from, int to, float cap) {
    if (cap > 0) cap_row(s, KEYS, 1.0f, cap);
    for (int i = 0; i < from && i < KEYS; i++) s[i] = NONE;
    for (int i = to > 0 ? to : 0; i < KEYS; i++) s[i] = NONE;
    V m = load(s);
    for (int i = W; i < KEYS; i += W) m = vmax(m, load(s + i));
    const float largest = hmax(m);
    V total = set1(0.0f);
    for (int i = 0; i < KEYS; i += W) {
        const V e = vexp(sub(load(s + i), set1(largest)));
        total = add(total, e);
        store(s + i, e);
    }
    return {largest, hsum(total)};
}

// One chunk for NQ queries: query q sees the chunk's keys [from[q], to[q]). Fills partial[q] and out[q][dim_padded];
// largest = NONE when it sees none.
template <typename T, int NQ, bool AHEAD = false>
static void attend(const Cache& c, const Chunk& chunk, const float* const* query, const int* from, const int* to, Partial* partial, float* out,
                   const Soon* soon = nullptr) {
    alignas(64) float p[NQ * KEYS];
    score<T, NQ, AHEAD>(c, chunk, query, p, soon);
    for (int q = 0; q < NQ; q++) {
        float* s = p + q * KEYS;
        partial[q] = soften(s, from[q], to[q], c.cap);
        for (int i = 0; sizeof(T) == 1 && i < 16 * chunk.groups; i += W) store(s + i, mul(load(s + i), load(chunk.value_scale[i / 16] + i % 16)));
        // A lane past the last key may hold an old scale; its weight must be zero whatever that is.
        for (int i = chunk.count; i < 16 * chunk.groups; i++) s[i] = 0.0f;
    }
    constexpr int ND = W == 16 ? 4 : 2;
    int d = 0;
    for (; d + ND * W <= c.dim_padded; d += ND * W) weigh_values<T, NQ, ND, AHEAD>(c, chunk, p, d, out, soon);
    for (; d < c.dim_padded; d += W) weigh_values<T, NQ, 1, AHEAD>(c, chunk, p, d, out, soon);
}

// Merges a later chunk into the running result of one query.
INLINE void merge(Partial& run, float* out, const Partial& next, const float* next_out, int n) {
    if (next.largest <= NONE) return;
    const float largest = run.largest > next.largest ? run.largest : next.largest;
    const bool newer = next.largest > run.largest;  // the larger one's factor is e^0, exactly 1
    const float other = exp1(newer ? run.largest - largest : next.largest - largest), keep = newer ? other : 1.0f, take = newer ? 1.0f : other;
    run.sum = run.sum * keep + next.sum * take;
    for (int d = 0; d < n; d += W) store(out + d, fma(load(next_out + d), set1(take), mul(load(out + d), set1(keep))));
    run.largest = largest;
}

// f(n, first), n known to the compiler, of up to N.
template <int N, typename F> INLINE void counted(int n, int first, F f) {
    if (n == N) f(std::integral_constant<int, N>(), first);
    else if constexpr (N > 1) counted<N - 1>(n, first, f);
}

// attend() over any number of queries, four at a time; the first ones bring what comes soon.
template <typename T>
static void attend_all(const Cache& c, const Chunk& chunk, int nq, const float* const* query, const int* from, const int* to, Partial* partial, float* out,
                       const Soon* soon = nullptr) {
    for (int q = 0; q < nq; q += 4)
        counted<4>(nq - q < 4 ? nq - q : 4, q, [&](auto n, int i) {
            constexpr int NQ = decltype(n)::value;
            if (soon && !i) attend<T, NQ, true>(c, chunk, query, from, to, partial, out, soon);
            else attend<T, NQ>(c, chunk, query + i, from + i, to + i, partial + i, out + i * c.dim_padded);
        });
}
