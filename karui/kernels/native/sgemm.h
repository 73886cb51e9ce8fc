// C [m, n] (+)= A [m, k] B [k, n] in fp32, for the matrix products of training on a CPU.
//
// The scheme is Goto and van de Geijn's ("Anatomy of high-performance matrix multiplication", 2008): B goes into panels of two
// vectors of columns, A into panels of as many rows as leave registers for it, and one tile of C stays in registers while a
// panel of each streams by. Frozen weights are the case it is tuned for: B is read from where it lies, in either order, and
// packed where the thread that packs it uses it. Each value of C is one chain of fused multiply-adds over k inside blocks of at
// most KC, blocks added in order: it depends neither on m nor on the number of threads.
#pragma once
#include <stdlib.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <algorithm>
#include <memory>
#include <new>

#include "parallel.h"
#include "simd.h"

namespace sgemm {

constexpr int MR = W == 16 ? 14 : 6, NR = 2 * W;  // a tile of C: 28 of 32 registers, 12 of 16
constexpr int KC = 288, KG = 4096, NC = 320;      // depth of a panel, of one packing of A, and columns packed at a time

struct Free { void operator()(float* p) const { free(p); } };

// Scratch that a thread keeps; grows, on huge pages where there are any.
struct Scratch {
    static constexpr size_t PAGE = size_t(1) << 21;
    std::unique_ptr<float, Free> data;
    size_t size = 0;
    float* at_least(size_t floats) {
        if (floats > size) {
            const size_t bytes = (floats * sizeof(float) + PAGE - 1) / PAGE * PAGE;
            data.reset((float*)aligned_alloc(PAGE, bytes));
            if (!data) throw std::bad_alloc();
#ifdef __linux__
            madvise(data.get(), bytes, MADV_HUGEPAGE);
#endif
            size = bytes / sizeof(float);
        }
        return data.get();
    }
};

template <int M, int N, bool ADD>  // M rows, N vectors of columns; panels of NR columns
void tile(int k, const float* a, const float* b, float* c, int64_t ldc) {
    V x[M][N];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++)
        for (int j = 0; j < N; j++) x[i][j] = set1(0.0f);
    for (int p = 0; p < k; p++, a += MR, b += NR) {
        V right[N];
        for (int j = 0; j < N; j++) right[j] = load(b + j * W);
#pragma GCC unroll 16
        for (int i = 0; i < M; i++) {
            const V left = set1(a[i]);
            for (int j = 0; j < N; j++) x[i][j] = fma(left, right[j], x[i][j]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++, c += ldc)
        for (int j = 0; j < N; j++) store(c + j * W, ADD ? add(load(c + j * W), x[i][j]) : x[i][j]);
}

template <int M = MR>
INLINE void tile_of(int m, int vectors, bool plus, int k, const float* a, const float* b, float* c, int64_t ldc) {
    if constexpr (M > 1) {
        if (m < M) return tile_of<M - 1>(m, vectors, plus, k, a, b, c, ldc);
    }
    if (vectors == 1) plus ? tile<M, 1, true>(k, a, b, c, ldc) : tile<M, 1, false>(k, a, b, c, ldc);
    else plus ? tile<M, 2, true>(k, a, b, c, ldc) : tile<M, 2, false>(k, a, b, c, ldc);
}

// W rows of four columns, `row` apart, become four groups of W: out[j * width + i] = src[i * row + j].
INLINE void transpose4(const float* src, int64_t row, float* out, int width) {
    const V q0 = load_fours(src, row), q1 = load_fours(src + row, row), q2 = load_fours(src + 2 * row, row), q3 = load_fours(src + 3 * row, row);
    const V a = zip_low(q0, q1), b = zip_high(q0, q1), c = zip_low(q2, q3), d = zip_high(q2, q3);
    store(out, pairs_low(a, c));
    store(out + width, pairs_high(a, c));
    store(out + 2 * width, pairs_low(b, d));
    store(out + 3 * width, pairs_high(b, d));
}

// A panel [k, WIDTH]: line i, depth p lies at src[i * line + p * depth]; `there` lines can be read, those beyond are zero.
template <int WIDTH>
void pack(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
    constexpr int WHOLE = (WIDTH + W - 1) / W * W, SPILL = WHOLE > WIDTH;  // what a step stores past its end, the next one overwrites
    int p = 0;
    if (there >= WIDTH && line == 1)
        for (; p < k; p++)
            for (int i = 0; i < WIDTH; i++) out[(int64_t)p * WIDTH + i] = src[p * depth + i];
    else if (there >= WHOLE && depth == 1)
        for (; p + 4 + SPILL <= k; p += 4)
            for (int i = 0; i < WIDTH; i += W) transpose4(src + i * line + p, line, out + (int64_t)p * WIDTH + i, WIDTH);
    for (; p < k; p++)
        for (int i = 0; i < WIDTH; i++) out[(int64_t)p * WIDTH + i] = i < there ? src[i * line + p * depth] : 0.0f;
}

struct Matrix {
    const float* data;
    int64_t row, column;  // strides
};

// A packed: panels of `rows` rows each (the last may have fewer), cut into blocks of at most `step` along k.
struct Left {
    float* data;
    int m, k, panels, rows, step;
    float* at(int panel, int p) const { return data + (int64_t)MR * ((int64_t)panel * k + p); }
    int high(int panel) const { return std::min(rows, m - panel * rows); }
};

inline Left pack_left(Gomp gomp, int threads, int m, int k, Matrix a, Scratch& scratch) {
    const int panels = (m + MR - 1) / MR, blocks = (k + KC - 1) / KC;
    float* out = scratch.at_least((size_t)panels * MR * k);
    const Left left{out, m, k, panels, (m + panels - 1) / panels, (k + blocks - 1) / blocks};
    parallel(gomp, threads, panels, [&](int i) {
        const int row = i * left.rows;
        for (int p = 0; p < k; p += left.step)
            pack<MR>(m - row, std::min(left.step, k - p), a.data + row * a.row + p * a.column, a.row, a.column, left.at(i, p));
    });
    return left;
}

struct Range { int first, last; };

// C (+)= A B for some panels of A and some columns, the first of which is a multiple of NR; b is [k, n].
inline void block(const Left& a, Matrix b, int n, Range panels, Range columns, float* c, int64_t ldc, bool plus, Scratch& scratch) {
    float* packed = scratch.at_least((size_t)(columns.last - columns.first + NR) * a.step);
    for (int p = 0; p < a.k; p += a.step, plus = true) {
        const int k = std::min(a.step, a.k - p);
        for (int j = columns.first; j < columns.last; j += NR)
            pack<NR>(n - j, k, b.data + p * b.row + j * b.column, b.column, b.row, packed + (int64_t)(j - columns.first) * k);
        for (int i = panels.first; i < panels.last; i++)
            for (int j = columns.first; j < columns.last; j += NR) {
                const int high = a.high(i), wide = std::min(NR, n - j), vectors = (wide + W - 1) / W;
                const float *left = a.at(i, p), *right = packed + (int64_t)(j - columns.first) * k;
                float* to = c + (int64_t)i * a.rows * ldc + j;
                if (wide % W == 0) {
                    tile_of(high, vectors, plus, k, left, right, to, ldc);
                    continue;
                }
                float edge[MR * NR];
                tile_of(high, vectors, false, k, left, right, edge, NR);
                for (int r = 0; r < high; r++)
                    for (int q = 0; q < wide; q++) to[r * ldc + q] = (plus ? to[r * ldc + q] : 0.0f) + edge[r * NR + q];
            }
    }
}

// How C is cut among threads: columns first (each cut packs its part of B), rows too where there are too few columns.
struct Cut {
    int width, across, height, down, n, panels;
    Cut(int threads, int n, int panels) : n(n), panels(panels) {
        const int parts = threads * ((n + threads * NC - 1) / (threads * NC));
        width = ((n + parts - 1) / parts + NR - 1) / NR * NR;
        across = (n + width - 1) / width;
        down = std::min(panels, (threads + across - 1) / across);
        height = (panels + down - 1) / down;
    }
    int tasks() const { return across * down; }
    Range columns(int t) const { return {t % across * width, std::min(n, (t % across + 1) * width)}; }
    Range rows(int t) const { return {t / across * height, std::min(panels, (t / across + 1) * height)}; }
};

inline Scratch& own_scratch() {
    thread_local Scratch scratch;
    return scratch;
}

// C [m, n] (+)= A [m, k] B [k, n]
inline void product(Gomp gomp, int threads, int m, int n, int k, Matrix a, Matrix b, float* c, int64_t ldc, bool plus) {
    thread_local Scratch scratch;
    for (int p = 0; p < k; p += KG, plus = true) {
        const Left left = pack_left(gomp, threads, m, std::min(KG, k - p), {a.data + p * a.column, a.row, a.column}, scratch);
        const Matrix right{b.data + p * b.row, b.row, b.column};
        const Cut cut(threads, n, left.panels);
        parallel(gomp, threads, cut.tasks(),
                 [&](int t) { block(left, right, n, cut.rows(t), cut.columns(t), c, ldc, plus, own_scratch()); });
    }
}

// out [m, n] = x [m, k] w [k, n] + low v [r, n], with low [m, r] = scaling x u [k, r]: a linear with a low-rank update. x is packed
// once for both, and low is added while out is in the cache.
inline void low_rank(Gomp gomp, int threads, int m, int n, int k, int r, Matrix x, Matrix w, Matrix u, Matrix v, float scaling, float* low,
                     float* out) {
    thread_local Scratch scratch, low_scratch;
    const Left left = pack_left(gomp, threads, m, k, x, scratch);
    const int parts = std::min(threads, left.panels), each = (left.panels + parts - 1) / parts;
    parallel(gomp, threads, parts, [&](int t) {
        const Range panels{t * each, std::min(left.panels, (t + 1) * each)};
        if (panels.first >= panels.last) return;
        block(left, u, r, panels, {0, r}, low, r, false, own_scratch());
        for (int64_t i = (int64_t)panels.first * left.rows * r; i < (int64_t)std::min(m, panels.last * left.rows) * r; i++) low[i] *= scaling;
    });
    const Left added = pack_left(gomp, 1, m, r, {low, r, 1}, low_scratch);
    const Cut cut(threads, n, left.panels);
    parallel(gomp, threads, cut.tasks(), [&](int t) {
        block(left, w, n, cut.rows(t), cut.columns(t), out, n, false, own_scratch());
        block(added, v, n, cut.rows(t), cut.columns(t), out, n, true, own_scratch());
    });
}

}  // namespace sgemm
