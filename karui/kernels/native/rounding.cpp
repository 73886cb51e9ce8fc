// What finding a grid spends its time on: trying scales for every group, and GPTQ's columns within one block.
//
// Plain loops over vectors of 16 floats (the compiler splits them where registers are shorter). Sums are taken in a fixed order that
// depends on neither the number of threads nor the number of rows, so a resumed run finds the same codes.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

typedef float V __attribute__((vector_size(64), aligned(4), may_alias));
static const int L = 16;

static inline V all(float x) { V v; for (int i = 0; i < L; i++) v[i] = x; return v; }
static inline V load(const float* p) { V v; std::memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, const V& v) { std::memcpy(p, &v, sizeof v); }

// x rounded half to even within low..high (|.| < 2^22): clamping first gives the same codes, since both bounds are whole numbers.
static inline V code(const V& x, const V& low, const V& high) {
    const V magic = all(12582912.0f);
    V y = x < low ? low : x;
    y = y > high ? high : y;
    return (y + magic) - magic;
}

// E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6) and E4M3 (three mantissa bits, 2^-9 .. 448), nearest with ties to even, saturating.
static inline V e2m1(const V& x) {
    V y = code(x, all(-6.0f), all(6.0f)), m = x < all(0.0f) ? -x : x;
    V fine = code(x * all(2.0f), all(-12.0f), all(12.0f)) * all(0.5f), coarse = code(x * all(0.5f), all(-3.0f), all(3.0f)) * all(2.0f);
    return m < all(2.0f) ? fine : m < all(4.0f) ? y : coarse;
}

typedef int32_t I __attribute__((vector_size(64), aligned(4), may_alias));
static inline V e4m3(const V& x) {
    V y = x < all(-448.0f) ? all(-448.0f) : x, m;
    y = y > all(448.0f) ? all(448.0f) : y;
    I bits, one;
    for (int i = 0; i < L; i++) one[i] = 1;
    std::memcpy(&bits, &y, sizeof bits);
    bits = (bits + (one * 0x7ffff + ((bits >> 20) & one))) & (one * ~0xfffff);
    std::memcpy(&m, &bits, sizeof m);
    V small = code(y * all(512.0f), all(-8.0f), all(8.0f)) * all(1.0f / 512), magnitude = y < all(0.0f) ? -y : y;
    return magnitude < all(0.015625f) ? small : m;
}

static inline float sum(const V& v) {
    float half[8];
    for (int i = 0; i < 8; i++) half[i] = v[i] + v[i + 8];
    return ((half[0] + half[4]) + (half[2] + half[6])) + ((half[1] + half[5]) + (half[3] + half[7]));
}

// x rounded to the dtype scales are stored in: 0 fp32, 1 fp16, 2 bf16.
static float stored(float x, int type) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if (type == 0 || !std::isfinite(x)) return x;
    if (type == 1) {
        if (std::fabs(x) < 6.103515625e-05f) return std::rint(x * 16777216.0f) * (1.0f / 16777216.0f);
        if (std::fabs(x) >= 65520.0f) return std::copysign(INFINITY, x);
        bits += 0xfff + ((bits >> 13) & 1);
        bits &= ~0x1fffu;
    } else {
        bits += 0x7fff + ((bits >> 16) & 1);
        bits &= ~0xffffu;
    }
    std::memcpy(&x, &bits, 4);
    return x;
}

template <class F> static void spread(int64_t items, int64_t grain, int threads, F work) {
    int64_t n = std::max<int64_t>(1, std::min<int64_t>(threads, items / std::max<int64_t>(grain, 1)));
    int64_t each = (items + n - 1) / n;
    each = (each + grain - 1) / grain * grain;
    std::vector<std::thread> team;
    for (int64_t i = 1; i < n; i++)
        if (i * each < items) team.emplace_back([=] { work(i * each, std::min(items, (i + 1) * each)); });
    work(int64_t(0), std::min(items, each));
    for (auto& t : team) t.join();
}

namespace {
struct Group {  // one group's values and importances, padded to whole vectors with importance 0
    const float *x, *h;
    int vectors;
    V low, high;
    float error(float scale, float zero) const {
        V inv = all(1.0f / (scale == 0 ? 1.0f : scale)), s = all(scale == 0 ? 1.0f : scale), total = all(0);
        V bottom = low - all(zero), top = high - all(zero);
        for (int i = 0; i < vectors; i++) {
            V v = load(x + i * L), d = v - code(v * inv, bottom, top) * s;
            total += d * d * load(h + i * L);
        }
        return sum(total);
    }
    // Least-squares scale for the codes that `scale` gives.
    float fitted(float scale, float zero) const {
        V inv = all(1.0f / (scale == 0 ? 1.0f : scale)), above = all(0), below = all(0);
        V bottom = low - all(zero), top = high - all(zero);
        for (int i = 0; i < vectors; i++) {
            V v = load(x + i * L), c = code(v * inv, bottom, top), weighted = c * load(h + i * L);
            above += weighted * v;
            below += weighted * c;
        }
        return sum(above) / std::max(sum(below), 1e-30f);
    }
};
}  // namespace

extern "C" {

// x [rows, groups, n], h [groups, n] or null, scale and zero [rows, groups] in and out (zero null: symmetric), ratios [tried].
void karui_search_scale(const float* x, const float* h, float* scale, float* zero, int64_t rows, int groups, int n, int low,
                        int high, const float* ratios, int tried, int signs, int refine, int type, int threads) {
    int vectors = (n + L - 1) / L, padded = vectors * L;
    spread(rows, 1, threads, [=](int64_t first, int64_t last) {
        std::vector<float> values(padded, 0.0f), weights(int64_t(padded) * groups, 0.0f);
        for (int g = 0; g < groups; g++)
            for (int i = 0; i < n; i++) weights[int64_t(g) * padded + i] = h ? h[int64_t(g) * n + i] : 1.0f;
        for (int64_t r = first; r < last; r++)
            for (int g = 0; g < groups; g++) {
                int64_t at = r * groups + g;
                std::memcpy(values.data(), x + at * n, n * sizeof(float));
                Group group{values.data(), weights.data() + int64_t(g) * padded, vectors, all(low), all(high)};
                float start = scale[at], offset = zero ? zero[at] : 0.0f, best_scale = start, best_zero = offset;
                float best = group.error(start, offset);
                for (int t = 0; t < tried; t++)
                    for (int sign = 0; sign < signs; sign++) {
                        float s = stored(start * (sign ? -ratios[t] : ratios[t]), type), z = 0.0f;
                        if (s == 0) continue;
                        if (zero) z = std::min(std::max(std::rint(offset * start * ratios[t] / s), 0.0f), float(high));
                        float e = group.error(s, z);
                        if (e < best) { best = e; best_scale = s; best_zero = z; }
                    }
                for (int i = 0; i < refine; i++) {
                    float s = stored(group.fitted(best_scale, best_zero), type);
                    if (s == 0 || !std::isfinite(s)) break;
                    float e = group.error(s, best_zero);
                    if (!(e < best)) break;
                    best = e;
                    best_scale = s;
                }
                scale[at] = best_scale;
                if (zero) zero[at] = best_zero;
            }
    });
}

// One block of GPTQ: work [columns, rows] with row stride `rows`, rest [columns, columns] transposed (row k holds U_jk / U_jj for
// j < k), step and zero (or null) [columns, rows]; codes and err [columns, rows] come out. element: 0 whole numbers, 1 E2M1, 2 E4M3.
void karui_round_columns(const float* work, const float* rest, const float* step, const float* zero, int64_t rows, int columns,
                         int low, int high, float* codes, float* err, int element, int threads) {
    const int W = 4 * L;
    spread((rows + W - 1) / W, 1, threads, [=](int64_t first, int64_t last) {
        std::vector<float> tile(int64_t(columns) * W, 0.0f);  // errors of the columns done, of W rows
        float w[W], s[W], z[W], c[W];
        const V lo = all(low), hi = all(high);
        for (int64_t part = first; part < last; part++) {
            int64_t r = part * W;
            int live = int(std::min<int64_t>(W, rows - r));
            for (int k = 0; k < columns; k++) {
                int64_t at = int64_t(k) * rows + r;
                for (int i = 0; i < W; i++) {
                    w[i] = i < live ? work[at + i] : 0.0f;
                    s[i] = i < live ? step[at + i] : 1.0f;
                    z[i] = zero && i < live ? zero[at + i] : 0.0f;
                }
                V a[4];
                for (int v = 0; v < 4; v++) a[v] = load(w + v * L);
                for (int j = 0; j < k; j++) {
                    V u = all(rest[int64_t(k) * columns + j]);
                    for (int v = 0; v < 4; v++) a[v] -= u * load(&tile[int64_t(j) * W + v * L]);
                }
                for (int v = 0; v < 4; v++) {
                    V sv = load(s + v * L), zv = load(z + v * L), u = a[v] / sv;
                    V q = element == 0 ? code(u, lo - zv, hi - zv) : element == 1 ? e2m1(u) : e4m3(u);
                    store(c + v * L, q + zv);
                    store(&tile[int64_t(k) * W + v * L], a[v] - q * sv);
                }
                std::memcpy(codes + at, c, live * sizeof(float));
                std::memcpy(err + at, &tile[int64_t(k) * W], live * sizeof(float));
            }
        }
    });
}
}
