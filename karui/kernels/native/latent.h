// Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1) in its absorbed form; karui/inference/models/latent.py has the
// equations and is the same computation in torch.
//
// W_UK is folded into the queries and W_UV put behind the weighted latents, whatever the number of rows, so all heads read one row per token,
// its latent and its rotated key: a key of `width` numbers, whose first `rank` are the value. Keys and values of heads are never made: a row's
// bits would then depend on how many rows came with it.
//
// W_UK and W_UV keep their codes. W_UK is read across: outputs are entries of the latent, inputs those of a head's query, and codes that
// share a scale along the latent are one group of outputs. Of each group the scales are multiplied into the query, codes alone are the matrix.
//
// Cache of one layer: rows of `width`, slots in groups of 16, [slot / 16][16][width]; int8: behind them scales [16][numbers / group] fp32.
// 16 groups lie together (RUN slots), then come those of the next layer: long enough that processors fetch ahead.
// Latent and key are padded to multiples of 16 each, with zeros. Chunks, lists of keys and merging are those of attention.h.
#pragma once
#include "indexer.h"

struct Latent {  // of one layer; mirrored in karui/kernels/native/library.py
    int32_t rank, rope, nope, value, query_rank;  // query_rank 0: queries are made of the hidden state
    int32_t group;           // numbers of the cache that share a scale in int8
    int32_t out_group;       // entries of the latent that share a scale of W_UK; rank when all do, or when it has none
    int32_t rounded;         // 1: the latent is rounded to int8 before it is cached, as the grid of W_UK and W_UV asks
    float scale;             // of the scores
    int32_t padding;
    Linear down;             // [query_rank, hidden]: makes the queries' latent; n 0: there is none
    Linear fold;             // [heads * rank, nope], each head's rows padded to a multiple of 16: W_UK across, without its scales
    Linear unfold;           // [heads * value, rank], padded alike: W_UV
    const float* fold_scale; // [heads][rank / out_group][nope], or null for ones
    const float* fold_shift; // what codes of the group are too large by, or null for zeros; the same shape
    const float *query_norm, *norm;
    const Indexer* indexer;  // null: the layer attends to all keys, or to those that the last indexer in front of it chose
    int64_t top;             // keys that a row attends to at most; 0: all
    int rank_padded() const { return round_up(rank, 16); }
    int value_padded() const { return round_up(value, PANEL); }
    int width() const { return rank_padded() + round_up(rope, 16); }
    int groups() const { return (rank + out_group - 1) / out_group; }
};
constexpr float LATENT_EPS = 1e-6f;  // of the latents' norms, whatever the config says of the others

// ---- the cache --------------------------------------------------------------------------------------------------------------------

struct LatentCache {  // one layer
    char* data;
    int32_t type, rank, rope, group, integer, padding;  // integer: codes may be multiplied as they are, see latent_int8.h
    int64_t unit, stride;  // bytes of a group, and from one run to the next
    int rank_padded() const { return round_up(rank, 16); }
    int width() const { return rank_padded() + round_up(rope, 16); }
    int scales() const { return type == CACHE_INT8 ? (rank + rope) / group : 0; }
    int64_t group_bytes() const { return 16 * ((int64_t)width() * cache_bytes(type) + 4 * scales()); }
    char* at(int slot) const { return data + slot / RUN * stride + slot % RUN / 16 * unit; }
    char* row(int slot) const { return at(slot) + (int64_t)(slot % 16) * width() * cache_bytes(type); }
    float* scale(int slot) const { return (float*)(at(slot) + (int64_t)16 * width()) + slot % 16 * scales(); }
    int place(int i) const { return i < rank ? i : i - rank + rank_padded(); }  // of the i-th number within a row
};

// One token's row [width], padding zero.
static void write_latent(const LatentCache& c, int slot, const float* x) {
    char* to = c.row(slot);
    if (c.type == CACHE_FP32) memcpy(to, x, c.width() * 4);
    else if (c.type == CACHE_FP16)
        for (int d = 0; d < c.width(); d += W) store((uint16_t*)to + d, load(x + d));
    else
        for (int g = 0; g < c.scales(); g++) {
            const int at = c.place(g * c.group);
            float largest = 1e-12f;
            for (int i = 0; i < c.group; i++) largest = std::max(largest, fabsf(x[at + i]));
            const float scale = c.scale(slot)[g] = largest / 127.0f;
            for (int i = 0; i < c.group; i++) ((int8_t*)to)[at + i] = (int8_t)lrintf(x[at + i] / scale);
        }
}

static void copy_latent(const LatentCache& c, int from, int to) {
    memcpy(c.row(to), c.row(from), c.width() * cache_bytes(c.type));
    memcpy(c.scale(to), c.scale(from), c.scales() * 4);
}

// One slot out of the cache or, with `write`, into it: the numbers [rank + rope] and, for int8, their scales.
static void move_latent(const LatentCache& c, int slot, char* data, float* scale, bool write) {
    const int size = cache_bytes(c.type);
    auto move = [&](void* own, void* other, int bytes) { write ? memcpy(own, other, bytes) : memcpy(other, own, bytes); };
    move(c.row(slot), data, c.rank * size);
    move(c.row(slot) + c.rank_padded() * size, data + c.rank * size, c.rope * size);
    move(c.scale(slot), scale, c.scales() * 4);
}

// Row of the cache as floats, at `own` where it is not stored as such.
INLINE const float* widened(const LatentCache& c, int slot, float* own) {
    const char* row = c.row(slot);
    const int width = c.width(), scales = c.scales(), group = c.group;
    if (c.type == CACHE_FP32) return (const float*)row;
    if (c.type == CACHE_FP16)
        for (int d = 0; d < width; d += W) store(own + d, load((const uint16_t*)row + d));
    else {
        const float* scale = c.scale(slot);
        const int8_t* codes = (const int8_t*)row;
        for (int g = 0; g < scales; g++) {
            const int first = c.place(g * group), last = first + group;
            int d = first;
            for (; d + W <= last; d += W) store(own + d, mul(load(codes + d), set1(scale[g])));
            for (; d < last; d++) own[d] = (float)codes[d] * scale[g];
        }
    }
    return own;
}

// ---- attention over a chunk ---------------------------------------------------------------------------------------------------------

constexpr int TOGETHER = W == 16 ? 6 : 3;  // queries whose sums fit into registers

// f(queries [first, first + N)) for all of them, N known to the compiler, as evenly as can be. No result depends on the cut.
template <typename F> INLINE void evenly(int count, F f) {
    const int parts = (count + TOGETHER - 1) / TOGETHER;
    for (int i = 0; i < parts; i++) counted<TOGETHER>(count * (i + 1) / parts - count * i / parts, count * i / parts, f);
}

// out[i] = sum of the lanes of x[i].
INLINE void sum_lanes(const V (&x)[4], float* out) {
    const V a = add(zip_low(x[0], x[1]), zip_high(x[0], x[1])), b = add(zip_low(x[2], x[3]), zip_high(x[2], x[3]));
    sum_fours(add(pairs_low(a, b), pairs_high(a, b)), out);
}

// scores[q][key] = query . row for NQ queries and `count` rows, to a multiple of four. before(k): called ahead of rows k to k + 3.
template <int NQ, typename F>
static void score_rows(const float* const* rows, int count, int width, const float* const* query, float* scores, F before) {
    for (int k = 0; k < count; k += 4) {
        before(k);
        V sum[NQ][4];
        for (int q = 0; q < NQ; q++)
            for (int j = 0; j < 4; j++) sum[q][j] = set1(0.0f);
        for (int d = 0; d < width; d += W) {
            V x[4];
            for (int j = 0; j < 4; j++) x[j] = load(rows[k + j] + d);
            for (int q = 0; q < NQ; q++) {
                const V y = load(query[q] + d);
                for (int j = 0; j < 4; j++) sum[q][j] = fma(y, x[j], sum[q][j]);
            }
        }
        for (int q = 0; q < NQ; q++) sum_lanes(sum[q], scores + q * KEYS + k);
    }
}

// out[q][d ..] = sum over rows in order of weight[q][key] * row[d ..].
template <int NQ, int ND>
static void weigh_rows(const float* const* rows, int count, const float* weights, int d, float* out, int ld) {
    V sum[NQ][ND];
    for (int q = 0; q < NQ; q++)
        for (int v = 0; v < ND; v++) sum[q][v] = set1(0.0f);
    for (int i = 0; i < count; i++) {
        V x[ND];
        for (int v = 0; v < ND; v++) x[v] = load(rows[i] + d + v * W);
        for (int q = 0; q < NQ; q++) {
            const V p = set1(weights[q * KEYS + i]);
            for (int v = 0; v < ND; v++) sum[q][v] = fma(p, x[v], sum[q][v]);
        }
    }
    for (int q = 0; q < NQ; q++)
        for (int v = 0; v < ND; v++) store(out + (int64_t)q * ld + d + v * W, sum[q][v]);
}

// attend_all() of attention.h over the rows of `count` slots; out [nq][rank_padded]. own: KEYS * width floats. next: rows that will likely be
// needed next; they are asked for a few at a time, as more would wait for each other and not for the arithmetic, and into the second cache: in
// the first they would push out the rows at hand.
static void attend_latents(const LatentCache& c, const int32_t* slots, int count, int nq, const float* const* query, const int* from,
                           const int* to, float* own, Partial* partial, float* out, const char* const* next, int next_count) {
    const float* rows[KEYS + 3];
    const int width = c.width(), ld = c.rank_padded(), bytes = width * cache_bytes(c.type);
    for (int i = 0; i < count; i++) rows[i] = widened(c, slots[i], own + (int64_t)i * width);
    for (int i = count; i % 4; i++) rows[i] = rows[0];
    int asked = 0;
    evenly(nq, [&](auto n, int q) {
        constexpr int NQ = decltype(n)::value, ND = 4;
        alignas(64) float p[NQ * KEYS];
        score_rows<NQ>(rows, count, width, query + q, p, [&](int k) {
            for (int end = next_count * (q * KEYS + NQ * (k + 4)) / (nq * KEYS); asked < end; asked++)
                for (int i = 0; i < bytes; i += 64) __builtin_prefetch(next[asked] + i, 0, 2);
        });
        for (int i = 0; i < NQ; i++) partial[q + i] = soften(p + i * KEYS, from[q + i], to[q + i], 0.0f);
        float* at = out + (int64_t)q * ld;
        int d = 0;
        for (; d + ND * W <= ld; d += ND * W) weigh_rows<NQ, ND>(rows, count, p, d, at, ld);
        for (; d < ld; d += W) weigh_rows<NQ, 1>(rows, count, p, d, at, ld);
    });
}

// ---- W_UK and W_UV ------------------------------------------------------------------------------------------------------------------

struct LatentLora {  // what a row's adapter adds to kv_b_proj, see Lora of model.cpp; rank 0: nothing
    int32_t rank, n;
    const float *a, *b, *row_scale;
};
struct LatentWork {  // per thread
    Work product;
    std::vector<float> x, y;
};

INLINE float dot(const float* x, const float* y, int n) {
    V sum = set1(0.0f);
    int i = 0;
    for (; i + W <= n; i += W) sum = fma(load(x + i), load(y + i), sum);
    float total = hsum(sum);
    for (; i < n; i++) total += x[i] * y[i];
    return total;
}
INLINE void add_scaled(const float* x, float factor, int n, float* out) {
    for (int i = 0; i < n; i++) out[i] += x[i] * factor;
}

// Group `g` of the folded queries of one head: out [rows][width] of q [rows][nope], times the scores' scale. lora(row): a LatentLora.
template <typename F>
static void fold(const Latent& m, int head, int g, const float* q, int ldq, int rows, float* out, int ldo, F lora, LatentWork& w) {
    const int first = g * m.out_group, last = std::min(first + m.out_group, m.rank), per_head = m.rank_padded() / PANEL;
    const float* scale = m.fold_scale ? m.fold_scale + ((int64_t)head * m.groups() + g) * m.nope : nullptr;
    const float* shift = m.fold_shift ? m.fold_shift + ((int64_t)head * m.groups() + g) * m.nope : nullptr;
    w.x.resize((size_t)rows * m.nope);
    w.y.resize(m.nope);
    auto query = [&](int r, float* x) {  // scaled, with the gains of the row's adapter
        const LatentLora l = lora(r);
        const float* gains = l.rank && l.row_scale ? l.row_scale + (int64_t)head * (m.nope + m.value) : nullptr;
        for (int d = 0; d < m.nope; d++) x[d] = q[(int64_t)r * ldq + d] * m.scale * (gains ? gains[d] : 1.0f);
    };
    for (int r = 0; r < rows; r++) {
        float* x = w.x.data() + (int64_t)r * m.nope;
        query(r, x);
        for (int d = 0; scale && d < m.nope; d++) x[d] *= scale[d];
    }
    const int panel = head * per_head + first / PANEL, panels = g + 1 == m.groups() ? per_head - first / PANEL : m.out_group / PANEL;
    product_panels(m.fold, w.x.data(), m.nope, rows, out - head * m.rank_padded(), ldo, false, w.product, panel, panel + panels);
    for (int r = 0; r < rows; r++) {
        float* row = out + (int64_t)r * ldo;
        if (shift) {
            const float excess = dot(w.x.data() + (int64_t)r * m.nope, shift, m.nope);
            for (int i = first; i < last; i++) row[i] -= excess;
        }
        const LatentLora l = lora(r);
        if (l.rank) query(r, w.y.data());
        for (int j = 0; j < l.rank; j++)
            add_scaled(l.a + (int64_t)j * m.rank + first, dot(l.b + (int64_t)j * l.n + head * (m.nope + m.value), w.y.data(), m.nope),
                       last - first, row + first);
    }
}

// Values of one head: out [rows][value] of its weighted latents [rows][rank].
template <typename F>
static void unfold(const Latent& m, int head, const float* latent, int ldl, int rows, float* out, int ldo, F lora, LatentWork& w) {
    const int padded = m.value_padded();
    w.y.resize((size_t)rows * padded);
    product_panels(m.unfold, latent, ldl, rows, w.y.data() - head * padded, padded, false, w.product, head * padded / PANEL,
                   (head + 1) * padded / PANEL);
    for (int r = 0; r < rows; r++) {
        float* y = w.y.data() + (int64_t)r * padded;
        const LatentLora l = lora(r);
        const int64_t at = (int64_t)head * (m.nope + m.value) + m.nope;
        for (int j = 0; j < l.rank; j++)
            add_scaled(l.b + (int64_t)j * l.n + at, dot(l.a + (int64_t)j * m.rank, latent + (int64_t)r * ldl, m.rank), m.value, y);
        for (int d = 0; l.rank && l.row_scale && d < m.value; d++) y[d] *= l.row_scale[at + d];
        memcpy(out + (int64_t)r * ldo, y, m.value * 4);
    }
}

// x [n] to the nearest of 255 levels of its largest: what a grid that rounds inputs multiplies with.
static void round_to_int8(float* x, int n) {
    float largest = 0.0f;
    for (int i = 0; i < n; i++) largest = std::max(largest, fabsf(x[i]));
    const float scale = largest / 127.0f;
    for (int i = 0; i < n && scale > 0; i++) x[i] = (float)lrintf(x[i] / scale) * scale;
}
