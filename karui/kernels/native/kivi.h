// KIVI caches (karui/inference/cache/kivi.py): blocks of 2 or 4-bit codes, and fp16 pages for the blocks that are not full yet.
//
// Codes lie in units of 32 slots, all layers and heads of a unit together. Of one head of a layer:
//   key codes    dim rows of 32 tokens        step and min per row: fp16 [dim], [dim], behind the codes
//   value codes  32 tokens x dim / 32 rows of 32 dimensions        step and min: fp16 [dim / 32][32 tokens], twice
// 16 bytes hold a row of 4-bit codes, element i and 16 + i in byte i, or two rows of 2-bit codes, the second in the upper half of each
// byte: rows d and d + 1 of the keys, the same dimensions of tokens t and t + 1 of the values.
//
// A code becomes step * code + min in fp32, a lookup in a register that holds the levels, and goes on as an fp32 key or value: in registers
// for up to four queries, through `Gathered` for more. Every sum has one order, as in attention.h, so both give the same bits.
#pragma once
#include "attention.h"

constexpr int UNIT = 32;
enum CodedType : int32_t { CACHE_KIVI4 = 3, CACHE_KIVI2 = 4 };

struct Coded {  // one layer
    char* data;
    int32_t bits, kv_heads, dim;  // dim: a multiple of 32
    float cap;                    // as in Cache
    int64_t stride;               // bytes from one unit to the next
    int64_t row_bytes() const { return (int64_t)dim * 4 * bits; }
    int64_t head_bytes() const { return 2 * row_bytes() + 8 * dim; }
    char* unit(int slot, int head) const { return data + slot / UNIT * stride + head * head_bytes(); }
};
struct Unit {  // of one head
    uint8_t *keys, *values;
    uint16_t *key_step, *key_min, *value_step, *value_min;
    Unit(const Coded& c, char* at) : keys((uint8_t*)at), values(keys + c.row_bytes()) {
        key_step = (uint16_t*)(values + c.row_bytes());
        key_min = key_step + c.dim;
        value_step = key_min + c.dim;
        value_min = value_step + c.dim;
    }
};

// ---- making codes -----------------------------------------------------------------------------------------------------------------

// 32 values to codes, step and min, bit for bit as karui/inference/cache/affine.py makes them.
static void code_row(const V* x, int bits, int odd, uint8_t* out, uint16_t* step, uint16_t* low) {
    V top = x[0], bottom = sub(set1(0.0f), x[0]);
    for (int i = 1; i < UNIT / W; i++) { top = vmax(top, x[i]); bottom = vmax(bottom, sub(set1(0.0f), x[i])); }
    const int largest = (1 << bits) - 1;
    const float least = -hmax(bottom);
    uint16_t half[W];
    float whole[W];
    store(half, set1((hmax(top) - least) / (float)largest));
    *step = half[0];
    store(whole, load(half));
    const float s = whole[0];
    store(half, set1(least));
    *low = half[0];
    int32_t codes[UNIT];
    for (int i = 0; i < UNIT / W; i++) {
        const V v = div(sub(x[i], set1(least)), set1(s > 0 ? s : 1.0f));
        const I c = round_int(vmin(vmax(v, set1(0.0f)), set1(s > 0 ? (float)largest : 0.0f)));
        memcpy(codes + i * W, &c, sizeof c);
    }
    for (int i = 0; i < 16; i++) {
        const int pair = codes[i] | codes[16 + i] << bits;
        if (odd) out[i] |= (uint8_t)(pair << 4);
        else out[i] = (uint8_t)pair;
    }
}

// One head of the unit at `slot` out of its fp16 rows, which begin at `row` of the pages.
static void code_unit(const Coded& c, const Cache& pages, int slot, int row, int head) {
    const Unit u(c, c.unit(slot, head));
    const int per = 4 / c.bits, groups = c.dim / UNIT;
    V x[UNIT / W];
    for (int d = 0; d < c.dim; d++) {
        for (int i = 0; i < UNIT; i += W) x[i / W] = load((const uint16_t*)pages.keys + key_at(pages, row + i / 16 * 16, head, d) + i % 16);
        code_row(x, c.bits, d % per, u.keys + d / per * 16, u.key_step + d, u.key_min + d);
    }
    for (int t = 0; t < UNIT; t++) {
        const uint16_t* value = (const uint16_t*)pages.values + value_at(pages, row + t, head);
        for (int g = 0; g < groups; g++) {
            for (int i = 0; i < UNIT; i += W) x[i / W] = load(value + g * UNIT + i);
            code_row(x, c.bits, t % per, u.values + (t / per * groups + g) * 16, u.value_step + g * UNIT + t, u.value_min + g * UNIT + t);
        }
    }
}

// ---- attention over codes ---------------------------------------------------------------------------------------------------------

struct CodedChunk { int units; char* at[KEYS / UNIT]; };

// f(row, its elements i.. and 16 + i..) for all rows of 32 codes that lie `apart` bytes from each other; lanes i = part * W and on.
template <int BITS, typename F>
INLINE void each_row(const uint8_t* codes, int rows, int apart, int part, const float* step, const float* low, F f) {
    for (int r = 0; r < rows; r += 4 / BITS, codes += apart) {
        const I x = iload_u8(codes + part * W);
        const Levels<BITS> first(step[r], low[r]);
        f(r, first.template at<0>(x), first.template at<BITS>(x));
        if (BITS == 2) {
            const Levels<BITS> second(step[r + 1], low[r + 1]);
            f(r + 1, second.template at<4>(x), second.template at<6>(x));
        }
    }
}
INLINE void widen(const uint16_t* from, int n, float* to) {
    for (int i = 0; i < n; i += W) store(to + i, load(from + i));
}

// scores[q][key] = query . key for NQ queries, summed over dimensions in order.
template <int BITS, int NQ> static void score_coded(const Coded& c, const CodedChunk& chunk, const float* const* query, float* scores) {
    alignas(64) float step[512], low[512];
    for (int n = 0; n < chunk.units; n++) {
        const Unit u(c, chunk.at[n]);
        widen(u.key_step, c.dim, step);
        widen(u.key_min, c.dim, low);
        for (int part = 0; part < 16 / W; part++) {
            V sum[NQ][2];
            for (int q = 0; q < NQ; q++) sum[q][0] = sum[q][1] = set1(0.0f);
            each_row<BITS>(u.keys, c.dim, 16, part, step, low, [&](int d, V a, V b) {
                for (int q = 0; q < NQ; q++) {
                    const V x = set1(query[q][d]);
                    sum[q][0] = fma(x, a, sum[q][0]);
                    sum[q][1] = fma(x, b, sum[q][1]);
                }
            });
            for (int q = 0; q < NQ; q++)
                for (int v = 0; v < 2; v++) store(scores + q * KEYS + n * UNIT + 16 * v + part * W, sum[q][v]);
        }
    }
}

// out[q][d] = sum over keys in order of weight[q][key] * value[key][d].
template <int BITS, int NQ> static void weigh_coded(const Coded& c, const CodedChunk& chunk, const float* weights, float* out) {
    alignas(64) float step[KEYS], low[KEYS];
    const int groups = c.dim / UNIT;
    for (int g = 0; g < groups; g++) {
        for (int n = 0; n < chunk.units; n++) {
            widen(Unit(c, chunk.at[n]).value_step + g * UNIT, UNIT, step + n * UNIT);
            widen(Unit(c, chunk.at[n]).value_min + g * UNIT, UNIT, low + n * UNIT);
        }
        for (int part = 0; part < 16 / W; part++) {
            V sum[NQ][2];
            for (int q = 0; q < NQ; q++) sum[q][0] = sum[q][1] = set1(0.0f);
            for (int n = 0; n < chunk.units; n++) {
                const float* p = weights + n * UNIT;
                each_row<BITS>(Unit(c, chunk.at[n]).values + g * 16, UNIT, 16 * groups, part, step + n * UNIT, low + n * UNIT, [&](int t, V a, V b) {
                    for (int q = 0; q < NQ; q++) {
                        const V x = set1(p[q * KEYS + t]);
                        sum[q][0] = fma(x, a, sum[q][0]);
                        sum[q][1] = fma(x, b, sum[q][1]);
                    }
                });
            }
            for (int q = 0; q < NQ; q++)
                for (int v = 0; v < 2; v++) store(out + q * c.dim + g * UNIT + 16 * v + part * W, sum[q][v]);
        }
    }
}

template <int BITS, int NQ>
static void attend_coded(const Coded& c, const CodedChunk& chunk, const float* const* query, const int* from, Partial* partial, float* out) {
    alignas(64) float p[NQ * KEYS];
    score_coded<BITS, NQ>(c, chunk, query, p);
    for (int q = 0; q < NQ; q++) partial[q] = soften(p + q * KEYS, from[q], chunk.units * UNIT, c.cap);
    weigh_coded<BITS, NQ>(c, chunk, p, out);
}

// A chunk's keys and values in fp32, laid out as a cache of that type has them.
template <int BITS> static void widen_chunk(const Coded& c, const CodedChunk& chunk, Gathered& own, Chunk& out) {
    alignas(64) float step[512], low[512];
    const int groups = c.dim / UNIT;
    out.count = chunk.units * UNIT;
    out.groups = chunk.units * UNIT / 16;
    for (int g = 0; g < out.groups; g++) {
        out.keys[g] = own.keys + g * 16 * c.dim;
        out.values[g] = own.values + g * 16 * c.dim;
    }
    for (int n = 0; n < chunk.units; n++) {
        const Unit u(c, chunk.at[n]);
        float *keys = own.keys + n * UNIT * c.dim, *values = own.values + n * UNIT * c.dim;
        widen(u.key_step, c.dim, step);
        widen(u.key_min, c.dim, low);
        for (int part = 0; part < 16 / W; part++)
            each_row<BITS>(u.keys, c.dim, 16, part, step, low, [&](int d, V a, V b) {
                store(keys + d * 16 + part * W, a);
                store(keys + (c.dim + d) * 16 + part * W, b);
            });
        for (int g = 0; g < groups; g++) {
            widen(u.value_step + g * UNIT, UNIT, step);
            widen(u.value_min + g * UNIT, UNIT, low);
            for (int part = 0; part < 16 / W; part++)
                each_row<BITS>(u.values + g * 16, UNIT, 16 * groups, part, step, low, [&](int t, V a, V b) {
                    store(values + t * c.dim + g * UNIT + part * W, a);
                    store(values + t * c.dim + g * UNIT + 16 + part * W, b);
                });
        }
    }
}

// attend_all() of attention.h over coded keys, all of which come before each query: query q sees those from from[q] on;
// to[q] = their number. pages: a cache of the same heads.
template <int BITS>
static void attend_all_coded(const Coded& c, const Cache& pages, const CodedChunk& chunk, int nq, const float* const* query, const int* from,
                             const int* to, Gathered& own, Partial* partial, float* out) {
    if (nq == 1) return attend_coded<BITS, 1>(c, chunk, query, from, partial, out);
    if (nq == 2) return attend_coded<BITS, 2>(c, chunk, query, from, partial, out);
    if (nq == 3) return attend_coded<BITS, 3>(c, chunk, query, from, partial, out);
    if (nq == 4) return attend_coded<BITS, 4>(c, chunk, query, from, partial, out);
    Chunk decoded;
    widen_chunk<BITS>(c, chunk, own, decoded);
    attend_all<float>(pages, decoded, nq, query, from, to, partial, out);
}

// ---- which blocks have pages ------------------------------------------------------------------------------------------------------

struct PageTable {
    int32_t size = 0;  // tokens of a block; 0: there are no pages
    std::vector<int32_t> of, open;  // the page of each block or -1; pages that no block has
    void start(int block, int64_t blocks, int pages) {
        size = block;
        of.assign((size_t)blocks, -1);
        open.resize(pages);
        for (int i = 0; i < pages; i++) open[i] = pages - 1 - i;
    }
    int row(int slot) const { return of[slot / size] * size + slot % size; }
    bool borrow(int block) {  // false: all pages are taken
        if (of[block] >= 0) return true;
        if (open.empty()) return false;
        of[block] = open.back();
        open.pop_back();
        return true;
    }
    bool settle(int block) {  // whether it had one
        if (of[block] < 0) return false;
        open.push_back(of[block]);
        of[block] = -1;
        return true;
    }
};
