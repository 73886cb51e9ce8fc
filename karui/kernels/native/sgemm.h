// C [m, n] (+)= A [m, k] B [k, n] of fp32 matrices, for the matrix products of training on a CPU: in fp32 (`Fp32`), or with both
// operands rounded to bf16 and summed in fp32, which AVX512-BF16 (`Bf16`) does at twice and AMX (`Amx`) at four times the rate; or with each
// operand split into two bf16 numbers, three products of which make up nearly all of the fp32 one (`Amx3`; Henry et al., 2019).
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
#include <type_traits>

#include "parallel.h"
#include "simd.h"
#include "tiles.h"

namespace sgemm {

constexpr int ROWS = W == 16 ? 14 : 6, NR = 2 * W;  // a tile of C: 28 of 32 registers, 12 of 16
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

// W rows of four columns, `row` apart, become four groups of W: out[j * width + i] = src[i * row + j].
INLINE void transpose4(const float* src, int64_t row, float* out, int width) {
    const V q0 = load_fours(src, row), q1 = load_fours(src + row, row), q2 = load_fours(src + 2 * row, row), q3 = load_fours(src + 3 * row, row);
    const V a = zip_low(q0, q1), b = zip_high(q0, q1), c = zip_low(q2, q3), d = zip_high(q2, q3);
    store(out, pairs_low(a, c));
    store(out + width, pairs_high(a, c));
    store(out + 2 * width, pairs_low(b, d));
    store(out + 3 * width, pairs_high(b, d));
}

// What a way of multiplying with a tile of C in vector registers says of its panels.
template <class P>
struct Vectors {
    static constexpr int MR = ROWS, MULTIPLE = 1;  // rows of a panel of A; a panel is a multiple of so many words deep
    static constexpr int PARTS = 1;                // panels are so many times as large as their words
    static constexpr bool IN_TILES = false;
    struct Tiles {};
    INLINE void left(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
        P::template pack<MR>(there, k, src, line, depth, out);
    }
    INLINE void right(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
        P::template pack<NR>(there, k, src, line, depth, out);
    }
};

struct Fp32 : Vectors<Fp32> {
    static constexpr int DEEP = 1;  // values of an operand in one word of a panel
    INLINE V step(V a, V b, V sum) { return fma(a, b, sum); }

    // A panel [k, WIDTH]: line i, depth p lies at src[i * line + p * depth]; `there` lines can be read, those beyond are zero.
    template <int WIDTH>
    static void pack(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
        constexpr int WHOLE = (WIDTH + W - 1) / W * W, SPILL = WHOLE > WIDTH;  // what a step stores past its end, the next one overwrites
        int p = 0;
        if (line == 1 && there >= WIDTH)
            for (; p < k; p++)
                for (int i = 0; i < WIDTH; i++) out[(int64_t)p * WIDTH + i] = src[p * depth + i];
        else if (line == 1)
            for (; p < k; p++) {
                memcpy(out + (int64_t)p * WIDTH, src + p * depth, there * sizeof(float));
                memset(out + (int64_t)p * WIDTH + there, 0, (WIDTH - there) * sizeof(float));
            }
        else if (there >= WHOLE && depth == 1)
            for (; p + 4 + SPILL <= k; p += 4)
                for (int i = 0; i < WIDTH; i += W) transpose4(src + i * line + p, line, out + (int64_t)p * WIDTH + i, WIDTH);
        for (; p < k; p++)
            for (int i = 0; i < WIDTH; i++) out[(int64_t)p * WIDTH + i] = i < there ? src[i * line + p * depth] : 0.0f;
    }
};

#ifdef __AVX512BF16__
// A word holds two neighbours in k, the first one low; an odd k ends with half a word of zero. Subnormal numbers count as zero.
struct Bf16 : Vectors<Bf16> {
    static constexpr int DEEP = 2;
    INLINE V step(V a, V b, V sum) { return dot2(a, b, sum); }

    template <bool REST>  // the numbers, or what rounding them to bf16 drops
    INLINE V of(V a) {
        if constexpr (REST) return beyond_bf16(a);
        else return a;
    }
    template <bool REST>
    INLINE V pairs(V a, V b) { return bf16_pairs(of<REST>(a), of<REST>(b)); }
    template <bool REST>
    INLINE V words(const float* p) { return bf16_words(of<REST>(load(p)), of<REST>(load(p + W))); }

    template <int WIDTH, bool REST = false>
    static void pack(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
        constexpr int WHOLE = (WIDTH + W - 1) / W * W;
        const int words = (k + 1) / 2;
        if (line == 1) {
            float two[2][WHOLE] = {};
            for (int p = 0; p < words; p++, out += WIDTH)
                for (int i = 0; i < WIDTH; i += W) {
                    const float *first = src + 2 * p * depth + i, *second = first + depth;
                    if (there < WHOLE) {
                        memcpy(two[0] + i, first, std::max(0, std::min(W, there - i)) * sizeof(float));
                        if (2 * p + 1 < k) memcpy(two[1] + i, second, std::max(0, std::min(W, there - i)) * sizeof(float));
                        first = two[0] + i, second = two[1] + i;
                    }
                    const V both = pairs<REST>(load(first), 2 * p + 1 < k ? load(second) : set1(0.0f));
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
                store(lines[i] + p, Bf16::words<REST>(inside ? from : ends));
            }
        Fp32::pack<WIDTH>(WHOLE, words, lines[0], KC, 1, out);
    }
};
#else
struct Bf16 : Vectors<Bf16> {
    static constexpr int DEEP = 1;
    INLINE V step(V a, V b, V sum) { return Fp32::step(a, b, sum); }

    template <int WIDTH>
    static void pack(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
        Fp32::pack<WIDTH>(there, k, src, line, depth, out);
        for (int64_t i = 0; i < (int64_t)k * WIDTH; i++) out[i] = round_to_bf16(out[i]);
    }
};
#endif

// Panels of A and B that one tile of C is the product of, k words deep; k = 0 for none. Lines of B are b_step apart.
struct Panels {
    int k;
    const float *a, *b;
    int64_t b_step;
};

#ifdef __AMX_BF16__
// Tiles of 16 rows of 16 words: a panel of A is [k / 16][PARTS][2][16 rows][16 words], one of B is [PARTS] times what it is for `Bf16`, both
// with zeros up to a whole tile. The processor sums in another order than AVX512-BF16, and takes subnormal numbers for zero as well.
// PARTS 2: operands as the sum of two bf16 numbers, of whose four products that of the smaller ones is left out.
template <int PARTS_>
struct Tiled {
    static constexpr int PARTS = PARTS_, DEEP = 2, MR = 32, MULTIPLE = 16, TILE = 16 * 16;
    static constexpr bool IN_TILES = true;

    static bool allowed() { return tiles::allowed(); }

    struct Tiles : tiles::Configured {
        Tiles() : Configured(shapes()) {}
        static const tiles::Shapes& shapes() {
            static const tiles::Shapes all = [] {
                tiles::Shapes s;
                for (int tile = 0; tile < 8; tile++) s.set(tile, 16, 64);
                return s;
            }();
            return all;
        }
    };

    template <bool REST>  // one tile, of `rows` lines and `deep` values
    static void pack(int rows, int deep, const float* from, int64_t line, int64_t depth, float* out) {
        alignas(64) float square[TILE], ends[2 * 16];
        if (line == 1 && rows == 16) {
            for (int j = 0; j < 16; j++, from += 2 * depth)
                store(square + 16 * j,
                      Bf16::pairs<REST>(2 * j < deep ? load(from) : set1(0.0f), 2 * j + 1 < deep ? load(from + depth) : set1(0.0f)));
            for (int i = 0; i < 16; i += 4) transpose4(square + i, 16, out + 16 * i, 16);
            return;
        }
        for (int i = 0; i < 16; i++, from += line) {
            const bool whole = i < rows && depth == 1 && deep == 32;
            if (!whole)
                for (int j = 0; j < 32; j++) ends[j] = i < rows && j < deep ? from[j * depth] : 0.0f;
            store(out + 16 * i, Bf16::words<REST>(whole ? from : ends));
        }
    }

    static void left(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
        for (int p = 0; p < k; p += 32, out += 2 * PARTS * TILE)
            for (int half = 0; half < 2; half++) {
                const float* from = src + p * depth + 16 * half * line;
                const int rows = std::max(0, std::min(16, there - 16 * half)), deep = std::min(32, k - p);
                pack<false>(rows, deep, from, line, depth, out + half * TILE);
                if (PARTS == 2) pack<true>(rows, deep, from, line, depth, out + (2 + half) * TILE);
            }
    }

    static void right(int there, int k, const float* src, int64_t line, int64_t depth, float* out) {
        const int words = (k + 1) / 2, spare = -words & (MULTIPLE - 1);
        for (int part = 0; part < PARTS; part++, out += (words + spare) * NR) {
            const auto pack = part ? Bf16::pack<NR, true> : Bf16::pack<NR, false>;
            pack(there, k, src, line, depth, out);
            memset(out + words * NR, 0, spare * NR * sizeof(float));
        }
    }

    // c (32 rows, 32 columns, `ldc` apart) += the product of a panel of A and one of B, k words deep; HIGH, WIDE: both halves of it.
    template <bool HIGH, bool WIDE>
    static void multiply(int k, const float* a, const float* b, float* c, int64_t ldc) {
        constexpr int64_t right = NR * sizeof(float);
        const int64_t row = ldc * sizeof(float);
        _tile_loadd(0, c, row);
        if (WIDE) _tile_loadd(1, c + 16, row);
        if (HIGH) _tile_loadd(2, c + 16 * ldc, row);
        if (HIGH && WIDE) _tile_loadd(3, c + 16 * ldc + 16, row);
        const auto add = [] {
            _tile_dpbf16ps(0, 4, 6);
            if (WIDE) _tile_dpbf16ps(1, 4, 7);
            if (HIGH) _tile_dpbf16ps(2, 5, 6);
            if (HIGH && WIDE) _tile_dpbf16ps(3, 5, 7);
        };
        const auto load_a = [](const float* from) {
            _tile_loadd(4, from, 64);
            if (HIGH) _tile_loadd(5, from + TILE, 64);
        };
        const auto load_b = [](const float* from) {
            _tile_loadd(6, from, right);
            if (WIDE) _tile_loadd(7, from + 16, right);
        };
        for (int p = 0; p < k; p += MULTIPLE, a += 2 * PARTS * TILE, b += MULTIPLE * NR) {
            load_a(a), load_b(b), add();
            if (PARTS == 1) continue;
            load_b(b + k * NR), add();
            load_a(a + 2 * TILE), load_b(b), add();
        }
        _tile_stored(0, c, row);
        if (WIDE) _tile_stored(1, c + 16, row);
        if (HIGH) _tile_stored(2, c + 16 * ldc, row);
        if (HIGH && WIDE) _tile_stored(3, c + 16 * ldc + 16, row);
    }

    // As `sgemm::block`; what reaches past an edge is worked on beside c.
    static void block(int high, int wide, bool plus, const Panels& p, float* c, int64_t ldc) {
        alignas(64) float beside[MR * NR];
        const bool inside = high == MR && wide == NR;
        float* to = inside ? c : beside;
        const int64_t step = inside ? ldc : NR;
        for (int i = 0; i < high; i++)
            if (!plus) memset(to + i * step, 0, wide * sizeof(float));
            else if (!inside) memcpy(to + i * step, c + i * ldc, wide * sizeof(float));
        const auto f = high > 16 ? wide > 16 ? multiply<true, true> : multiply<true, false>
                                 : wide > 16 ? multiply<false, true> : multiply<false, false>;
        f(p.k, p.a, p.b, to, step);
        for (int i = 0; i < high && !inside; i++) memcpy(c + i * ldc, to + i * step, wide * sizeof(float));
    }
};
typedef Tiled<1> Amx;
typedef Tiled<2> Amx3;
#else
struct Amx : Bf16 {
    static bool allowed() { return false; }
};
typedef Fp32 Amx3;
#endif

template <class P, int M, int N>  // M rows, N vectors of columns; panels of NR columns
INLINE void multiply(const Panels& p, V (&x)[M][N]) {
    const float *a = p.a, *b = p.b;
    for (int i = 0; i < p.k; i++, a += ROWS, b += p.b_step) {
        V right[N];
        for (int j = 0; j < N; j++) right[j] = load(b + j * W);
#pragma GCC unroll 16
        for (int m = 0; m < M; m++) {
            const V left = set1(a[m]);
            for (int j = 0; j < N; j++) x[m][j] = P::step(left, right[j], x[m][j]);
        }
    }
}

// C (+)= the product of `first`, and of `second` in fp32 on top.
template <class P, int M, int N, bool ADD>
void tile(const Panels& first, const Panels& second, float* c, int64_t ldc) {
    V x[M][N];
#pragma GCC unroll 16
    for (int i = 0; i < M; i++) {
        if (ADD) __builtin_prefetch(c + i * ldc, 1), __builtin_prefetch(c + i * ldc + (N - 1) * W, 1);
        for (int j = 0; j < N; j++) x[i][j] = set1(0.0f);
    }
    multiply<P>(first, x);
    if (second.k) multiply<Fp32>(second, x);
#pragma GCC unroll 16
    for (int i = 0; i < M; i++, c += ldc)
        for (int j = 0; j < N; j++) store(c + j * W, ADD ? add(load(c + j * W), x[i][j]) : x[i][j]);
}

template <class P, int M = ROWS>
INLINE void tile_of(int m, int vectors, bool plus, const Panels& first, const Panels& second, float* c, int64_t ldc) {
    if constexpr (M > 1) {
        if (m < M) return tile_of<P, M - 1>(m, vectors, plus, first, second, c, ldc);
    }
    if (vectors == 1) plus ? tile<P, M, 1, true>(first, second, c, ldc) : tile<P, M, 1, false>(first, second, c, ldc);
    else plus ? tile<P, M, 2, true>(first, second, c, ldc) : tile<P, M, 2, false>(first, second, c, ldc);
}

// c (+)= a panel of A, `high` rows of it, times one of B, `wide` columns.
template <class P>
INLINE void block(int high, int wide, bool plus, const Panels& first, const Panels& second, float* c, int64_t ldc) {
    const int vectors = (wide + W - 1) / W;
    if (wide % W == 0) return tile_of<P>(high, vectors, plus, first, second, c, ldc);
    float edge[ROWS * NR];
    tile_of<P>(high, vectors, false, first, second, edge, NR);
    for (int row = 0; row < high; row++)
        for (int q = 0; q < wide; q++) c[row * ldc + q] = (plus ? c[row * ldc + q] : 0.0f) + edge[row * NR + q];
}

struct Matrix {
    const float* data;
    int64_t row, column;  // strides
};

// A packed: panels of `rows` rows each (the last may have fewer), cut into blocks of at most `step` words along k.
template <class P>
struct Left {
    float* data;
    int m, k, panels, rows, step;  // k in values
    static int whole(int words) { return (words + P::MULTIPLE - 1) / P::MULTIPLE * P::MULTIPLE; }
    int words() const { return whole((k + P::DEEP - 1) / P::DEEP); }
    int words(int p) const { return std::min(step, words() - p); }              // of the block that begins at word p
    int depth(int p) const { return std::min(step * P::DEEP, k - p * P::DEEP); }  // the same in values
    float* at(int panel, int p) const { return data + (int64_t)P::PARTS * P::MR * ((int64_t)panel * words() + p); }
    int high(int panel) const { return std::min(rows, m - panel * rows); }
};

template <class P>
Left<P> pack_left(int m, int k, Matrix a, Scratch& scratch) {
    Left<P> left{nullptr, m, k, (m + P::MR - 1) / P::MR, 0, 0};
    const int blocks = (left.words() * P::PARTS + KC - 1) / KC;
    left.rows = P::IN_TILES ? P::MR : (m + left.panels - 1) / left.panels;  // whole tiles, or panels of about the same height
    left.step = left.whole((left.words() + blocks - 1) / blocks);
    left.data = scratch.at_least((size_t)left.panels * P::PARTS * P::MR * left.words());
    for (int i = 0, row = 0; i < left.panels; i++, row += left.rows)
        for (int p = 0; p < left.words(); p += left.step)
            P::left(m - row, left.depth(p), a.data + row * a.row + p * P::DEEP * a.column, a.row, a.column, left.at(i, p));
    return left;
}

// A low-rank update [m, r] x [r, n] that is added to a product while its tiles are in registers; null for none.
struct Update {
    const Left<Fp32>* low;
    Matrix v;
};

// C (+)= A B (+ the update) for columns [first, last), a multiple of NR the first; b is [k, n].
template <class P>
void strip(const Left<P>& a, Matrix b, int n, int first, int last, float* c, int64_t ldc, bool plus, Update update, Scratch& scratch) {
    const int r = update.low && !P::IN_TILES ? update.low->k : 0, wide = last - first + NR;
    float *packed = scratch.at_least((size_t)wide * (P::PARTS * a.step + r)), *packed_v = packed + (size_t)wide * P::PARTS * a.step;
    for (int j = first; j < last && r; j += NR)
        Fp32::right(n - j, r, update.v.data + j * update.v.column, update.v.column, update.v.row, packed_v + (int64_t)(j - first) * r);
    // B is used once or twice: reading it where it lies is cheaper than packing it
    const bool as_is = std::is_same_v<P, Fp32> && a.panels <= 2 && b.column == 1 && (last - first) % NR == 0;
    [[maybe_unused]] const typename P::Tiles tiles;
    for (int p = 0; p < a.words(); p += a.step, plus = true) {
        const int k = a.words(p), added = p + k == a.words() ? r : 0;
        for (int j = first; j < last && !as_is; j += NR)
            P::right(n - j, a.depth(p), b.data + p * P::DEEP * b.row + j * b.column, b.column, b.row, packed + (int64_t)(j - first) * k * P::PARTS);
        for (int i = 0; i < a.panels; i++)
            for (int j = first; j < last; j += NR) {
                const float* right = as_is ? b.data + p * b.row + j : packed + (int64_t)(j - first) * k * P::PARTS;
                const Panels main{k, a.at(i, p), right, as_is ? b.row : NR};
                const Panels second{added, added ? update.low->at(i, 0) : nullptr, packed_v + (int64_t)(j - first) * r, NR};
                const int high = a.high(i), there = std::min(NR, n - j);
                float* to = c + (int64_t)i * a.rows * ldc + j;
                if constexpr (P::IN_TILES) P::block(high, there, plus, main, to, ldc);
                else block<P>(high, there, plus, main, second, to, ldc);
            }
    }
    if constexpr (P::IN_TILES)  // where an update cannot be added to what is in registers
        if (update.low) strip(*update.low, update.v, n, first, last, c, ldc, true, {}, scratch);
}

template <class P>
void strips(const Left<P>& a, Matrix b, int n, int first, int last, float* c, int64_t ldc, bool plus, Update update, Scratch& scratch) {
    for (int j = first; j < last; j += NC) strip(a, b, n, j, std::min(last, j + NC), c, ldc, plus, update, scratch);
}

// C cut among threads: by rows, and by columns where there are few rows. A thread packs what it uses and reads nothing that another one has
// written: packing A once for all of them costs more, in cache lines that move between cores, than packing B twice.
struct Cut {
    int m, n, high, wide, across;
    Cut(int threads, int m, int n) : m(m), n(n) {
        const int down = n > 8 * m ? 1 : std::max(1, std::min(threads, m / (4 * ROWS)));
        high = (m + down - 1) / down;
        wide = (n + (threads + down - 1) / down - 1) / ((threads + down - 1) / down);
        wide = (wide + NR - 1) / NR * NR;
        across = (n + wide - 1) / wide;
    }
    int tasks() const { return (m + high - 1) / high * across; }
    int row(int t) const { return t / across * high; }
    int rows(int t) const { return std::min(high, m - row(t)); }
    int column(int t) const { return t % across * wide; }
    int end(int t) const { return std::min(n, column(t) + wide); }
};

struct Local { Scratch left, right, low, packed_low; };
inline Local& local() {
    thread_local Local scratch;
    return scratch;
}

// C [m, n] (+)= A [m, k] B [k, n]
template <class P>
void product(Gomp gomp, int threads, int m, int n, int k, Matrix a, Matrix b, float* c, int64_t ldc, bool plus) {
    const Cut cut(threads, m, n);
    parallel(gomp, threads, cut.tasks(), [&](int t) {
        bool more = plus;
        for (int p = 0; p < k; p += KG, more = true) {
            const Matrix part{a.data + cut.row(t) * a.row + p * a.column, a.row, a.column};
            const Left<P> left = pack_left<P>(cut.rows(t), std::min(KG, k - p), part, local().left);
            strips(left, {b.data + p * b.row, b.row, b.column}, n, cut.column(t), cut.end(t), c + cut.row(t) * ldc, ldc, more, {}, local().right);
        }
    });
}

// out [m, n] = x [m, k] w [k, n] + low v [r, n], with low [m, r] = scaling x u [k, r]: a linear with a low-rank update. x is packed
// once for both, and low v is added, in fp32, while a tile of out is in registers.
template <class P>
void low_rank(Gomp gomp, int threads, int m, int n, int k, int r, Matrix x, Matrix w, Matrix u, Matrix v, float scaling, float* low,
              float* out) {
    const Cut cut(threads, m, n);
    parallel(gomp, threads, cut.tasks(), [&](int t) {
        Local& own = local();
        const int row = cut.row(t), rows = cut.rows(t);
        const Left<P> left = pack_left<P>(rows, k, {x.data + row * x.row, x.row, x.column}, own.left);
        float *part = own.low.at_least((size_t)rows * r), *to = out + (int64_t)row * n;
        strips(left, u, r, 0, r, part, r, false, {}, own.right);
        for (int64_t i = 0; i < (int64_t)rows * r; i++) part[i] *= scaling;
        if (cut.column(t) == 0) memcpy(low + (int64_t)row * r, part, (size_t)rows * r * sizeof(float));
        const Left<Fp32> added = pack_left<Fp32>(rows, r, {part, r, 1}, own.packed_low);
        const bool whole = added.step == r;  // else it is too deep to be added in one piece
        strips(left, w, n, cut.column(t), cut.end(t), to, n, false, whole ? Update{&added, v} : Update{}, own.right);
        if (!whole) strips(added, v, n, cut.column(t), cut.end(t), to, n, true, {}, own.right);
    });
}

}  // namespace sgemm
