// Training on a CPU: matrix products, attention inside documents with its rotation, RMSNorm and SwiGLU, forward and backward, in
// fp32 (products in bf16 where asked). Every result is computed by one thread in a fixed order, so that it does not depend on how many there are.
#include <algorithm>
#include <vector>

#include "parallel.h"
#include "sgemm.h"
#include "simd.h"

namespace {

constexpr int MR = W == 16 ? 8 : 4, NR = 2 * W, BLOCK = 32;  // a tile of C is MR x NR; BLOCK queries are handled together

// C[MR, NR] (+)= A[MR, k] B[k, NR]; A is read one value at a time, AM and AK apart (one of them is 1).
template <bool ADD, bool ROWS>
INLINE void tile(int k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
    V x[MR], y[MR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
        x[i] = ADD ? load(c + i * ldc) : set1(0.0f);
        y[i] = ADD ? load(c + i * ldc + W) : set1(0.0f);
    }
    const float* a3 = a + 3 * lda;  // two bases and small multiples of lda: addresses that need no register each
    for (int p = 0; p < k; p++) {
        const V b0 = load(b), b1 = load(b + W);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) {
            const V s = set1(ROWS ? (i < 3 ? a[i * lda] : a3[(i - 3) * lda]) : a[i]);
            x[i] = fma(s, b0, x[i]);
            y[i] = fma(s, b1, y[i]);
        }
        a += ROWS ? 1 : lda;
        a3 += ROWS ? 1 : lda;
        b += ldb;
    }
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++) {
        store(c + i * ldc, x[i]);
        store(c + i * ldc + W, y[i]);
    }
}

// m and n are multiples of MR and NR.
// ROWS: A is [m, k]; otherwise it is stored transposed, [k, m].
template <bool ADD, bool ROWS>
void matmul(int m, int n, int k, const float* a, int64_t lda, const float* b, int64_t ldb, float* c, int64_t ldc) {
    for (int j = 0; j < n; j += NR)
        for (int i = 0; i < m; i += MR) tile<ADD, ROWS>(k, a + (ROWS ? i * lda : i), lda, b + j, ldb, c + i * ldc + j, ldc);
}

inline int up(int n, int to) { return (n + to - 1) / to * to; }

// x cos + rotate_half(x) sin over one head of d values (a multiple of 2 W); without tables a copy.
INLINE void rotate(const float* x, const float* cosine, const float* sine, int d, float* out) {
    const int h = d / 2;
    for (int i = 0; i < h; i += W) {
        const V a = load(x + i), b = load(x + i + h);
        store(out + i, cosine ? sub(mul(a, load(cosine + i)), mul(b, load(sine + i))) : a);
        store(out + i + h, cosine ? fma(b, load(cosine + i + h), mul(a, load(sine + i + h))) : b);
    }
}

// The transpose of `rotate`, for gradients.
INLINE void rotate_back(const float* g, const float* cosine, const float* sine, int d, float* out) {
    const int h = d / 2;
    for (int i = 0; i < h; i += W) {
        const V a = load(g + i), b = load(g + i + h);
        store(out + i, cosine ? fma(a, load(cosine + i), mul(b, load(sine + i + h))) : a);
        store(out + i + h, cosine ? sub(mul(b, load(cosine + i + h)), mul(a, load(sine + i))) : b);
    }
}

}  // namespace

extern "C" {

// Row t, head h of q is at q + t * q_row + h * d; likewise k, v (kv_heads), and everything named after them. Documents are
// rows start[i]..start[i + 1]; with `shared`, document 0 is a prefix that every other document sees before its own rows.
struct Attention {
    const float *q, *k, *v, *cosine, *sine;  // cosine, sine [rows, d] or null
    float *out, *lse;                        // out [rows, heads, d], lse [heads, rows]
    const float* dout;                       // [rows, heads, d] with rows dout_row apart
    float *dq, *dk, *dv, *prefix;            // dq, dk, dv dense; prefix: 2 * documents * kv_heads * start[1] * d floats of scratch
    const int32_t* start;
    int64_t q_row, k_row, v_row, dout_row;
    int32_t documents, shared, heads, kv_heads, d, threads;
    float scaling;
    Gomp gomp;

    const float* cosine_of(int64_t row) const { return cosine ? cosine + row * d : nullptr; }
    const float* sine_of(int64_t row) const { return sine ? sine + row * d : nullptr; }
};

}  // extern "C"

namespace {

struct Keys {  // what one document and key-value head needs, laid out for the products
    int own, first, seen, padded;  // own rows, keys before them, keys in all, and padded to NR
    std::vector<float> transposed, rows, v_transposed, v_rows, scores, slopes, queries, douts, outs, dk, dv;

    void gather(const Attention& a, int document, int head, bool backward) {
        const int d = a.d, begin = a.start[document];
        own = a.start[document + 1] - begin;
        first = a.shared && document ? a.start[1] : 0;
        seen = first + own;
        padded = up(seen, NR);
        transposed.assign(size_t(d) * padded, 0.0f);
        rows.assign(size_t(padded) * d, 0.0f);
        v_rows.assign(size_t(padded) * d, 0.0f);
        if (backward) v_transposed.assign(size_t(d) * padded, 0.0f);
        for (int j = 0; j < seen; j++) {
            const int64_t row = j < first ? j : begin + j - first;
            float *r = &rows[size_t(j) * d], *w = &v_rows[size_t(j) * d];
            const float* value = a.v + row * a.v_row + head * d;
            rotate(a.k + row * a.k_row + head * d, a.cosine_of(row), a.sine_of(row), d, r);
            for (int i = 0; i < d; i++) w[i] = value[i];
        }
        for (int j0 = 0; j0 < seen; j0 += 16)  // by strips, so that writes stay within a few lines
            for (int i = 0; i < d; i++)
                for (int j = j0; j < std::min(seen, j0 + 16); j++) {
                    transposed[size_t(i) * padded + j] = rows[size_t(j) * d + i];
                    if (backward) v_transposed[size_t(i) * padded + j] = v_rows[size_t(j) * d + i];
                }
        scores.resize(size_t(BLOCK) * padded);
        queries.resize(size_t(BLOCK) * d);
        outs.resize(size_t(BLOCK) * d);
        if (backward) {
            slopes.resize(size_t(BLOCK) * padded);
            douts.resize(size_t(BLOCK) * d);
            dk.assign(size_t(padded) * d, 0.0f);
            dv.assign(size_t(padded) * d, 0.0f);
        }
    }

    // The rotated queries of a block, rows past the document zero; returns how many there are.
    int take(const Attention& a, int document, int head, int block) {
        const int count = std::min(BLOCK, own - block), d = a.d;
        for (int i = 0; i < BLOCK; i++) {
            const int64_t row = a.start[document] + block + i;
            float* q = &queries[size_t(i) * d];
            if (i < count) rotate(a.q + row * a.q_row + head * d, a.cosine_of(row), a.sine_of(row), d, q);
            else std::fill(q, q + d, 0.0f);
        }
        return count;
    }
};

thread_local Keys keys;

void forward_task(const Attention& a, int document, int kv_head) {
    const int d = a.d, group = a.heads / a.kv_heads, total = a.start[a.documents];
    Keys& s = keys;
    s.gather(a, document, kv_head, false);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int block = 0; block < s.own; block += BLOCK) {
            const int count = s.take(a, document, head, block), m = up(count, MR);
            const int n = std::min(s.padded, up(s.first + block + count, NR));
            matmul<false, true>(m, n, d, s.queries.data(), d, s.transposed.data(), s.padded, s.scores.data(), s.padded);
            float inverse[BLOCK];
            for (int i = 0; i < count; i++) {
                float* p = &s.scores[size_t(i) * s.padded];
                const int visible = s.first + block + i + 1;
                for (int j = visible; j < n; j++) p[j] = -INFINITY;
                V top = set1(-INFINITY);
                for (int j = 0; j < n; j += W) top = vmax(top, load(p + j));
                const float high = hmax(top);
                V sum = set1(0.0f);
                for (int j = 0; j < n; j += W) {  // vexp clamps its argument, so masked entries are set to 0 below
                    const V e = vexp(mul(sub(load(p + j), set1(high)), set1(a.scaling)));
                    store(p + j, e);
                }
                for (int j = visible; j < n; j++) p[j] = 0.0f;
                for (int j = 0; j < n; j += W) sum = add(sum, load(p + j));
                const float whole = hsum(sum);
                inverse[i] = 1.0f / whole;
                a.lse[int64_t(head) * total + a.start[document] + block + i] = high * a.scaling + logf(whole);
            }
            for (int i = count; i < m; i++) std::fill_n(&s.scores[size_t(i) * s.padded], n, 0.0f);
            matmul<false, true>(m, d, n, s.scores.data(), s.padded, s.v_rows.data(), d, s.outs.data(), d);
            for (int i = 0; i < count; i++) {
                float* out = a.out + (int64_t(a.start[document] + block + i) * a.heads + head) * d;
                for (int x = 0; x < d; x += W) store(out + x, mul(load(&s.outs[size_t(i) * d + x]), set1(inverse[i])));
            }
        }
}

void backward_task(const Attention& a, int document, int kv_head) {
    const int d = a.d, group = a.heads / a.kv_heads, total = a.start[a.documents], begin = a.start[document];
    Keys& s = keys;
    s.gather(a, document, kv_head, true);
    for (int head = kv_head * group; head < (kv_head + 1) * group; head++)
        for (int block = 0; block < s.own; block += BLOCK) {
            const int count = s.take(a, document, head, block), m = up(count, MR);
            const int n = std::min(s.padded, up(s.first + block + count, NR));
            float delta[BLOCK];
            for (int i = 0; i < m; i++) {
                float* g = &s.douts[size_t(i) * d];
                if (i >= count) { std::fill(g, g + d, 0.0f); continue; }
                const int64_t row = begin + block + i;
                const float *from = a.dout + row * a.dout_row + head * d, *out = a.out + (row * a.heads + head) * d;
                V sum = set1(0.0f);
                for (int x = 0; x < d; x += W) {
                    const V v = load(from + x);
                    store(g + x, v);
                    sum = fma(v, load(out + x), sum);
                }
                delta[i] = hsum(sum);
            }
            matmul<false, true>(m, n, d, s.queries.data(), d, s.transposed.data(), s.padded, s.scores.data(), s.padded);
            matmul<false, true>(m, n, d, s.douts.data(), d, s.v_transposed.data(), s.padded, s.slopes.data(), s.padded);
            for (int i = 0; i < m; i++) {
                float *p = &s.scores[size_t(i) * s.padded], *g = &s.slopes[size_t(i) * s.padded];
                if (i >= count) { std::fill_n(p, n, 0.0f); std::fill_n(g, n, 0.0f); continue; }
                const int visible = s.first + block + i + 1;
                const V lse = set1(a.lse[int64_t(head) * total + begin + block + i]);
                for (int j = 0; j < n; j += W) {
                    const V e = vexp(sub(mul(load(p + j), set1(a.scaling)), lse));
                    store(p + j, e);
                    store(g + j, mul(mul(e, sub(load(g + j), set1(delta[i]))), set1(a.scaling)));
                }
                for (int j = visible; j < n; j++) p[j] = g[j] = 0.0f;
            }
            matmul<true, false>(n, d, m, s.scores.data(), s.padded, s.douts.data(), d, s.dv.data(), d);
            matmul<true, false>(n, d, m, s.slopes.data(), s.padded, s.queries.data(), d, s.dk.data(), d);
            matmul<false, true>(m, d, n, s.slopes.data(), s.padded, s.rows.data(), d, s.outs.data(), d);
            for (int i = 0; i < count; i++) {
                const int64_t row = begin + block + i;
                rotate_back(&s.outs[size_t(i) * d], a.cosine_of(row), a.sine_of(row), d, a.dq + (row * a.heads + head) * d);
            }
        }
    for (int j = 0; j < s.seen; j++) {
        const int64_t row = j < s.first ? j : begin + j - s.first;
        const int64_t stash = (int64_t(document) * a.kv_heads + kv_head) * s.first + j, half = int64_t(a.documents) * a.kv_heads * s.first;
        float* dk = j < s.first ? a.prefix + stash * d : a.dk + (row * a.kv_heads + kv_head) * d;
        float* dv = j < s.first ? a.prefix + (half + stash) * d : a.dv + (row * a.kv_heads + kv_head) * d;
        rotate_back(&s.dk[size_t(j) * d], a.cosine_of(row), a.sine_of(row), d, dk);
        std::copy_n(&s.dv[size_t(j) * d], d, dv);
    }
}

}  // namespace

extern "C" {

int karui_train_sizes() { return int(sizeof(Attention)); }

void karui_attention(const Attention* a) {
    parallel(a->gomp, a->threads, a->documents * a->kv_heads,
             [&](int t) { forward_task(*a, t / a->kv_heads, t % a->kv_heads); });
}

void karui_attention_backward(const Attention* a) {
    parallel(a->gomp, a->threads, a->documents * a->kv_heads,
             [&](int t) { backward_task(*a, t / a->kv_heads, t % a->kv_heads); });
    if (!a->shared) return;
    const int first = a->start[1];
    const int64_t half = int64_t(a->documents) * a->kv_heads * first * a->d;
    for (int document = 1; document < a->documents; document++)  // the prefix is short: one thread, in the documents' order
        for (int head = 0; head < a->kv_heads; head++)
            for (int j = 0; j < first; j++) {
                const float* from = a->prefix + ((int64_t(document) * a->kv_heads + head) * first + j) * a->d;
                const int64_t to = (int64_t(j) * a->kv_heads + head) * a->d;
                for (int x = 0; x < a->d; x++) {
                    a->dk[to + x] += from[x];
                    a->dv[to + x] += from[half + x];
                }
            }
}

// The fastest `bf16` below that is faster here than 0: 1 with AVX512-BF16, 2 with AMX.
int karui_best_bf16() { return sgemm::Amx::allowed() ? 2 : sgemm::Bf16::DEEP > 1; }

// c [m, n] (+)= a b, rows of c `ldc` apart; a is [m, k] and b [k, n] with any strides, fast where one of them is 1. bf16: 0, or 1 to round
// the operands to it, or 2 to do so and multiply in AMX tiles, or 3 for three products there of operands split in two.
void karui_sgemm(const sgemm::Matrix* a, const sgemm::Matrix* b, float* c, int m, int n, int k, int64_t ldc, int plus, int bf16, int threads,
                 Gomp gomp) {
    using namespace sgemm;
    constexpr decltype(&product<Fp32>) ways[] = {product<Fp32>, product<Bf16>, product<Amx>, product<Amx3>};
    ways[bf16](gomp, threads, m, n, k, *a, *b, c, ldc, plus != 0);
}

// out [m, n] = x w + low v with low [m, r] = scaling x u; out and low are dense.
void karui_low_rank(const sgemm::Matrix* x, const sgemm::Matrix* w, const sgemm::Matrix* u, const sgemm::Matrix* v, int m, int n, int k, int r,
                    float scaling, float* low, float* out, int bf16, int threads, Gomp gomp) {
    using namespace sgemm;
    constexpr decltype(&low_rank<Fp32>) ways[] = {low_rank<Fp32>, low_rank<Bf16>, low_rank<Amx>, low_rank<Amx3>};
    ways[bf16](gomp, threads, m, n, k, r, *x, *w, *u, *v, scaling, low, out);
}

// out = weight * x * rstd over rows of width n (a multiple of W); rstd [rows] is kept for the backward pass.
void karui_rms_norm(const float* x, const float* weight, float* out, float* rstd, int rows, int n, float eps, int threads, Gomp gomp) {
    constexpr int STRIP = 16;
    parallel(gomp, threads, (rows + STRIP - 1) / STRIP, [&](int t) {
        for (int r = t * STRIP; r < std::min(rows, (t + 1) * STRIP); r++) {
            const float* from = x + int64_t(r) * n;
            float* to = out + int64_t(r) * n;
            V sum = set1(0.0f), sum2 = sum;
            int j = 0;
            for (; j + 2 * W <= n; j += 2 * W) {
                sum = fma(load(from + j), load(from + j), sum);
                sum2 = fma(load(from + j + W), load(from + j + W), sum2);
            }
            for (; j < n; j += W) sum = fma(load(from + j), load(from + j), sum);
            const float scale = 1.0f / sqrtf(hsum(add(sum, sum2)) / n + eps);
            rstd[r] = scale;
            for (j = 0; j < n; j += W) store(to + j, mul(load(weight + j), mul(load(from + j), set1(scale))));
        }
    });
}

// dx = rstd (g - normed mean(g normed)), g = dy weight.
void karui_rms_norm_backward(const float* dy, const float* x, const float* weight, const float* rstd, float* dx, int rows, int n,
                             int threads, Gomp gomp) {
    constexpr int STRIP = 16;
    parallel(gomp, threads, (rows + STRIP - 1) / STRIP, [&](int t) {
        for (int r = t * STRIP; r < std::min(rows, (t + 1) * STRIP); r++) {
            const float *g = dy + int64_t(r) * n, *from = x + int64_t(r) * n;
            float* to = dx + int64_t(r) * n;
            const V scale = set1(rstd[r]);
            V sum = set1(0.0f);
            for (int j = 0; j < n; j += W) sum = fma(mul(load(g + j), load(weight + j)), mul(load(from + j), scale), sum);
            const V along = set1(hsum(sum) / n);
            for (int j = 0; j < n; j += W)
                store(to + j, mul(scale, sub(mul(load(g + j), load(weight + j)), mul(mul(load(from + j), scale), along))));
        }
    });
}

// out = silu(gate) up over n values, n a multiple of W.
void karui_swiglu(const float* gate, const float* up, float* out, int64_t n, int threads, Gomp gomp) {
    constexpr int64_t STRIP = 16384;
    parallel(gomp, threads, int((n + STRIP - 1) / STRIP), [&](int t) {
        for (int64_t j = t * STRIP; j < std::min(n, (t + 1) * STRIP); j += W) {
            const V g = load(gate + j);
            store(out + j, mul(div(g, add(set1(1.0f), vexp(sub(set1(0.0f), g)))), load(up + j)));
        }
    });
}

// dgate, dup from dy, and the product itself into `out` when it is wanted again; dgate may be dy.
void karui_swiglu_backward(const float* dy, const float* gate, const float* up, float* dgate, float* dup, float* out, int64_t n,
                           int threads, Gomp gomp) {
    constexpr int64_t STRIP = 16384;
    parallel(gomp, threads, int((n + STRIP - 1) / STRIP), [&](int t) {
        for (int64_t j = t * STRIP; j < std::min(n, (t + 1) * STRIP); j += W) {
            const V g = load(gate + j), u = load(up + j), d = load(dy + j);
            const V s = div(set1(1.0f), add(set1(1.0f), vexp(sub(set1(0.0f), g))));
            const V silu = mul(g, s);
            store(dup + j, mul(d, silu));
            store(dgate + j, mul(mul(d, u), mul(s, add(set1(1.0f), mul(g, sub(set1(1.0f), s))))));
            if (out) store(out + j, mul(silu, u));
        }
    });
}

}  // extern "C"
