// Emulated low-precision operands in one pass: value = round(x * encode scale) * decode scale, over tiles that share a scale.
//
// A matrix S is row-major [rows, cols]. A tile is tr x tc elements of S and has one scale, scales [ceil(rows/tr), ceil(cols/tc)].
// A transposed operand is served on its own memory: its 1 x 16 tiles are 16 x 1 tiles of S. Scales come from the caller, so every
// library's rule for them stands in one place, in Python. Compiled without contraction: the bits are those of the torch reference.
//
// Stochastic rounding draws Philox4x32-10 words: element i of the operand (row-major in the operand's own orientation, K columns)
// takes word i % 4 of counter (i / 4, step, layer, tensor). K is a multiple of 4.
#include <cmath>
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Element { kE4M3 = 0, kE5M2 = 1, kE2M1 = 2 };

inline uint32_t bits_of(float x) { uint32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(uint32_t b) { float x; std::memcpy(&x, &b, 4); return x; }

// To the nearest value of E4M3 or E5M2, ties to even; saturates; NaN stays NaN, zero keeps its sign.
template <int kElement>
inline float round_float8(float x) {
    constexpr float kMax = kElement == kE4M3 ? 448.0f : 57344.0f;
    constexpr int kDrop = kElement == kE4M3 ? 20 : 21;                       // mantissa bits that go
    constexpr float kNormal = kElement == kE4M3 ? 0x1p-6f : 0x1p-14f;        // smallest normal number
    constexpr float kMagic = kElement == kE4M3 ? 0x1p14f : 0x1p7f;           // its unit is the subnormals' step
    float v = x > kMax ? kMax : x;
    v = v < -kMax ? -kMax : v;
    uint32_t b = bits_of(v), sign = b & 0x80000000u, a = b & 0x7fffffffu;
    uint32_t kept = (a + ((1u << (kDrop - 1)) - 1) + ((a >> kDrop) & 1)) & ~((1u << kDrop) - 1);
    uint32_t small = bits_of((float_of(a) + kMagic) - kMagic);
    uint32_t r = float_of(a) < kNormal ? small : kept;
    r = a > 0x7f800000u ? a : r;
    return float_of(r | sign);
}

// The code of a value that `round_float8` gave.
template <int kElement>
inline uint8_t code_float8(float v) {
    constexpr int kDrop = kElement == kE4M3 ? 20 : 21;
    constexpr int kBias = kElement == kE4M3 ? 120 << 3 : 112 << 2;           // (127 - bias) in the code's exponent field
    constexpr float kNormal = kElement == kE4M3 ? 0x1p-6f : 0x1p-14f;
    constexpr float kSteps = kElement == kE4M3 ? 0x1p9f : 0x1p16f;
    uint32_t b = bits_of(v), a = b & 0x7fffffffu;
    int32_t normal = int32_t(a >> kDrop) - kBias;
    float scaled = float_of(a) < kNormal ? float_of(a) * kSteps : 0.0f;
    int32_t code = float_of(a) < kNormal ? int32_t(scaled) : normal;
    code = a > 0x7f800000u ? 0x7f : code;
    return uint8_t(code | int32_t((b >> 24) & 0x80));
}

// E2M1: below 2, 4 and 6 the step is 0.5, 1 and 2. NaN gives 6. `up` in [0, 1) is added before the floor; < 0: ties to even.
template <bool kStochastic>
inline float round_e2m1(float x, float up) {
    float size = std::fabs(x);
    size = size < 6.0f ? size : 6.0f;
    float per = size >= 4.0f ? 0.5f : size >= 2.0f ? 1.0f : 2.0f, step = size >= 4.0f ? 2.0f : size >= 2.0f ? 1.0f : 0.5f;
    float steps = size * per;
    if (kStochastic) {
        steps = float(int32_t(steps + up));
    } else {
        steps = (steps + 0x1.8p23f) - 0x1.8p23f;
    }
    float r = steps * step;
    uint32_t sign = x != x ? 0u : bits_of(x) & 0x80000000u;
    return float_of(bits_of(r) | sign);
}

struct Key { uint32_t k0, k1, step, layer, tensor; };

// kLanes counters at once: index[l] -> words[c][l]
constexpr int kLanes = 16;
inline void philox(const uint64_t* index, const Key& key, uint32_t (*words)[kLanes]) {
    uint32_t c0[kLanes], c1[kLanes], c2[kLanes], c3[kLanes];
    for (int l = 0; l < kLanes; l++) { c0[l] = uint32_t(index[l]); c1[l] = key.step; c2[l] = key.layer; c3[l] = key.tensor; }
    uint32_t k0 = key.k0, k1 = key.k1;
    for (int round = 0; round < 10; round++) {
        for (int l = 0; l < kLanes; l++) {
            uint64_t p0 = uint64_t(c0[l]) * 0xD2511F53u, p1 = uint64_t(c2[l]) * 0xCD9E8D57u;
            uint32_t n0 = uint32_t(p1 >> 32) ^ c1[l] ^ k0, n2 = uint32_t(p0 >> 32) ^ c3[l] ^ k1;
            c1[l] = uint32_t(p1); c3[l] = uint32_t(p0); c0[l] = n0; c2[l] = n2;
        }
        k0 += 0x9E3779B9u; k1 += 0xBB67AE85u;
    }
    std::memcpy(words[0], c0, sizeof c0); std::memcpy(words[1], c1, sizeof c1);
    std::memcpy(words[2], c2, sizeof c2); std::memcpy(words[3], c3, sizeof c3);
}

inline float uniform(uint32_t word) { return float(int32_t(word >> 10)) * 0x1p-22f; }  // 22 of the 31 bits, as the reference

template <int kElement, bool kStochastic>
inline float rounded(float x, float up) {
    if constexpr (kElement == kE2M1) return round_e2m1<kStochastic>(x, up);
    else return round_float8<kElement>(x);
}

// One row of S with the scales of its tiles; `up` is null or the row's uniform numbers.
template <int kElement, bool kStochastic>
void row(const float* __restrict x, int64_t cols, int64_t tc, const float* __restrict enc, const float* __restrict dec,
         const float* __restrict up, float* __restrict out) {
    if (tc == 1) {
        for (int64_t j = 0; j < cols; j++)
            out[j] = rounded<kElement, kStochastic>(x[j] * enc[j], kStochastic ? up[j] : 0.0f) * dec[j];
        return;
    }
    for (int64_t tile = 0, from = 0; from < cols; tile++, from += tc) {
        const float e = enc[tile], d = dec[tile];
        const int64_t to = from + tc < cols ? from + tc : cols;
        if (to - from == 16) {
            for (int64_t j = from; j < from + 16; j++)
                out[j] = rounded<kElement, kStochastic>(x[j] * e, kStochastic ? up[j] : 0.0f) * d;
        } else {
            for (int64_t j = from; j < to; j++)
                out[j] = rounded<kElement, kStochastic>(x[j] * e, kStochastic ? up[j] : 0.0f) * d;
        }
    }
}

template <int kElement>
void nearest(const float* x, int64_t rows, int64_t cols, int64_t tr, int64_t tc, const float* enc, const float* dec, float* out) {
    const int64_t wide = (cols + tc - 1) / tc;
    for (int64_t i = 0; i < rows; i++)
        row<kElement, false>(x + i * cols, cols, tc, enc + i / tr * wide, dec + i / tr * wide, nullptr, out + i * cols);
}

}  // namespace

// out [rows, cols] of x [rows, cols], nearest.
EXPORT void karui_lowbit_nearest(const float* x, int64_t rows, int64_t cols, int64_t tr, int64_t tc, const float* enc,
                                 const float* dec, int element, float* out) {
    if (element == kE4M3) nearest<kE4M3>(x, rows, cols, tr, tc, enc, dec, out);
    else if (element == kE5M2) nearest<kE5M2>(x, rows, cols, tr, tc, enc, dec, out);
    else nearest<kE2M1>(x, rows, cols, tr, tc, enc, dec, out);
}

// One scale for all; the codes beside the values.
EXPORT void karui_lowbit_codes(const float* __restrict x, int64_t n, float enc, float dec, int element, uint8_t* __restrict codes,
                               float* __restrict out) {
    if (element == kE4M3) {
        for (int64_t i = 0; i < n; i++) {
            const float v = round_float8<kE4M3>(x[i] * enc);
            codes[i] = code_float8<kE4M3>(v); out[i] = v * dec;
        }
    } else {
        for (int64_t i = 0; i < n; i++) {
            const float v = round_float8<kE5M2>(x[i] * enc);
            codes[i] = code_float8<kE5M2>(v); out[i] = v * dec;
        }
    }
}

// E2M1, stochastic. down = 0: the operand is S, K = cols. down = 1: the operand is S transposed, K = rows.
EXPORT void karui_lowbit_stochastic(const float* x, int64_t rows, int64_t cols, int64_t tr, int64_t tc, const float* enc,
                                    const float* dec, int down, const uint32_t* key5, float* out) {
    const Key key{key5[0], key5[1], key5[2], key5[3], key5[4]};
    const int64_t wide = (cols + tc - 1) / tc;
    uint64_t index[kLanes];
    uint32_t words[4][kLanes];
    if (!down) {
        alignas(64) float up[4 * kLanes];
        // whole tiles per chunk: tc is 1, or divides 64
        for (int64_t i = 0; i < rows; i++) {
            for (int64_t from = 0; from < cols; from += 4 * kLanes) {
                for (int l = 0; l < kLanes; l++) index[l] = uint64_t(i * cols + from) / 4 + l;
                philox(index, key, words);
                for (int l = 0; l < kLanes; l++)
                    for (int c = 0; c < 4; c++) up[4 * l + c] = uniform(words[c][l]);
                const int64_t n = cols - from < 4 * kLanes ? cols - from : 4 * kLanes;
                const int64_t at = i / tr * wide + from / tc;
                row<kE2M1, true>(x + i * cols + from, n, tc, enc + at, dec + at, up, out + i * cols + from);
            }
        }
        return;
    }
    alignas(64) float up[4][kLanes];
    for (int64_t i = 0; i < rows; i += 4) {  // four rows share their counters
        for (int64_t from = 0; from < cols; from += kLanes) {
            const int64_t n = cols - from < kLanes ? cols - from : kLanes;
            for (int l = 0; l < kLanes; l++) index[l] = uint64_t((from + l) * rows + i) / 4;
            philox(index, key, words);
            for (int c = 0; c < 4; c++)
                for (int l = 0; l < kLanes; l++) up[c][l] = uniform(words[c][l]);
            for (int c = 0; c < 4; c++) {
                const int64_t at = (i + c) / tr * wide + from / tc;
                row<kE2M1, true>(x + (i + c) * cols + from, n, tc, enc + at, dec + at, up[c], out + (i + c) * cols + from);
            }
        }
    }
}

// Largest magnitude of each tile; NaN wins, as in torch.
EXPORT void karui_lowbit_amax(const float* __restrict x, int64_t rows, int64_t cols, int64_t tr, int64_t tc, float* __restrict out) {
    const int64_t tall = (rows + tr - 1) / tr, wide = (cols + tc - 1) / tc;
    uint32_t* top = reinterpret_cast<uint32_t*>(out);  // magnitudes order as integers, NaN above all
    for (int64_t i = 0; i < tall * wide; i++) top[i] = 0;
    for (int64_t i = 0; i < rows; i++) {
        const uint32_t* r = reinterpret_cast<const uint32_t*>(x) + i * cols;
        uint32_t* t = top + i / tr * wide;
        if (tc == 1) {
            for (int64_t j = 0; j < cols; j++) { const uint32_t a = r[j] & 0x7fffffffu; t[j] = a > t[j] ? a : t[j]; }
            continue;
        }
        for (int64_t tile = 0, from = 0; from < cols; tile++, from += tc) {
            const int64_t to = from + tc < cols ? from + tc : cols;
            uint32_t best = t[tile];
            if (to - from == 16) {
                for (int64_t j = from; j < from + 16; j++) { const uint32_t a = r[j] & 0x7fffffffu; best = a > best ? a : best; }
            } else {
                for (int64_t j = from; j < to; j++) { const uint32_t a = r[j] & 0x7fffffffu; best = a > best ? a : best; }
            }
            t[tile] = best;
        }
    }
}

// diag(signs) times Sylvester's 16 x 16 matrix over 4, along the columns of S (down = 0) or its rows (1); both multiples of 16.
// Butterflies in the order of the reference: strides 1, 2, 4, 8.
EXPORT void karui_lowbit_hadamard(const float* __restrict x, int64_t rows, int64_t cols, int down, const float* __restrict signs,
                                  float* __restrict out) {
    constexpr int kBlock = 16;
    float v[kBlock][kLanes];
    auto transform = [&] {
        for (int stride = 1; stride < kBlock; stride *= 2)
            for (int i = 0; i < kBlock; i++) {
                if (i & stride) continue;
                for (int l = 0; l < kLanes; l++) {
                    const float a = v[i][l], b = v[i + stride][l];
                    v[i][l] = a + b; v[i + stride][l] = a - b;
                }
            }
    };
    if (down) {
        for (int64_t i = 0; i < rows; i += kBlock)
            for (int64_t from = 0; from < cols; from += kLanes) {
                const int64_t n = cols - from < kLanes ? cols - from : kLanes;
                for (int k = 0; k < kBlock; k++)
                    for (int64_t l = 0; l < n; l++) v[k][l] = x[(i + k) * cols + from + l] * signs[k];
                transform();
                for (int k = 0; k < kBlock; k++)
                    for (int64_t l = 0; l < n; l++) out[(i + k) * cols + from + l] = v[k][l] * 0.25f;
            }
        return;
    }
    const int64_t pieces = rows * cols / kBlock;
    for (int64_t from = 0; from < pieces; from += kLanes) {
        const int64_t n = pieces - from < kLanes ? pieces - from : kLanes;
        for (int64_t l = 0; l < n; l++)
            for (int k = 0; k < kBlock; k++) v[k][l] = x[(from + l) * kBlock + k] * signs[k];
        transform();
        for (int64_t l = 0; l < n; l++)
            for (int k = 0; k < kBlock; k++) out[(from + l) * kBlock + k] = v[k][l] * 0.25f;
    }
}
