// C [m, n] (+)= A [m, k] B [k, n] of fp32 matrices, for the matrix products of training on a CPU: in fp32 (`Fp32`), or with both
// operands rounded to bf16 and summed in fp32 (`Bf16`), which AVX512-BF16 does at twice the rate.
//
// The scheme is Goto and van de Geijn's ("Anatomy of high-performance matrix multiplication", 2008): B goes into panels of two
// vectors of columns, A into panels of as many rows as leave registers for it, and one tile of C stays in registers while a
// panel of each streams by. Frozen weights are the case it is tuned for: B is read from where it lies, in either order, and
// packed where the thread that packs it uses it. Each value of C is one chain of fused multiply-adds over k inside blocks of at
// most KC words, blocks added in order: it depends neither on m nor on the number of threads.
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
constexpr int KC = 288, KG = 4096, NC = 320;      // words of a panel's depth, depth of one packing of A, columns packed at a time

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

template <class P, int M, int N, bool ADD>  // M rows, N vectors of columns; panels of NR columns; k words deep
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
            for (int j = 0; j < N; j++) x[i][j] = P::step(left, right[j], x[i][j]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < M; i++, c += ldc)
        for (int j = 0; j < N; j++) store(c + j * W, ADD ? add(load(c + j * W), x[i][j]) : x[i][j]);
}

template <class P, int M = MR>
INLINE void tile_of(int m, int vectors, bool plus, int k, const float* a, const float* b, float* c, int64_t ldc) {
    if constexpr (M > 1) {
        if (m < M) return tile_of<P, M - 1>(m, vectors, plus, k, a, b, c, ldc);
    }
    if (vectors == 1) plus ? tile<P, M, 1, true>(k, a, b, c, ldc) : tile<P, M, 1, false>(k, a, b, c, ldc);
    else plus ? tile<P, M, 2, true>(k, a, b, c, ldc) : tile<P, M, 2, false>(k, a, b, c, ldc);
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

struct Fp32 {
    static constexpr int DEEP = 1;  // values of an operand in one word of a panel
    INLINE V step(V a, V b, V sum) { return fma(a, b, sum); }

    // A panel [k, WIDTH]: line i, depth p lies at src[i * line + p * depth]; `there` lines can be read, those beyond are zero.
    template <int WIDTH>
    static void pack(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
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
};

#ifdef __AVX512BF16__
// A word holds two neighbours in k, the first one low; an odd k ends with half a word of zero. Subnormal numbers count as zero.
struct Bf16 {
    static constexpr int DEEP = 2;
    INLINE V step(V a, V b, V sum) { return dot2(a, b, sum); }

    template <int WIDTH>
    static void pack(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
        constexpr int WHOLE = (WIDTH + W - 1) / W * W;
        const int words = (k + 1) / 2;
        if (line == 1 && there >= WHOLE) {
            for (int p = 0; p < words; p++, out += WIDTH)
                for (int i = 0; i < WIDTH; i += W) {
                    const float* first = src + 2 * p * depth + i;
                    const V both = bf16_pairs(load(first), 2 * p + 1 < k ? load(first + depth) : set1(0.0f));
                    if (i + W <= WIDTH || p + 1 < words) store(out + i, both);  // what spills, the next word overwrites
                    else memcpy(out + i, &both, (WIDTH - i) * sizeof(float));
                }
            return;
        }
        alignas(64) float lines[WHOLE][KC], ends[2 * W];
        for (int i = 0; i < WHOLE; i++)
            for (int p = 0; p < words; p += W) {
                const float* from = src + i * line + 2 * p * depth;
                const bool inside = depth == 1 && i < there && 2 * (p + W) <= k;
                if (!inside)
                    for (int j = 0; j < 2 * W; j++) ends[j] = i < there && 2 * p + j < k ? from[j * depth] : 0.0f;
                store(lines[i] + p, bf16_words(inside ? from : ends));
            }
        Fp32::pack<WIDTH>(WHOLE, words, lines[0], KC, 1, out);
    }
};
#else
struct Bf16 : Fp32 {
    template <int WIDTH>
    static void pack(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
        Fp32::pack<WIDTH>(there, k, src, line, depth, out);
        for (int64_t i = 0; i < (int64_t)k * WIDTH; i++) out[i] = round_to_bf16(out[i]);
    }
};
#endif

struct Matrix {
    const float* data;
    int64_t row, column;  // strides
};

// A packed: panels of `rows` rows each (the last may have fewer), cut into blocks of at most `step` words along k.
template <class P>
struct Left {
    float* data;
    int m, k, panels, rows, step;  // k in values
    int words() const { return (k + P::DEEP - 1) / P::DEEP; }
    int words(int p) const { return std::min(step, words() - p); }              // of the block that begins at word p
    int depth(int p) const { return std::min(step * P::DEEP, k - p * P::DEEP); }  // the same in values
    float* at(int panel, int p) const { return data + (int64_t)MR * ((int64_t)panel * words() + p); }
    int high(int panel) const { return std::min(rows, m - panel * rows); }
};

template <class P>
Left<P> pack_left(Gomp gomp, int threads, int m, int k, Matrix a, Scratch& scratch) {
    Left<P> left{nullptr, m, k, (m + MR - 1) / MR, 0, 0};
    const int blocks = (left.words() + KC - 1) / KC;
    left.rows = (m + left.panels - 1) / left.panels;
    left.step = (left.words() + blocks - 1) / blocks;
    left.data = scratch.at_least((size_t)left.panels * MR * left.words());
    parallel(gomp, threads, left.panels, [&](int i) {
        const int row = i * left.rows;
        for (int p = 0; p < left.words(); p += left.step)
            P::template pack<MR>(m - row, left.depth(p), a.data + row * a.row + p * P::DEEP * a.column, a.row, a.column, left.at(i, p));
    });
    return left;
}

struct Range { int first, last; };

// C (+)= A B for some panels of A and some columns, the first of which is a multiple of NR; b is [k, n].
template <class P>
void block(const Left<P>& a, Matrix b, int n, Range panels, Range columns, float* c, int64_t ldc, bool plus, Scratch& scratch) {
    float* packed = scratch.at_least((size_t)(columns.last - columns.first + NR) * a.step);
    for (int p = 0; p < a.words(); p += a.step, plus = true) {
        const int k = a.words(p);
        for (int j = columns.first; j < columns.last; j += NR)
            P::template pack<NR>(n - j, a.depth(p), b.data + p * P::DEEP * b.row + j * b.column, b.column, b.row,
                                 packed + (int64_t)(j - columns.first) * k);
        for (int i = panels.first; i < panels.last; i++)
            for (int j = columns.first; j < columns.last; j += NR) {
                const int high = a.high(i), wide = std::min(NR, n - j), vectors = (wide + W - 1) / W;
                const float *left = a.at(i, p), *right = packed + (int64_t)(j - columns.first) * k;
                float* to = c + (int64_t)i * a.rows * ldc + j;
                if (wide % W == 0) {
                    tile_of<P>(high, vectors, plus, k, left, right, to, ldc);
                    continue;
                }
                float edge[MR * NR];
                tile_of<P>(high, vectors, false, k, left, right, edge, NR);
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
template <class P>
void product(Gomp gomp, int threads, int m, int n, int k, Matrix a, Matrix b, float* c, int64_t ldc, bool plus) {
    thread_local Scratch scratch;
    for (int p = 0; p < k; p += KG, plus = true) {
        const Left<P> left = pack_left<P>(gomp, threads, m, std::min(KG, k - p), {a.data + p * a.column, a.row, a.column}, scratch);
        const Matrix right{b.data + p * b.row, b.row, b.column};
        const Cut cut(threads, n, left.panels);
        parallel(gomp, threads, cut.tasks(),
                 [&](int t) { block(left, right, n, cut.rows(t), cut.columns(t), c, ldc, plus, own_scratch()); });
    }
}

// out [m, n] = x [m, k] w [k, n] + low v [r, n], with low [m, r] = scaling x u [k, r]: a linear with a low-rank update. x is packed
// once for both, and low is added, in fp32, while out is in the cache.
template <class P>
void low_rank(Gomp gomp, int threads, int m, int n, int k, int r, Matrix x, Matrix w, Matrix u, Matrix v, float scaling, float* low,
              float* out) {
    thread_local Scratch scratch, low_scratch;
    const Left<P> left = pack_left<P>(gomp, threads, m, k, x, scratch);
    const int parts = std::min(threads, left.panels), each = (left.panels + parts - 1) / parts;
    parallel(gomp, threads, parts, [&](int t) {
        const Range panels{t * each, std::min(left.panels, (t + 1) * each)};
        if (panels.first >= panels.last) return;
        block(left, u, r, panels, {0, r}, low, r, false, own_scratch());
        for (int64_t i = (int64_t)panels.first * left.rows * r; i < (int64_t)std::min(m, panels.last * left.rows) * r; i++) low[i] *= scaling;
    });
    const Left<Fp32> added = pack_left<Fp32>(gomp, 1, m, r, {low, r, 1}, low_scratch);
    const Cut cut(threads, n, left.panels);
    parallel(gomp, threads, cut.tasks(), [&](int t) {
        block(left, w, n, cut.rows(t), cut.columns(t), out, n, false, own_scratch());
        block(added, v, n, cut.rows(t), cut.columns(t), out, n, true, own_scratch());
    });
}

}  // namespace sgemm
