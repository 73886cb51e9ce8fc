// Attention over latents in int8 as integer products: where the products of W_UK are of int8 activations, so are those with the cached codes.
//
// A head's query is rounded to int8, one scale per group of numbers that share one in the cache, as the activations of a linear are. The share
// of each key times the scale of its group is rounded to 14 bits, 127 levels and 127 of each, largest of the chunk's keys. Sums over the
// numbers of a group and over the keys of a chunk are exact; what is rounded depends on the query and the keys it sees alone.
//
// Codes of 64 keys are laid out anew for both sums: [width / 4][key][4], lanes of four numbers of a key, for the scores;
// [rank / (4 W)][key / 4][4][W][4], lanes of four keys, for the values. Codes are unsigned there, 128 more than in the cache.
#pragma once
#include "latent.h"

// Functions of their own leave compilers registers for the sums.
#define APART __attribute__((noinline))

constexpr int LEVELS = 127, MOST_GROUPS = 64;

// Whether this cache's codes are multiplied as they are.
static bool multiplies_codes(const LatentCache& c) { return c.type == CACHE_INT8 && c.integer && c.group % (4 * W) == 0 && c.scales() <= MOST_GROUPS; }

struct LatentCodes {  // a chunk's
    const uint8_t *across, *along;  // for the scores, for the values
    const float* scale;             // [groups][KEYS], zeros behind the last key
    int count, width, rank, group;
};

// own: room for KEYS rows of floats.
static APART LatentCodes lay_out(const LatentCache& c, const int32_t* slots, int count, char* own) {
    const int width = c.width(), rank = c.rank, padded = round_up(count, 16);
    uint8_t *rows = (uint8_t*)own, *across = rows + KEYS * width, *along = across + KEYS * width;
    float* scale = (float*)(along + KEYS * rank);
    for (int k = 0; k < count; k++) {
        for (int d = 0; d < width; d += 4 * W) store_bytes(rows + k * width + d, flipped(bytes(c.row(slots[k]) + d)));
        for (int g = 0; g < c.scales(); g++) scale[g * KEYS + k] = c.scale(slots[k])[g];
    }
    for (int g = 0; g < c.scales(); g++)
        for (int k = count; k < KEYS; k++) scale[g * KEYS + k] = 0.0f;
    for (int k = 0; k < padded; k += W)
        for (int d = 0; d < width; d += 16) {
            V row[4];
            for (int r = 0; r < 4; r++) row[r] = load_fours((const float*)(rows + (k + r) * width + d), width / 4);
            const V low[2] = {zip_low(row[0], row[1]), zip_low(row[2], row[3])}, high[2] = {zip_high(row[0], row[1]), zip_high(row[2], row[3])};
            float* to = (float*)across + d / 4 * KEYS + k;
            store(to, pairs_low(low[0], low[1]));
            store(to + KEYS, pairs_high(low[0], low[1]));
            store(to + 2 * KEYS, pairs_low(high[0], high[1]));
            store(to + 3 * KEYS, pairs_high(high[0], high[1]));
        }
    uint8_t* to = along;
    for (int d = 0; d < rank; d += 4 * W) {
        to = along + d * KEYS;
        for (int k = 0; k < padded; k += 4, to += 16 * W) {
            const uint8_t* from = rows + k * width + d;
            U out[4];
            interleave(bytes(from), bytes(from + width), bytes(from + 2 * width), bytes(from + 3 * width), out);
            for (int i = 0; i < 4; i++) store_bytes(to + i * 4 * W, out[i]);
        }
    }
    return {across, along, scale, count, width, rank, c.group};
}

// scores[q][key] of NQ queries in codes [NQ][width], with scale and what is added to each sum of a group [NQ][groups]. between(): called in between.
template <int NQ, typename F>
static APART void score_codes(const LatentCodes& c, const int8_t* query, const float* scale, const int32_t* shift, float* scores, F between) {
    constexpr int NV = W == 16 ? 4 : 2;
    const int groups = c.width / c.group;
    for (int first = 0; first < c.count; first += NV * W) {
        V total[NQ][NV];
        for (int q = 0; q < NQ; q++)
            for (int v = 0; v < NV; v++) total[q][v] = set1(0.0f);
        for (int g = 0; g < groups; g++) {
            typename Dot<8>::P sum[NQ][NV];
            Dot<8> dot;
            for (int q = 0; q < NQ; q++)
                for (int v = 0; v < NV; v++) sum[q][v] = dot.open(iset1(0));
            for (int d = g * c.group; d < (g + 1) * c.group; d += 4) {
                U x[NV];
                between();
                for (int v = 0; v < NV; v++) x[v] = bytes(c.across + (int64_t)d * KEYS + (first + v * W) * 4);
                for (int q = 0; q < NQ; q++) {
                    const U y = quad(query + q * c.width + d);
                    for (int v = 0; v < NV; v++) sum[q][v] = dot.step(sum[q][v], x[v], y);
                }
            }
            for (int q = 0; q < NQ; q++)
                for (int v = 0; v < NV; v++) {
                    const I whole = iadd(dot.close(iset1(0), sum[q][v]), iset1(shift[q * groups + g]));
                    total[q][v] = fma(to_float(whole), mul(set1(scale[q * groups + g]), load(c.scale + g * KEYS + first + v * W)), total[q][v]);
                }
        }
        for (int q = 0; q < NQ; q++)
            for (int v = 0; v < NV; v++) store(scores + q * KEYS + first + v * W, total[q][v]);
    }
}

struct Shares {  // of the keys of a chunk for one group: high + low / (2 LEVELS), times step
    int8_t high[KEYS], low[KEYS];
    float step;
    int32_t shift;  // added to 2 LEVELS * (sum of high) + (sum of low)
};
static APART void round_shares(const float* weights, const float* scale, Shares& out) {
    V largest = set1(0.0f);
    for (int i = 0; i < KEYS; i += W) largest = vmax(largest, mul(load(weights + i), load(scale + i)));
    const float most = hmax(largest), up = most > 0 ? LEVELS / most : 0.0f, step = most / LEVELS;
    I sum[2] = {iset1(0), iset1(0)};
    for (int i = 0; i < KEYS; i += W) {
        const V x = mul(load(weights + i), load(scale + i));
        const I high = round_int(mul(x, set1(up)));
        const V rest = fma(to_float(high), set1(-step), x);
        const I low = round_int(vmax(vmin(mul(rest, set1(2 * LEVELS * up)), set1((float)LEVELS)), set1(-(float)LEVELS)));
        store_i8(out.high + i, high);
        store_i8(out.low + i, low);
        sum[0] = iadd(sum[0], high);
        sum[1] = iadd(sum[1], low);
    }
    out.step = step / (2 * LEVELS);
    out.shift = (Dot<8>::bias - 128) * (2 * LEVELS * ihsum(sum[0]) + ihsum(sum[1]));
}

// out[q][d .. d + 4 W) = sum over keys of their shares times their codes.
template <int NQ> static APART void weigh_codes(const LatentCodes& c, const Shares* const* shares, int d, float* const* out) {
    typename Dot<8>::P high[NQ][4], low[NQ][4];
    Dot<8> dot;
    for (int q = 0; q < NQ; q++)
        for (int i = 0; i < 4; i++) high[q][i] = low[q][i] = dot.open(iset1(0));
    const uint8_t* from = c.along + (int64_t)d * KEYS;
    for (int k = 0; k < c.count; k += 4, from += 16 * W) {
        U x[4];
        for (int i = 0; i < 4; i++) x[i] = bytes(from + i * 4 * W);
        for (int q = 0; q < NQ; q++) {
            const U h = quad(shares[q]->high + k), l = quad(shares[q]->low + k);
            for (int i = 0; i < 4; i++) {
                high[q][i] = dot.step(high[q][i], x[i], h);
                low[q][i] = dot.step(low[q][i], x[i], l);
            }
        }
    }
    for (int q = 0; q < NQ; q++)
        for (int i = 0; i < 4; i++) {
            I whole = imul(dot.close(iset1(0), high[q][i]), iset1(2 * LEVELS));
            whole = iadd(iadd(whole, dot.close(iset1(0), low[q][i])), iset1(shares[q]->shift));
            store_fours(out[q] + d + 4 * i, 4, mul(to_float(whole), set1(shares[q]->step)));
        }
}

// attend_latents() in integers.
static void attend_codes(const LatentCache& c, const int32_t* slots, int count, int nq, const float* const* query, const int* from,
                         const int* to, float* own, Partial* partial, float* out, const char* const* next, int next_count) {
    constexpr int TOGETHER = 4;  // queries
    const int width = c.width(), rank = c.rank, groups = width / c.group, lines = (width + 63) / 64 * next_count;
    const LatentCodes codes = lay_out(c, slots, count, (char*)own);
    int8_t* rounded = (int8_t*)(codes.scale + groups * KEYS);
    int asked = 0, row = 0, line = 0, turn = 0;
    const int turns = std::max(1, (nq + TOGETHER - 1) / TOGETHER * (width / 4) * (W == 16 ? 1 : 4));
    auto ask = [&] {
        for (const int end = (int)((int64_t)lines * ++turn / turns); asked < end && row < next_count; asked++) {
            __builtin_prefetch(next[row] + line, 0, 2);
            line += 64;
            if (line >= width) line = 0, row++;
        }
    };
    for (int first = 0, n; first < nq; first += n) {
        n = std::min(TOGETHER, nq - first);
        alignas(64) float p[TOGETHER * KEYS];
        float scale[TOGETHER * MOST_GROUPS];
        int32_t shift[TOGETHER * MOST_GROUPS];
        for (int q = 0; q < n; q++)
            quantize_row(query[first + q], width, c.group, false, Dot<8>::bias - 128,
                         {rounded + q * width, scale + q * groups, shift + q * groups, CHUNK, 1});
        counted<TOGETHER>(n, 0, [&](auto m, int) { score_codes<decltype(m)::value>(codes, rounded, scale, shift, p, ask); });
        for (int q = 0; q < n; q++) partial[first + q] = soften(p + q * KEYS, from[first + q], to[first + q], 0.0f);
        constexpr int PAIR = W == 16 ? 2 : 1;
        Shares shares[TOGETHER];
        for (int g = 0; g < rank / c.group; g++) {
            for (int q = 0; q < n; q++) round_shares(p + q * KEYS, codes.scale + g * KEYS, shares[q]);
            for (int q = 0; q < n; q += PAIR)
                counted<PAIR>(std::min(PAIR, n - q), q, [&](auto m, int at) {
                    constexpr int NQ = decltype(m)::value;
                    const Shares* of[NQ];
                    float* result[NQ];
                    for (int i = 0; i < NQ; i++) of[i] = shares + at + i, result[i] = out + (int64_t)(first + at + i) * rank;
                    for (int d = g * c.group; d < (g + 1) * c.group; d += 4 * W) weigh_codes<NQ>(codes, of, d, result);
                });
        }
    }
}
