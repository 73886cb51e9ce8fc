// The few vector operations every kernel is written in, once per instruction set.
//
// W is the number of float lanes: 16 (AVX-512 with VNNI) or 8 (AVX2+FMA+F16C, NEON in neon.h, and the plain C++ fallback).
//   V  W floats        I  W int32        U  4*W bytes, read as W groups of four bytes
// Every kernel uses these operations in one fixed order, so that a result does not depend on which tile size, thread or
// batch computed it. The instruction sets may differ from each other in the last bit (the fallback has no fused
// multiply-add), never from themselves. -ffp-contract=off keeps the compiler from fusing on its own.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(KARUI_AVX512) || defined(KARUI_AVX2)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

constexpr int HALVES = 48;  // in place of a number of bits: e2m1 codes, which are whole numbers of halves

INLINE float bits_to_float(uint32_t b) { float f; memcpy(&f, &b, 4); return f; }
INLINE float round_to_bf16(float x) {  // to nearest even; NaN stays NaN
    uint32_t b;
    memcpy(&b, &x, 4);
    const uint32_t up = b + 0x7fff + (b >> 16 & 1), nan = b | 0x400000;
    return bits_to_float(((b & 0x7fffffff) > 0x7f800000 ? nan : up) & 0xffff0000);
}
INLINE int32_t load_i32(const void* p) { int32_t v; memcpy(&v, p, 4); return v; }

#if defined(KARUI_AVX512)

constexpr int W = 16;
typedef __m512 V;
typedef __m512i I;
typedef __m512i U;

INLINE V load(const float* p) { return _mm512_loadu_ps(p); }
INLINE void store(float* p, V a) { _mm512_storeu_ps(p, a); }
INLINE V set1(float a) { return _mm512_set1_ps(a); }
INLINE V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
INLINE V add(V a, V b) { return _mm512_add_ps(a, b); }
INLINE V sub(V a, V b) { return _mm512_sub_ps(a, b); }
INLINE V mul(V a, V b) { return _mm512_mul_ps(a, b); }
INLINE V div(V a, V b) { return _mm512_div_ps(a, b); }
INLINE V vmax(V a, V b) { return _mm512_max_ps(a, b); }
INLINE V vmin(V a, V b) { return _mm512_min_ps(a, b); }
INLINE V vabs(V a) { return _mm512_abs_ps(a); }
INLINE V zero_below(V a, V x, float limit) {  // a where x >= limit, else 0
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_GE_OQ), a);
}
INLINE float hsum(V a) { return _mm512_reduce_add_ps(a); }
INLINE float hmax(V a) { return _mm512_reduce_max_ps(a); }
INLINE V load(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
INLINE V load(const int8_t* p) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
INLINE V load_bf16(const uint16_t* p) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16));
}
INLINE void store(uint16_t* p, V a) { _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
INLINE I iset1(int32_t a) { return _mm512_set1_epi32(a); }
INLINE I iload_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
INLINE I iadd(I a, I b) { return _mm512_add_epi32(a, b); }
INLINE I isub(I a, I b) { return _mm512_sub_epi32(a, b); }
INLINE I imul(I a, I b) { return _mm512_mullo_epi32(a, b); }
INLINE int32_t ihsum(I a) { return _mm512_reduce_add_epi32(a); }
INLINE V to_float(I a) { return _mm512_cvtepi32_ps(a); }
INLINE I round_int(V a) { return _mm512_cvtps_epi32(a); }
INLINE void store_i8(int8_t* p, I a) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(a)); }
INLINE V pow2(I n) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23)); }
INLINE U bytes(const void* p) { return _mm512_loadu_si512(p); }
INLINE U quad(const int8_t* x) { return _mm512_set1_epi32(load_i32(x)); }
template <int S, int MASK> INLINE U field(U a) {  // (byte >> S) & MASK
    return _mm512_and_si512(S ? _mm512_srli_epi16(a, S) : a, _mm512_set1_epi8((char)MASK));
}
template <int S, int MASK> INLINE U field_up(U a) {  // (byte << S) & MASK
    return _mm512_and_si512(S ? _mm512_slli_epi16(a, S) : a, _mm512_set1_epi8((char)MASK));
}
INLINE U bor(U a, U b) { return _mm512_or_si512(a, b); }
INLINE U flipped(U a) { return _mm512_xor_si512(a, _mm512_set1_epi8((char)0x80)); }  // signed bytes to unsigned, 128 more
INLINE void store_bytes(void* p, U a) { _mm512_storeu_si512(p, a); }
// Of each 16 bytes: out[0] a0 b0 c0 d0 a1 b1 c1 d1 .. d3, out[1] from a4 on, and so on.
INLINE void interleave(U a, U b, U c, U d, U* out) {
    const U ab[2] = {_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b)}, cd[2] = {_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d)};
    for (int i = 0; i < 2; i++) {
        out[2 * i] = _mm512_unpacklo_epi16(ab[i], cd[i]);
        out[2 * i + 1] = _mm512_unpackhi_epi16(ab[i], cd[i]);
    }
}
template <int J> INLINE I byte_of(U a) { return _mm512_and_si512(_mm512_srli_epi32(a, 8 * J), _mm512_set1_epi32(255)); }
INLINE V lookup16(const float* table, I index) { return _mm512_permutexvar_ps(index, load(table)); }
// step * code + low of BITS-bit codes, which stand at bit S of the lanes of `a` with anything above them.
template <int BITS> struct Levels {  // a lookup reads the four lowest bits of its index
    V table;
    Levels(float step, float low) {
        const V four = _mm512_setr_ps(0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3);
        const V all = BITS == 2 ? four : _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
        table = fma(set1(step), all, set1(low));
    }
    template <int S> V at(I a) const { return _mm512_permutexvar_ps(S ? _mm512_srli_epi32(a, S) : a, table); }
};
INLINE V load_fours(const float* p, int64_t row) {  // four floats each of rows 0, 4, 8, 12
    const V a = _mm512_insertf32x4(_mm512_castps128_ps512(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4 * row), 1);
    return _mm512_insertf32x4(_mm512_insertf32x4(a, _mm_loadu_ps(p + 8 * row), 2), _mm_loadu_ps(p + 12 * row), 3);
}
INLINE void store_fours(float* p, int64_t row, V a) {  // the inverse
    _mm_storeu_ps(p, _mm512_extractf32x4_ps(a, 0));
    _mm_storeu_ps(p + 4 * row, _mm512_extractf32x4_ps(a, 1));
    _mm_storeu_ps(p + 8 * row, _mm512_extractf32x4_ps(a, 2));
    _mm_storeu_ps(p + 12 * row, _mm512_extractf32x4_ps(a, 3));
}
// Of each four lanes of a and b: a0 b0 a1 b1, a2 b2 a3 b3, a0 a1 b0 b1, a2 a3 b2 b3.
INLINE V zip_low(V a, V b) { return _mm512_unpacklo_ps(a, b); }
INLINE V zip_high(V a, V b) { return _mm512_unpackhi_ps(a, b); }
INLINE V pairs_low(V a, V b) { return _mm512_shuffle_ps(a, b, 0x44); }
INLINE V pairs_high(V a, V b) { return _mm512_shuffle_ps(a, b, 0xee); }
// out[i] = the sum of lanes i, 4 + i and so on, pair by pair.
INLINE void sum_fours(V a, float* out) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}
#ifdef __AVX512BF16__
// Lanes of two bf16 numbers, rounded to nearest even: (a0, b0), (a1, b1)...; and of 2 W floats in order.
INLINE V bf16_pairs(V a, V b) {
    const __m512i apart = (__m512i)_mm512_cvtne2ps_pbh(b, a), order = _mm512_set_epi16(
        31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(order, apart));
}
INLINE V bf16_words(V low, V high) { return (V)_mm512_cvtne2ps_pbh(high, low); }
INLINE V beyond_bf16(V a) {  // what rounding a to bf16 drops
    return sub(a, (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(a)), 16));
}
INLINE V dot2(V a, V b, V sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }  // sum + a0 b0 + a1 b1
#endif

// e2m1 codes to twice their number plus 12.
INLINE U halves(U codes) {
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), codes);
}
// Dot products of unsigned weight codes with signed activations, exact in int32: open, step (8 times or fewer), close.
template <int BITS> struct Dot {
    static constexpr int bias = 0;  // close() holds sum (code - bias) * x
    typedef __m512i P;
    INLINE P open(I total) { return total; }
    INLINE P step(P p, U w, U x) { return _mm512_dpbusd_epi32(p, w, x); }
    INLINE I close(I, P p) { return p; }
};

#elif defined(KARUI_AVX2)

constexpr int W = 8;
typedef __m256 V;
typedef __m256i I;
typedef __m256i U;

INLINE V load(const float* p) { return _mm256_loadu_ps(p); }
INLINE void store(float* p, V a) { _mm256_storeu_ps(p, a); }
INLINE V set1(float a) { return _mm256_set1_ps(a); }
INLINE V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
INLINE V add(V a, V b) { return _mm256_add_ps(a, b); }
INLINE V sub(V a, V b) { return _mm256_sub_ps(a, b); }
INLINE V mul(V a, V b) { return _mm256_mul_ps(a, b); }
INLINE V div(V a, V b) { return _mm256_div_ps(a, b); }
INLINE V vmax(V a, V b) { return _mm256_max_ps(a, b); }
INLINE V vmin(V a, V b) { return _mm256_min_ps(a, b); }
INLINE V vabs(V a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE V zero_below(V a, V x, float limit) { return _mm256_and_ps(a, _mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_GE_OQ)); }
INLINE float hsum(V a) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE float hmax(V a) {
    __m128 s = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    s = _mm_max_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}
INLINE V load(const uint16_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }
INLINE V load(const int8_t* p) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
INLINE V load_bf16(const uint16_t* p) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}
INLINE void store(uint16_t* p, V a) { _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(a, _MM_FROUND_TO_NEAREST_INT)); }
INLINE I iset1(int32_t a) { return _mm256_set1_epi32(a); }
INLINE I iload_u8(const uint8_t* p) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)); }
INLINE I iadd(I a, I b) { return _mm256_add_epi32(a, b); }
INLINE I isub(I a, I b) { return _mm256_sub_epi32(a, b); }
INLINE I imul(I a, I b) { return _mm256_mullo_epi32(a, b); }
INLINE int32_t ihsum(I a) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}
INLINE V to_float(I a) { return _mm256_cvtepi32_ps(a); }
INLINE I round_int(V a) { return _mm256_cvtps_epi32(a); }
INLINE void store_i8(int8_t* p, I a) {
    __m128i s = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64((__m128i*)p, _mm_packs_epi16(s, s));
}
INLINE V pow2(I n) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23)); }
INLINE U bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
INLINE U quad(const int8_t* x) { return _mm256_set1_epi32(load_i32(x)); }
template <int S, int MASK> INLINE U field(U a) {
    return _mm256_and_si256(S ? _mm256_srli_epi16(a, S) : a, _mm256_set1_epi8((char)MASK));
}
template <int S, int MASK> INLINE U field_up(U a) {
    return _mm256_and_si256(S ? _mm256_slli_epi16(a, S) : a, _mm256_set1_epi8((char)MASK));
}
INLINE U bor(U a, U b) { return _mm256_or_si256(a, b); }
INLINE U flipped(U a) { return _mm256_xor_si256(a, _mm256_set1_epi8((char)0x80)); }
INLINE void store_bytes(void* p, U a) { _mm256_storeu_si256((__m256i*)p, a); }
INLINE void interleave(U a, U b, U c, U d, U* out) {
    const U ab[2] = {_mm256_unpacklo_epi8(a, b), _mm256_unpackhi_epi8(a, b)}, cd[2] = {_mm256_unpacklo_epi8(c, d), _mm256_unpackhi_epi8(c, d)};
    for (int i = 0; i < 2; i++) {
        out[2 * i] = _mm256_unpacklo_epi16(ab[i], cd[i]);
        out[2 * i + 1] = _mm256_unpackhi_epi16(ab[i], cd[i]);
    }
}
template <int J> INLINE I byte_of(U a) { return _mm256_and_si256(_mm256_srli_epi32(a, 8 * J), _mm256_set1_epi32(255)); }
template <int BITS> struct Levels {
    V step, low;
    Levels(float s, float l) : step(set1(s)), low(set1(l)) {}
    template <int S> V at(I a) const {
        return fma(step, _mm256_cvtepi32_ps(_mm256_and_si256(S ? _mm256_srli_epi32(a, S) : a, _mm256_set1_epi32((1 << BITS) - 1))), low);
    }
};
template <> struct Levels<2> {  // a lookup reads the three lowest bits of its index
    V table;
    Levels(float step, float low) { table = fma(set1(step), _mm256_setr_ps(0, 1, 2, 3, 0, 1, 2, 3), set1(low)); }
    template <int S> V at(I a) const { return _mm256_permutevar8x32_ps(table, S ? _mm256_srli_epi32(a, S) : a); }
};
INLINE V lookup16(const float* table, I i) {
    V low = _mm256_permutevar8x32_ps(load(table), i), high = _mm256_permutevar8x32_ps(load(table + 8), i);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));  // bit 3 chooses the half
}
INLINE V load_fours(const float* p, int64_t row) {
    return _mm256_insertf128_ps(_mm256_castps128_ps256(_mm_loadu_ps(p)), _mm_loadu_ps(p + 4 * row), 1);
}
INLINE void store_fours(float* p, int64_t row, V a) {
    _mm_storeu_ps(p, _mm256_castps256_ps128(a));
    _mm_storeu_ps(p + 4 * row, _mm256_extractf128_ps(a, 1));
}
INLINE V zip_low(V a, V b) { return _mm256_unpacklo_ps(a, b); }
INLINE V zip_high(V a, V b) { return _mm256_unpackhi_ps(a, b); }
INLINE V pairs_low(V a, V b) { return _mm256_shuffle_ps(a, b, 0x44); }
INLINE V pairs_high(V a, V b) { return _mm256_shuffle_ps(a, b, 0xee); }
INLINE void sum_fours(V a, float* out) { _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1))); }

#if defined(__AVXVNNI__) || (defined(__AVX512VNNI__) && defined(__AVX512VL__))  // the instruction of AVX-512, on 8 lanes
INLINE U halves(U codes) {
    const __m128i table = _mm_setr_epi8(12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}
template <int BITS> struct Dot {
    static constexpr int bias = 0;
    typedef __m256i P;
    INLINE P open(I total) { return total; }
#ifdef __AVXVNNI__
    INLINE P step(P p, U w, U x) { return _mm256_dpbusd_avx_epi32(p, w, x); }
#else
    INLINE P step(P p, U w, U x) { return _mm256_dpbusd_epi32(p, w, x); }
#endif
    INLINE I close(I, P p) { return p; }
};
#else
// Codes of up to 4 bits: 8 int16 partial sums of at most 2 * 15 * 127 stay below 30,480, so one widening per 32 inputs is exact.
template <int BITS> struct Dot {
    static constexpr int bias = 0;
    typedef __m256i P;
    INLINE P open(I) { return _mm256_setzero_si256(); }
    INLINE P step(P p, U w, U x) {
        p = _mm256_add_epi16(p, _mm256_maddubs_epi16(w, x));
        asm("" : "+x"(p));  // GCC would regroup the sums of a tile and spill them all: half the speed
        return p;
    }
    INLINE I close(I total, P p) { return _mm256_add_epi32(total, _mm256_madd_epi16(p, _mm256_set1_epi16(1))); }
};
// The pairs of 6-bit codes stay below 16,003; two of them fill int16, so each is widened.
template <> struct Dot<6> {
    static constexpr int bias = 0;
    typedef __m256i P;
    INLINE P open(I total) { return total; }
    INLINE P step(P p, U w, U x) {
        p = _mm256_add_epi32(p, _mm256_madd_epi16(_mm256_maddubs_epi16(w, x), _mm256_set1_epi16(1)));
        asm("" : "+x"(p));
        return p;
    }
    INLINE I close(I, P p) { return p; }
};
// 8-bit codes would saturate int16 as unsigned: |code - 128| <= 128 times x with the sign moved over stays below 32,513.
template <> struct Dot<8> {
    static constexpr int bias = 128;
    typedef __m256i P;
    INLINE P open(I total) { return total; }
    INLINE P step(P p, U w, U x) {
        w = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
        __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
        p = _mm256_add_epi32(p, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
        asm("" : "+x"(p));
        return p;
    }
    INLINE I close(I, P p) { return p; }
};
// e2m1 codes to twice their number, signed: 8 sums of at most 2 * 12 * 127 stay below 24,384.
INLINE U halves(U codes) {
    const __m128i table = _mm_setr_epi8(0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12);
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), codes);
}
template <> struct Dot<HALVES> {
    static constexpr int bias = 12;
    typedef __m256i P;
    INLINE P open(I) { return _mm256_setzero_si256(); }
    INLINE P step(P p, U w, U x) {
        p = _mm256_add_epi16(p, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)));
        asm("" : "+x"(p));
        return p;
    }
    INLINE I close(I total, P p) { return _mm256_add_epi32(total, _mm256_madd_epi16(p, _mm256_set1_epi16(1))); }
};
#endif

#elif defined(KARUI_NEON)
#include "neon.h"

#else  // plain C++ (GCC and clang vector extensions)

constexpr int W = 8;
typedef float V __attribute__((vector_size(32)));
typedef int32_t I __attribute__((vector_size(32)));
typedef uint8_t U __attribute__((vector_size(32)));
typedef uint16_t H8 __attribute__((vector_size(16)));

static inline float half_to_float(uint16_t h) {
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = (h >> 10) & 31, m = h & 1023;
    if (e == 0) { float f = (float)m * 0x1p-24f; return sign ? -f : f; }
    return bits_to_float(sign | (e == 31 ? 0x7f800000u | m << 13 : (e + 112) << 23 | m << 13));
}
static inline uint16_t float_to_half(float f) {  // round to nearest even
    uint32_t b; memcpy(&b, &f, 4);
    uint16_t sign = (uint16_t)(b >> 16 & 0x8000);
    float a = fabsf(f);
    if (!(a < 65520.0f)) return sign | (a > 0 ? 0x7c00 : 0x7e00);
    if (a < 0x1p-14f) return sign | (uint16_t)lrintf(a * 0x1p24f);
    b &= 0x7fffffff;
    return sign | (uint16_t)((b + 0xfff + (b >> 13 & 1) - (112u << 23)) >> 13);
}
#define EACH for (int i = 0; i < W; i++)
INLINE V load(const float* p) { V a; memcpy(&a, p, sizeof a); return a; }
INLINE void store(float* p, V a) { memcpy(p, &a, sizeof a); }
INLINE V set1(float a) { return V{a, a, a, a, a, a, a, a}; }
INLINE V fma(V a, V b, V c) { return a * b + c; }
INLINE V add(V a, V b) { return a + b; }
INLINE V sub(V a, V b) { return a - b; }
INLINE V mul(V a, V b) { return a * b; }
INLINE V div(V a, V b) { return a / b; }
INLINE V vmax(V a, V b) { V r; EACH r[i] = a[i] > b[i] ? a[i] : b[i]; return r; }
INLINE V vmin(V a, V b) { V r; EACH r[i] = a[i] < b[i] ? a[i] : b[i]; return r; }
INLINE V vabs(V a) { V r; EACH r[i] = fabsf(a[i]); return r; }
INLINE V zero_below(V a, V x, float limit) { V r; EACH r[i] = x[i] >= limit ? a[i] : 0.0f; return r; }
INLINE float hsum(V a) { return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7])); }
INLINE float hmax(V a) { float m = a[0]; EACH m = a[i] > m ? a[i] : m; return m; }
INLINE V load(const uint16_t* p) { V r; EACH r[i] = half_to_float(p[i]); return r; }
INLINE V load(const int8_t* p) { V r; EACH r[i] = (float)p[i]; return r; }
INLINE V load_bf16(const uint16_t* p) { V r; EACH r[i] = bits_to_float((uint32_t)p[i] << 16); return r; }
INLINE void store(uint16_t* p, V a) { EACH p[i] = float_to_half(a[i]); }
INLINE I iset1(int32_t a) { return I{a, a, a, a, a, a, a, a}; }
INLINE I iload_u8(const uint8_t* p) { I r; EACH r[i] = p[i]; return r; }
INLINE I iadd(I a, I b) { return a + b; }
INLINE I isub(I a, I b) { return a - b; }
INLINE I imul(I a, I b) { return a * b; }
INLINE int32_t ihsum(I a) { int32_t s = 0; EACH s += a[i]; return s; }
INLINE V to_float(I a) { return __builtin_convertvector(a, V); }
INLINE I round_int(V a) { I r; EACH r[i] = (int32_t)lrintf(a[i]); return r; }
INLINE void store_i8(int8_t* p, I a) { EACH p[i] = (int8_t)a[i]; }
INLINE V pow2(I n) { I b = (n + 127) << 23; V r; memcpy(&r, &b, sizeof r); return r; }
INLINE U bytes(const void* p) { U a; memcpy(&a, p, sizeof a); return a; }
INLINE U quad(const int8_t* x) { I a = iset1(load_i32(x)); U r; memcpy(&r, &a, sizeof r); return r; }
template <int S, int MASK> INLINE U field(U a) { return (a >> S) & (uint8_t)MASK; }
template <int S, int MASK> INLINE U field_up(U a) { return (a << S) & (uint8_t)MASK; }
INLINE U bor(U a, U b) { return a | b; }
INLINE U flipped(U a) { return a ^ (uint8_t)0x80; }
INLINE void store_bytes(void* p, U a) { memcpy(p, &a, sizeof a); }
INLINE void interleave(U a, U b, U c, U d, U* out) {
    for (int i = 0; i < 4 * W; i++) {
        const U* from[4] = {&a, &b, &c, &d};
        for (int j = 0; j < 4; j++) out[j][i] = (*from[i % 4])[i / 16 * 16 + 4 * j + i % 16 / 4];
    }
}
template <int J> INLINE I byte_of(U a) { I r; EACH r[i] = a[4 * i + J]; return r; }
INLINE V lookup16(const float* table, I index) { V r; EACH r[i] = table[index[i]]; return r; }
template <int BITS> struct Levels {
    float step, low;
    Levels(float s, float l) : step(s), low(l) {}
    template <int S> V at(I a) const { V r; EACH r[i] = step * (float)(a[i] >> S & ((1 << BITS) - 1)) + low; return r; }
};
INLINE V load_fours(const float* p, int64_t row) { V r; EACH r[i] = p[i / 4 * 4 * row + i % 4]; return r; }
INLINE void store_fours(float* p, int64_t row, V a) { EACH p[i / 4 * 4 * row + i % 4] = a[i]; }
INLINE V zip_low(V a, V b) { V r; EACH r[i] = (i % 2 ? b : a)[i / 4 * 4 + i % 4 / 2]; return r; }
INLINE V zip_high(V a, V b) { V r; EACH r[i] = (i % 2 ? b : a)[i / 4 * 4 + 2 + i % 4 / 2]; return r; }
INLINE V pairs_low(V a, V b) { V r; EACH r[i] = (i % 4 < 2 ? a : b)[i / 4 * 4 + i % 2]; return r; }
INLINE V pairs_high(V a, V b) { V r; EACH r[i] = (i % 4 < 2 ? a : b)[i / 4 * 4 + 2 + i % 2]; return r; }
INLINE void sum_fours(V a, float* out) { for (int i = 0; i < 4; i++) out[i] = a[i] + a[4 + i]; }
INLINE U halves(U codes) {
    static const uint8_t table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    U r;
    for (int i = 0; i < 4 * W; i++) r[i] = table[codes[i]];
    return r;
}
template <int BITS> struct Dot {
    static constexpr int bias = 0;
    typedef I P;
    INLINE P open(I total) { return total; }
    INLINE P step(P p, U w, U x) {
        for (int i = 0; i < 4 * W; i++) p[i / 4] += (int32_t)w[i] * (int8_t)x[i];
        return p;
    }
    INLINE I close(I, P p) { return p; }
};
#undef EACH
#endif

// e^x, relative error below 2e-7; 0 below -87 (so -inf gives 0). x = n ln2 + r, a degree-6 polynomial in r, times 2^n.
INLINE V vexp(V x) {
    V c = vmin(vmax(x, set1(-87.0f)), set1(88.0f));
    I n = round_int(mul(c, set1(1.44269504f)));
    V f = to_float(n);
    V r = fma(f, set1(-0.693359375f), c);
    r = fma(f, set1(2.12194440e-4f), r);
    V p = fma(r, set1(1.9875691500e-4f), set1(1.3981999507e-3f));
    p = fma(p, r, set1(8.3334519073e-3f));
    p = fma(p, r, set1(4.1665795894e-2f));
    p = fma(p, r, set1(1.6666665459e-1f));
    p = fma(p, r, set1(5.0000001201e-1f));
    p = add(fma(p, mul(r, r), r), set1(1.0f));
    return zero_below(mul(p, pow2(n)), x, -87.0f);
}
INLINE float exp1(float x) {  // the same arithmetic for one number
    float t[W];
    store(t, vexp(set1(x)));
    return t[0];
}
