// y = x W^T for every kind of weight, from one row to thousands, in one tile function per family. Compiled beside model.cpp.
//
// A tile is M activation rows by N*W weight rows (W lanes, so N = 1 or 2 vectors; a panel has 16 rows). The sum of one output
// is, whatever M, N and the thread:
//     integer:  for blocks in order:  sum = fma(scale, x_scale * float(exact integer dot of the block), sum)
//     float:    for inputs in order:  sum = fma(weight, x, sum)
// then + bias, then + the old value when accumulating into the residual stream. So batched equals alone bit for bit.
#include "gemm.h"

#include <type_traits>

#include "simd.h"
#include "tiles.h"

constexpr int PREFETCH = 4096;  // bytes ahead in the weight stream; on huge pages 1.5 KB costs a tenth, none is as good as 4 KB

constexpr int stored(int bits) { return bits == HALVES ? 4 : bits; }

template <int BITS, int Q> INLINE U unpack(const uint8_t* chunk) {  // quad Q of a chunk, the lanes from `chunk` on
    if constexpr (BITS == 8) return bytes(chunk + 64 * Q);
    else if constexpr (BITS == HALVES) return halves(unpack<4, Q>(chunk));
    else if constexpr (BITS == 4) return field<4 * (Q % 2), 15>(bytes(chunk + 64 * (Q / 2)));
    else if constexpr (BITS == 6) {
        const U high = bytes(chunk + 256 + 64 * (Q / 4)), low = unpack<4, Q>(chunk);
        if constexpr (Q % 4 < 2) return bor(low, field_up<4 - 2 * (Q % 4), 48>(high));
        else return bor(low, field<2 * (Q % 4) - 4, 48>(high));
    } else {
        U low = field<2 * (Q % 4), 3>(bytes(chunk + 64 * (Q / 4)));
        if constexpr (BITS == 2) return low;
        else if constexpr (Q >= 2) return bor(low, field<Q - 2, 4>(bytes(chunk + 128)));
        else return bor(low, field_up<2 - Q, 4>(bytes(chunk + 128)));
    }
}

INLINE V load_scale(const Linear& w, int64_t i) {
    return w.scale_fp32 ? load((const float*)w.scales + i) : load((const uint16_t*)w.scales + i);
}

template <int BITS, int M, int N, int Q, int LAST>
INLINE void dot_quads(typename Dot<BITS>::P (&part)[M][N], const uint8_t* codes, const int8_t* x) {
    for (int n = 0; n < N; n++) {
        U u = unpack<BITS, Q>(codes + 4 * W * n);
        for (int m = 0; m < M; m++) part[m][n] = Dot<BITS>::step(part[m][n], u, quad(x + CHUNK * m + 4 * Q));
    }
    if constexpr (Q + 1 < LAST) dot_quads<BITS, M, N, Q + 1, LAST>(part, codes, x);
}

INLINE void finish(const Linear& w, V sum, int row, float* y, bool accumulate) {
    if (w.bias && row + W <= w.n) sum = add(sum, load(w.bias + row));
    if (row + W <= w.n) { store(y + row, accumulate ? add(load(y + row), sum) : sum); return; }
    float t[W];
    store(t, sum);
    for (int i = 0; row + i < w.n; i++) {
        float v = w.bias ? t[i] + w.bias[row + i] : t[i];
        y[row + i] = accumulate ? y[row + i] + v : v;
    }
}

// Rows [m0, m0+M) of the activations, which lie in one tile, times rows [row, row + N*W) of the weights.
// BITS: 2, 3, 4, 6, 8 or HALVES. BLOCK: 16, 32, or 0 for longer blocks. AFFINE: a zero point per group.
template <int BITS, int M, int N, int BLOCK, bool AFFINE>
static void tile_int(const Linear& w, const Activations& a, int m0, int row, float* y, int ldy, bool accumulate) {
    typedef Dot<BITS> D;
    constexpr int bytes_per_chunk = CHUNK * PANEL * stored(BITS) / 8;
    const int block = BLOCK ? BLOCK : w.block, blocks = w.k_padded / block, groups = w.k_padded / w.group;
    const int blocks_per_group = w.group / block, chunks_per_block = BLOCK ? 1 : block / CHUNK;
    const int panel = row / PANEL, lane = row % PANEL;
    const uint8_t* codes = w.codes + (int64_t)panel * (w.k_padded / CHUNK) * bytes_per_chunk + 4 * lane;
    const int8_t* x = a.codes + (int64_t)(m0 / TILE) * TILE * w.k_padded + m0 % TILE * CHUNK;
    const float* xs = a.scale + (int64_t)(m0 / TILE) * TILE * blocks + m0 % TILE;
    const int32_t* xz = a.sum + (int64_t)(m0 / TILE) * TILE * blocks + m0 % TILE;
    V sum[M][N];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) sum[m][n] = set1(0.0f);
    int half = 0;
    for (int g = 0; g < groups; g++) {
        V scale[N];
        I zero[N];
        for (int n = 0; n < N; n++) {
            int64_t i = ((int64_t)panel * groups + g) * PANEL + lane + W * n;
            scale[n] = load_scale(w, i);
            if (AFFINE) zero[n] = isub(iset1(D::bias), iload_u8(w.zeros + i));
        }
        for (int b = 0; b < blocks_per_group; b++, xs += TILE, xz += TILE) {
            I total[M][N];
            for (int m = 0; m < M; m++)
                for (int n = 0; n < N; n++) total[m][n] = AFFINE ? imul(iset1(xz[m]), zero[n]) : iset1(xz[m]);
            for (int c = 0; c < chunks_per_block; c++) {
                typename D::P part[M][N];
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < N; n++) part[m][n] = D::open(total[m][n]);
                if (BLOCK != 16 || half == 0)
                    for (int p = 0; p < bytes_per_chunk; p += 64) __builtin_prefetch(codes + PREFETCH + p);
                if constexpr (BLOCK != 16) dot_quads<BITS, M, N, 0, 8>(part, codes, x);
                else if (half == 0) dot_quads<BITS, M, N, 0, 4>(part, codes, x);
                else dot_quads<BITS, M, N, 4, 8>(part, codes, x);
                if (BLOCK != 16 || (half ^= 1) == 0) {
                    codes += bytes_per_chunk;
                    x += TILE * CHUNK;
                }
                for (int m = 0; m < M; m++)
                    for (int n = 0; n < N; n++) total[m][n] = D::close(total[m][n], part[m][n]);
            }
            for (int m = 0; m < M; m++)
                for (int n = 0; n < N; n++) sum[m][n] = fma(scale[n], mul(set1(xs[m]), to_float(total[m][n])), sum[m][n]);
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) finish(w, sum[m][n], row + W * n, y + (int64_t)(m0 + m) * ldy, accumulate);
}

#ifdef __AMX_INT8__
// The same sums in AMX tiles, a panel times up to 16 rows at once. Unpacked to signed numbers a chunk of a panel is a tile as it lies, and so
// are the codes of TILE rows.
namespace tiles {

constexpr int FEWEST = 9, STRIP = 18;  // rows that pay; blocks whose integer sums are made and stored before the float sums read them
template <int BITS, bool AFFINE> constexpr bool takes = BITS != 8 || !AFFINE;  // codes minus zeros are signed bytes

static inline Shapes shapes(int block, int rest) {  // registers 0, 1: sums, activations; 2, 3: the same for the last rows; 4: weights
    const int inputs = block == 16 ? 16 : CHUNK;
    Shapes s;
    s.set(0, TILE, 4 * PANEL);
    s.set(1, TILE, inputs);
    s.set(2, rest, 4 * PANEL);
    s.set(3, rest, inputs);
    s.set(4, inputs / 4, 4 * PANEL);
    return s;
}

template <int BITS, int Q = 0> INLINE void unpack_chunk(const uint8_t* from, const U* zero, int8_t* to) {  // a zero for each half
    _mm512_storeu_si512(to + 64 * Q, _mm512_sub_epi8(unpack<BITS, Q>(from), zero[Q / 4]));
    if constexpr (Q < 7) unpack_chunk<BITS, Q + 1>(from, zero, to);
}

template <int BITS, bool AFFINE> static void unpack_panel(const Linear& w, const uint8_t* codes, int panel, int8_t* to) {
    const int groups = w.k_padded / w.group;
    U zero[2] = {_mm512_set1_epi8((char)w.zero), _mm512_set1_epi8((char)w.zero)};
    for (int c = 0; c * CHUNK < w.k_padded; c++, codes += CHUNK * PANEL * stored(BITS) / 8, to += CHUNK * PANEL) {
        for (int half = 0; half < 2 && AFFINE; half++) {  // each row's to its four bytes
            const I each = iload_u8(w.zeros + ((int64_t)panel * groups + (c * CHUNK + 16 * half) / w.group) * PANEL);
            zero[half] = imul(each, iset1(0x01010101));
        }
        unpack_chunk<BITS>(codes, zero, to);
    }
}

// Rows [m0, m0 + rows) times an unpacked panel. REST: fewer than TILE. Brings `next` .. `next_end` nearer.
template <bool REST, int BLOCK>
static void tile_int(const Linear& w, const Activations& a, int m0, int rows, int panel, const int8_t* weights, const uint8_t* next,
                     const uint8_t* next_end, float* y, int ldy, bool accumulate) {
    const int block = BLOCK ? BLOCK : w.block, blocks = w.k_padded / block, chunks_per_block = BLOCK ? 1 : block / CHUNK;
    const int blocks_per_group = w.group / block, strips = (blocks + STRIP - 1) / STRIP;
    const int8_t* x = a.codes + (int64_t)m0 * w.k_padded;
    const float* xs = a.scale + (int64_t)m0 * blocks;
    int64_t scales = (int64_t)panel * (w.k_padded / w.group) * PANEL;
    alignas(64) int32_t product[STRIP][TILE][PANEL];
    V sum[TILE], scale = set1(0.0f);
    for (int m = 0; m < TILE; m++) sum[m] = set1(0.0f);
    int left = 0;  // blocks of this scale
    for (int strip = 0; strip < strips; strip++) {
        const int first = blocks * strip / strips, count = blocks * (strip + 1) / strips - first;
        for (int b = 0; b < count; b++) {
            if constexpr (REST) _tile_zero(2);
            else _tile_zero(0);
            for (int c = 0; c < chunks_per_block; c++) {
                const int half = BLOCK == 16 ? (first + b) % 2 : 0;
                _tile_loadd(4, weights + half * 16 * PANEL, 4 * PANEL);
                if constexpr (REST) {
                    _tile_loadd(3, x + half * 16, CHUNK);
                    _tile_dpbssd(2, 3, 4);
                } else {
                    _tile_loadd(1, x + half * 16, CHUNK);
                    _tile_dpbssd(0, 1, 4);
                }
                if (BLOCK == 16 && !half) continue;
                x += TILE * CHUNK;
                weights += CHUNK * PANEL;
                for (int p = 0; p < 4 && next < next_end; p++, next += 64) __builtin_prefetch(next);
            }
            if constexpr (REST) _tile_stored(2, product[b], 4 * PANEL);
            else _tile_stored(0, product[b], 4 * PANEL);
        }
        for (int b = 0; b < count; b++, xs += TILE) {
            if (!left) {
                scale = load_scale(w, scales);
                scales += PANEL;
                left = blocks_per_group;
            }
            left--;
            for (int m = 0; m < TILE; m++) sum[m] = fma(scale, mul(set1(xs[m]), to_float(_mm512_load_si512(product[b][m]))), sum[m]);
        }
    }
    for (int m = 0; m < TILE; m++)
        if (m < rows) finish(w, sum[m], panel * PANEL, y + (int64_t)(m0 + m) * ldy, accumulate);
}

// The rows that tiles take times panels [first, last); returns how many they are. `scratch` holds an unpacked panel.
template <int BITS, int BLOCK, bool AFFINE>
static int multiply(const Linear& w, const Activations& a, int rows, int first, int last, float* y, int ldy, bool accumulate, int8_t* scratch) {
    const int whole = rows / TILE * TILE, rest = rows - whole >= FEWEST ? rows - whole : 0;
    if (!takes<BITS, AFFINE> || whole + rest == 0 || !allowed()) return 0;
    const int64_t bytes = (int64_t)w.k_padded * PANEL * stored(BITS) / 8;
    const Configured configured(shapes(w.block, rest ? rest : 1));
    for (int p = first; p < last; p++) {
        const uint8_t *codes = w.codes + p * bytes, *next = codes + bytes, *end = p + 1 < last ? next + bytes : next;
        unpack_panel<BITS, AFFINE>(w, codes, p, scratch);
        for (int m = 0; m < whole; m += TILE)
            tile_int<false, BLOCK>(w, a, m, TILE, p, scratch, m ? end : next, end, y, ldy, accumulate);
        if (rest) tile_int<true, BLOCK>(w, a, whole, rest, p, scratch, whole ? end : next, end, y, ldy, accumulate);
    }
    return whole + rest;
}

}  // namespace tiles
#endif

template <int BITS, int Q>
INLINE void decode_quads(const Linear& w, const uint8_t* codes, const V* scale, const I* zero, float* out) {
    for (int n = 0; n < PANEL / W; n++) {
        const U u = unpack<BITS, Q>(codes + 4 * W * n);
        const I c[4] = {byte_of<0>(u), byte_of<1>(u), byte_of<2>(u), byte_of<3>(u)};
        for (int j = 0; j < 4; j++) {
            const int h = Q / 4 * (PANEL / W) + n;  // the two halves of a chunk may belong to two groups of 16
            V v = w.table ? lookup16(w.table, c[j]) : to_float(isub(c[j], zero[h]));
            store(out + (4 * Q + j) * PANEL + W * n, mul(v, scale[h]));
        }
    }
    if constexpr (Q < 7) decode_quads<BITS, Q + 1>(w, codes, scale, zero, out);
}

void decode_chunk(const Linear& w, int panel, int c, float* out) {
    const int chunks = w.k_padded / CHUNK, groups = w.k_padded / w.group;
    const uint8_t* codes = w.codes + ((int64_t)panel * chunks + c) * chunk_bytes(w);
    if (w.kind == FP16 || w.kind == BF16) {
        for (int i = 0; i < CHUNK * PANEL; i += W)
            store(out + i, w.kind == FP16 ? load((const uint16_t*)codes + i) : load_bf16((const uint16_t*)codes + i));
        return;
    }
    constexpr int vectors = PANEL / W;
    V scale[2 * vectors];
    I zero[2 * vectors];
    for (int h = 0; h < 2 * vectors; h++) {
        int64_t i = ((int64_t)panel * groups + (c * CHUNK + h / vectors * 16) / w.group) * PANEL + h % vectors * W;
        scale[h] = load_scale(w, i);
        zero[h] = w.zeros ? iload_u8(w.zeros + i) : iset1(w.zero);
    }
    if (w.bits == 8) decode_quads<8, 0>(w, codes, scale, zero, out);
    else if (w.bits == 6) decode_quads<6, 0>(w, codes, scale, zero, out);
    else if (w.bits == 4) decode_quads<4, 0>(w, codes, scale, zero, out);
    else if (w.bits == 3) decode_quads<3, 0>(w, codes, scale, zero, out);
    else decode_quads<2, 0>(w, codes, scale, zero, out);
}

// `decoded`: the whole panel as floats [k][16], or null to decode chunk by chunk.
template <int M, int N>
static void tile_float(const Linear& w, const Activations& a, int m0, int row, const float* decoded, float* y, int ldy, bool accumulate) {
    const int chunks = (w.k + CHUNK - 1) / CHUNK, lane = row % PANEL;
    alignas(64) float own[CHUNK * PANEL];
    const float* x[M];
    V sum[M][N];
    for (int m = 0; m < M; m++) {
        x[m] = a.x + (int64_t)(m0 + m) * a.ldx;
        for (int n = 0; n < N; n++) sum[m][n] = set1(0.0f);
    }
    for (int c = 0; c < chunks; c++) {
        const float* t = own;
        if (decoded) t = decoded + (int64_t)c * CHUNK * PANEL;
        else decode_chunk(w, row / PANEL, c, own);
        for (int k = 0; k < CHUNK; k++) {
            for (int n = 0; n < N; n++) {
                V v = load(t + k * PANEL + lane + W * n);
                for (int m = 0; m < M; m++) sum[m][n] = fma(v, set1(x[m][c * CHUNK + k]), sum[m][n]);
            }
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < N; n++) finish(w, sum[m][n], row + W * n, y + (int64_t)(m0 + m) * ldy, accumulate);
}

template <int BITS, int BLOCK, bool AFFINE>  // rows [m, rows)
static void panel_int(const Linear& w, const Activations& a, int m, int rows, int panel, float* y, int ldy, bool accumulate) {
    constexpr int both = PANEL / W;  // vectors in a panel; small tiles take them together, large ones would spill on AVX2
    const int row = panel * PANEL;
#if defined(KARUI_AVX512) || defined(KARUI_AVX2) || defined(KARUI_NEON)
    for (; m + 8 <= rows; m += 8)
        for (int r = 0; r < PANEL; r += W) tile_int<BITS, 8, 1, BLOCK, AFFINE>(w, a, m, row + r, y, ldy, accumulate);
    if (m + 4 <= rows) {
        for (int r = 0; r < PANEL; r += W) tile_int<BITS, 4, 1, BLOCK, AFFINE>(w, a, m, row + r, y, ldy, accumulate);
        m += 4;
    }
    if (m + 3 == rows) {  // as 2 + 1 the weights would be read twice
        for (int r = 0; r < PANEL; r += W) tile_int<BITS, 3, 1, BLOCK, AFFINE>(w, a, m, row + r, y, ldy, accumulate);
        return;
    }
    if (m + 2 <= rows) { tile_int<BITS, 2, both, BLOCK, AFFINE>(w, a, m, row, y, ldy, accumulate); m += 2; }
#else  // every size of tile takes a tenth of the compilation
    for (; m + 4 <= rows; m += 4)
        for (int r = 0; r < PANEL; r += W) tile_int<BITS, 4, 1, BLOCK, AFFINE>(w, a, m, row + r, y, ldy, accumulate);
#endif
    for (; m < rows; m++) tile_int<BITS, 1, both, BLOCK, AFFINE>(w, a, m, row, y, ldy, accumulate);
}

static void panel_float(const Linear& w, const Activations& a, int rows, int panel, float* y, int ldy, bool accumulate, float* scratch) {
    constexpr int both = PANEL / W;
    const int row = panel * PANEL, chunks = w.k_padded / CHUNK;
    const float* decoded = nullptr;
    if (w.kind == FP32) decoded = (const float*)w.codes + (int64_t)panel * chunks * CHUNK * PANEL;
    else if (rows > 8) {
        for (int c = 0; c < chunks; c++) decode_chunk(w, panel, c, scratch + c * CHUNK * PANEL);
        decoded = scratch;
    }
    int m = 0;
    for (; m + 8 <= rows; m += 8)
        for (int r = 0; r < PANEL; r += W) tile_float<8, 1>(w, a, m, row + r, decoded, y, ldy, accumulate);
    for (; m + 2 <= rows; m += 2) tile_float<2, both>(w, a, m, row, decoded, y, ldy, accumulate);
    if (m < rows) tile_float<1, both>(w, a, m, row, decoded, y, ldy, accumulate);
}

void multiply(const Linear& w, const Activations& a, int rows, int first, int last, float* y, int ldy, bool accumulate, float* scratch) {
    if (!integer(w)) {
        for (int p = first; p < last; p++) panel_float(w, a, rows, p, y, ldy, accumulate, scratch);
        return;
    }
    auto panels = [&](auto bits, auto block, auto affine) {
        constexpr int BITS = decltype(bits)::value, BLOCK = decltype(block)::value;
        constexpr bool AFFINE = decltype(affine)::value;
        int done = 0;
#ifdef __AMX_INT8__
        done = tiles::multiply<BITS, BLOCK, AFFINE>(w, a, rows, first, last, y, ldy, accumulate, (int8_t*)scratch);
#endif
        for (int p = first; p < last && done < rows; p++) panel_int<BITS, BLOCK, AFFINE>(w, a, done, rows, p, y, ldy, accumulate);
    };
    auto with = [&](auto bits, auto affine) {
        if (w.block == 32) panels(bits, std::integral_constant<int, 32>(), affine);
        else if (w.block == 16) panels(bits, std::integral_constant<int, 16>(), affine);
        else panels(bits, std::integral_constant<int, 0>(), affine);
    };
    auto with_bits = [&](auto affine) {
        if (w.kind == E2M1) with(std::integral_constant<int, HALVES>(), std::false_type());
        else if (w.bits == 8) with(std::integral_constant<int, 8>(), affine);
        else if (w.bits == 6) with(std::integral_constant<int, 6>(), affine);
        else if (w.bits == 4) with(std::integral_constant<int, 4>(), affine);
        else if (w.bits == 3) with(std::integral_constant<int, 3>(), affine);
        else with(std::integral_constant<int, 2>(), affine);
    };
    if (w.zeros) with_bits(std::true_type());
    else with_bits(std::false_type());
}
