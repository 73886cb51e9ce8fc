// Row-wise operations between the matrix products: norms, activation quantization, rotary embedding, SwiGLU, embedding rows.
#pragma once
#include <vector>

#include "gemm.h"
#include "simd.h"
#include "tiles.h"

static inline int round_up(int a, int b) { return (a + b - 1) / b * b; }

// What block sums of a linear's activations are multiplied with (see Activations).
static inline int32_t factor(const Linear& w) {
    if (w.zeros) return 1;
    const int bias = w.kind == E2M1 ? Dot<HALVES>::bias : w.bits == 8 ? Dot<8>::bias : Dot<4>::bias;
    return bias - w.zero;
}

// Whether two linears read the same int8 activations, or neither any.
static inline bool same_codes(const Linear& x, const Linear& y) {
    return integer(x) == integer(y) && x.block == y.block && x.per_token == y.per_token && x.k_padded == y.k_padded && factor(x) == factor(y);
}

// Splits [0, count) evenly among n threads; thread t gets [first, last).
static inline void share(int count, int t, int n, int& first, int& last) {
    first = (int)((int64_t)count * t / n);
    last = (int)((int64_t)count * (t + 1) / n);
}

// 1 / sqrt(mean(x^2) + eps), over n values.
static float inverse_rms(const float* x, int n, float eps) {
    V s = set1(0.0f);
    int i = 0;
    for (; i + W <= n; i += W) s = fma(load(x + i), load(x + i), s);
    float total = hsum(s);
    for (; i < n; i++) total += x[i] * x[i];
    return 1.0f / sqrtf(total / (float)n + eps);
}

// out = x * r * weight. `out` may be x.
static void scale_row(const float* x, float r, const float* weight, int n, float* out) {
    int i = 0;
    for (; i + W <= n; i += W) store(out + i, mul(mul(load(x + i), set1(r)), load(weight + i)));
    for (; i < n; i++) out[i] = x[i] * r * weight[i];
}

// out = x / sqrt(mean(x^2) + eps) * weight, over n values. `out` may be x.
static void rms_norm(const float* x, const float* weight, int n, float eps, float* out) {
    scale_row(x, inverse_rms(x, n, eps), weight, n, out);
}

// The same of what is left without its mean.
static void layer_norm(const float* x, const float* weight, int n, float eps, float* out) {
    V s = set1(0.0f);
    int i = 0;
    for (; i + W <= n; i += W) s = add(s, load(x + i));
    float total = hsum(s);
    for (; i < n; i++) total += x[i];
    for (i = 0; i < n; i++) out[i] = x[i] - total / (float)n;
    rms_norm(out, weight, n, eps, out);
}

// Where one row of int8 activations is written: chunk c of 32 codes at codes + c * chunk_step, block b's scale at scale + b * step.
struct CodeRow {
    int8_t* codes;
    float* scale;
    int32_t* sum;
    int chunk_step, step;
};
INLINE CodeRow tiled_row(int8_t* codes, float* scale, int32_t* sum, int64_t row, int k_padded, int blocks) {  // see Activations
    const int64_t tile = row / TILE * TILE, r = row % TILE;
    return {codes + tile * k_padded + r * CHUNK, scale + tile * blocks + r, sum + tile * blocks + r, TILE * CHUNK, TILE};
}

// The same row from input `first` on, a multiple of CHUNK and of the block of inputs.
INLINE CodeRow from_input(CodeRow row, int first, int block) {
    row.codes += first / CHUNK * row.chunk_step;
    row.scale += (int64_t)(first / block) * row.step;
    row.sum += (int64_t)(first / block) * row.step;
    return row;
}

// Symmetric int8, round to nearest even: scale = max|x| / 127, code = round(x / scale), over the whole row (per_token) or each
// block of inputs. x has k_padded readable values, zeros from k on. sum = sum of the block's codes times `factor`.
static void quantize_row(const float* x, int k_padded, int block, bool per_token, int32_t factor, const CodeRow& out) {
    float row_max = 0;
    if (per_token) {
        V m = set1(0.0f);
        for (int i = 0; i < k_padded; i += W) m = vmax(m, vabs(load(x + i)));
        row_max = hmax(m);
    }
    for (int b = 0, i = 0; i < k_padded; b++) {
        const int end = i + block;
        float largest = row_max;
        if (!per_token) {
            V m = set1(0.0f);
            for (int j = i; j < end; j += W) m = vmax(m, vabs(load(x + j)));
            largest = hmax(m);
        }
        const float s = largest / 127.0f;
        const V divisor = set1(s > 0 ? s : 1.0f), limit = set1(127.0f);
        I total = iset1(0);
        for (; i < end; i += W) {
            V v = div(load(x + i), divisor);
            I c = round_int(vmax(vmin(v, limit), set1(-127.0f)));
            store_i8(out.codes + i / CHUNK * out.chunk_step + i % CHUNK, c);
            total = iadd(total, c);
        }
        out.scale[b * out.step] = s;
        out.sum[b * out.step] = ihsum(total) * factor;
    }
}

// Rotate-half RoPE of one head in place, then times `scale`. cos, sin: [dim / 2].
static void rotate(float* x, const float* cosine, const float* sine, int dim, float scale) {
    const int half = dim / 2;
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[i + half];
        x[i] = (a * cosine[i] - b * sine[i]) * scale;
        x[i + half] = (b * cosine[i] + a * sine[i]) * scale;
    }
}

// out = lanes(x, y), vector by vector; `out` may be x.
template <typename F> INLINE void each(const float* x, const float* y, int n, float* out, F lanes) {
    int i = 0;
    for (; i + W <= n; i += W) store(out + i, lanes(load(x + i), load(y + i)));
    if (i < n) {
        float a[W] = {0}, b[W] = {0};
        memcpy(a, x + i, (n - i) * 4);
        memcpy(b, y + i, (n - i) * 4);
        store(a, lanes(load(a), load(b)));
        memcpy(out + i, a, (n - i) * 4);
    }
}

// out = silu(gate) * up. `out` may be `gate`.
static void swiglu(const float* gate, const float* up, int n, float* out) {
    each(gate, up, n, out, [](V g, V u) { return mul(div(g, add(set1(1.0f), vexp(sub(set1(0.0f), g)))), u); });
}

// out = g sigmoid(alpha g) (u + 1), g = min(gate, limit), u = up within +-limit (gpt-oss). `out` may be `gate`.
static void clamped_glu(const float* gate, const float* up, int n, float alpha, float limit, float* out) {
    auto lanes = [&](V g, V u) {
        g = vmin(g, set1(limit));
        u = vmax(vmin(u, set1(limit)), set1(-limit));
        return mul(div(g, add(set1(1.0f), vexp(mul(set1(-alpha), g)))), add(u, set1(1.0f)));
    };
    each(gate, up, n, out, lanes);
}

// x = cap tanh(factor x / cap), or factor x where cap is 0; in place.
static void cap_row(float* x, int n, float factor, float cap) {
    const V scale = set1(cap > 0 ? 2.0f * factor / cap : factor), one = set1(1.0f), two = set1(2.0f);
    each(x, x, n, x, [&](V v, V) {
        v = mul(v, scale);
        return cap > 0 ? mul(set1(cap), sub(one, div(two, add(vexp(v), one)))) : v;  // tanh(y) = 1 - 2 / (e^2y + 1)
    });
}

// What a feed-forward part does with its gate: out = act(gate) * up. `out` may be `gate`.
enum Activation : int32_t { SILU = 0, GELU_TANH = 1, RELU2 = 2 };
static void gated(Activation act, const float* gate, const float* up, int n, float* out) {
    const V zero = set1(0.0f), one = set1(1.0f);
    if (act == SILU) swiglu(gate, up, n, out);
    else if (act == RELU2) each(gate, up, n, out, [&](V g, V u) { return mul(mul(vmax(g, zero), vmax(g, zero)), u); });
    else each(gate, up, n, out, [&](V g, V u) {  // x / (1 + exp(-2 sqrt(2 / pi) (x + 0.044715 x^3)))
        const V inner = mul(g, fma(mul(g, g), set1(0.044715f), one));
        return mul(div(g, add(one, vexp(mul(set1(-1.5957691216057308f), inner)))), u);
    });
}

// Row `row` as k floats (the token embedding).
static void decode_row(const Linear& w, int row, float* out) {
    alignas(64) float own[CHUNK * PANEL];
    for (int c = 0; c * CHUNK < w.k; c++) {
        const float* t = own;
        if (w.kind == FP32) t = (const float*)w.codes + ((int64_t)(row / PANEL) * (w.k_padded / CHUNK) + c) * CHUNK * PANEL;
        else decode_chunk(w, row / PANEL, c, own);
        for (int i = 0; i < CHUNK && c * CHUNK + i < w.k; i++) out[c * CHUNK + i] = t[i * PANEL + row % PANEL];
    }
}

// Buffers of `product`; they grow and are kept.
struct Work {
    std::vector<float> x, scale, panel;
    std::vector<int8_t> codes;
    std::vector<int32_t> sum;
};

// One linear alone, on the calling thread: y [rows, n] = x [rows, k] W^T (+ bias), or added to y. Only its panels [first, last).
static void product_panels(const Linear& w, const float* x, int ldx, int rows, float* y, int ldy, bool accumulate, Work& work, int first,
                           int last) {
    const int kp = w.k_padded, blocks = kp / w.block, tiled = round_up(rows, TILE);
    work.x.assign((size_t)rows * kp + PANEL, 0.0f);
    work.panel.resize((size_t)kp * PANEL);
    for (int r = 0; r < rows; r++) memcpy(work.x.data() + (int64_t)r * kp, x + (int64_t)r * ldx, w.k * 4);
    if (integer(w)) {
        work.codes.resize((size_t)tiled * kp);
        work.scale.resize((size_t)tiled * blocks);
        work.sum.resize((size_t)tiled * blocks);
        for (int r = 0; r < rows; r++)
            quantize_row(work.x.data() + (int64_t)r * kp, kp, w.block, w.per_token, factor(w),
                         tiled_row(work.codes.data(), work.scale.data(), work.sum.data(), r, kp, blocks));
    }
    multiply(w, {work.x.data(), kp, work.codes.data(), work.scale.data(), work.sum.data()}, rows, first, last, y, ldy, accumulate,
             work.panel.data());
}
// The same; with `parts` only that part of its outputs.
static void product(const Linear& w, const float* x, int ldx, int rows, float* y, int ldy, bool accumulate, Work& work, int part = 0,
                    int parts = 1) {
    product_panels(w, x, ldx, rows, y, ldy, accumulate, work, num_panels(w) * part / parts, num_panels(w) * (part + 1) / parts);
}
