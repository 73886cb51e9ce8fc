// The operations of simd.h for 64-bit ARM with the dot product instructions (armv8.2-a+dotprod: Apple's M1, AWS Graviton 2, NVIDIA
// Grace, Raspberry Pi 5 and later). W is 8 lanes, two registers of four, so panels and results' order are AVX2's.
#pragma once
#include <arm_neon.h>

constexpr int W = 8;
struct V { float32x4_t a, b; };
struct I { int32x4_t a, b; };
struct U { uint8x16_t a, b; };

INLINE V as_floats(I n) { return {vreinterpretq_f32_s32(n.a), vreinterpretq_f32_s32(n.b)}; }

INLINE V load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
INLINE void store(float* p, V x) { vst1q_f32(p, x.a); vst1q_f32(p + 4, x.b); }
INLINE V set1(float x) { return {vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE V fma(V x, V y, V z) { return {vfmaq_f32(z.a, x.a, y.a), vfmaq_f32(z.b, x.b, y.b)}; }
INLINE V add(V x, V y) { return {vaddq_f32(x.a, y.a), vaddq_f32(x.b, y.b)}; }
INLINE V sub(V x, V y) { return {vsubq_f32(x.a, y.a), vsubq_f32(x.b, y.b)}; }
INLINE V mul(V x, V y) { return {vmulq_f32(x.a, y.a), vmulq_f32(x.b, y.b)}; }
INLINE V div(V x, V y) { return {vdivq_f32(x.a, y.a), vdivq_f32(x.b, y.b)}; }
// As on the other processors the second of two numbers is given where either is no number, which vmaxq_f32 would spread.
INLINE float32x4_t larger(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE float32x4_t smaller(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE V vmax(V x, V y) { return {larger(x.a, y.a), larger(x.b, y.b)}; }
INLINE V vmin(V x, V y) { return {smaller(x.a, y.a), smaller(x.b, y.b)}; }
INLINE V vabs(V x) { return {vabsq_f32(x.a), vabsq_f32(x.b)}; }
INLINE float32x4_t kept(float32x4_t value, uint32x4_t where) {
    return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(value), where));
}
INLINE V zero_below(V value, V x, float limit) {
    const float32x4_t l = vdupq_n_f32(limit);
    return {kept(value.a, vcgeq_f32(x.a, l)), kept(value.b, vcgeq_f32(x.b, l))};
}
INLINE float hsum(V x) {
    const float32x4_t s = vaddq_f32(x.a, x.b);
    const float32x2_t t = vadd_f32(vget_low_f32(s), vget_high_f32(s));
    return vget_lane_f32(t, 0) + vget_lane_f32(t, 1);
}
INLINE float hmax(V x) { return vmaxvq_f32(larger(x.a, x.b)); }
INLINE V load(const uint16_t* p) {
    const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_f32_f16(vget_high_f16(h))};
}
INLINE I widen(int16x8_t n) { return {vmovl_s16(vget_low_s16(n)), vmovl_s16(vget_high_s16(n))}; }
INLINE V to_float(I n) { return {vcvtq_f32_s32(n.a), vcvtq_f32_s32(n.b)}; }
INLINE V load(const int8_t* p) { return to_float(widen(vmovl_s8(vld1_s8(p)))); }
INLINE V load_bf16(const uint16_t* p) {
    const uint16x8_t h = vld1q_u16(p);
    return {vreinterpretq_f32_u32(vshll_n_u16(vget_low_u16(h), 16)), vreinterpretq_f32_u32(vshll_n_u16(vget_high_u16(h), 16))};
}
INLINE void store(uint16_t* p, V x) {
    vst1q_u16(p, vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(x.a), vcvt_f16_f32(x.b))));
}
INLINE I iset1(int32_t n) { return {vdupq_n_s32(n), vdupq_n_s32(n)}; }
INLINE I iload_u8(const uint8_t* p) { return widen(vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p)))); }
INLINE I iadd(I x, I y) { return {vaddq_s32(x.a, y.a), vaddq_s32(x.b, y.b)}; }
INLINE I isub(I x, I y) { return {vsubq_s32(x.a, y.a), vsubq_s32(x.b, y.b)}; }
INLINE I imul(I x, I y) { return {vmulq_s32(x.a, y.a), vmulq_s32(x.b, y.b)}; }
INLINE int32_t ihsum(I x) { return vaddvq_s32(vaddq_s32(x.a, x.b)); }
INLINE I round_int(V x) { return {vcvtnq_s32_f32(x.a), vcvtnq_s32_f32(x.b)}; }
INLINE void store_i8(int8_t* p, I x) { vst1_s8(p, vqmovn_s16(vcombine_s16(vqmovn_s32(x.a), vqmovn_s32(x.b)))); }
INLINE V pow2(I n) {
    n = iadd(n, iset1(127));
    return as_floats({vshlq_n_s32(n.a, 23), vshlq_n_s32(n.b, 23)});
}
INLINE U bytes(const void* p) { return {vld1q_u8((const uint8_t*)p), vld1q_u8((const uint8_t*)p + 16)}; }
INLINE U quad(const int8_t* x) {
    const uint8x16_t q = vreinterpretq_u8_s32(vdupq_n_s32(load_i32(x)));
    return {q, q};
}
template <int S, int MASK> INLINE U field(U x) {
    const uint8x16_t mask = vdupq_n_u8((uint8_t)MASK);
    if constexpr (S == 0) return {vandq_u8(x.a, mask), vandq_u8(x.b, mask)};
    else return {vandq_u8(vshrq_n_u8(x.a, S), mask), vandq_u8(vshrq_n_u8(x.b, S), mask)};
}
template <int S, int MASK> INLINE U field_up(U x) {
    const uint8x16_t mask = vdupq_n_u8((uint8_t)MASK);
    return {vandq_u8(vshlq_n_u8(x.a, S), mask), vandq_u8(vshlq_n_u8(x.b, S), mask)};
}
INLINE U flipped(U x) { return {veorq_u8(x.a, vdupq_n_u8(0x80)), veorq_u8(x.b, vdupq_n_u8(0x80))}; }
INLINE void store_bytes(void* p, U x) { vst1q_u8((uint8_t*)p, x.a); vst1q_u8((uint8_t*)p + 16, x.b); }
INLINE void interleave(uint8x16_t x, uint8x16_t y, uint8x16_t z, uint8x16_t w, uint8x16_t* out) {
    const uint8x16x2_t first = vzipq_u8(x, y), second = vzipq_u8(z, w);
    for (int i = 0; i < 2; i++) {
        const uint16x8x2_t both = vzipq_u16(vreinterpretq_u16_u8(first.val[i]), vreinterpretq_u16_u8(second.val[i]));
        for (int j = 0; j < 2; j++) out[2 * i + j] = vreinterpretq_u8_u16(both.val[j]);
    }
}
INLINE void interleave(U x, U y, U z, U w, U* out) {
    uint8x16_t low[4], high[4];
    interleave(x.a, y.a, z.a, w.a, low);
    interleave(x.b, y.b, z.b, w.b, high);
    for (int i = 0; i < 4; i++) out[i] = {low[i], high[i]};
}
INLINE U bor(U x, U y) { return {vorrq_u8(x.a, y.a), vorrq_u8(x.b, y.b)}; }
template <int S, int MASK> INLINE int32x4_t bits_of(int32x4_t n) {  // of each lane, (n >> S) & MASK
    if constexpr (S == 0) return vandq_s32(n, vdupq_n_s32(MASK));
    else return vandq_s32(vshrq_n_s32(n, S), vdupq_n_s32(MASK));
}
template <int J> INLINE I byte_of(U x) {
    return {bits_of<8 * J, 255>(vreinterpretq_s32_u8(x.a)), bits_of<8 * J, 255>(vreinterpretq_s32_u8(x.b))};
}
INLINE V lookup16(const float* table, I index) {
    const uint8_t* from = (const uint8_t*)table;
    const uint8x16x4_t whole = {{vld1q_u8(from), vld1q_u8(from + 16), vld1q_u8(from + 32), vld1q_u8(from + 48)}};
    const auto four = [&](int32x4_t i) {  // lane i's four bytes are at 4 i .. 4 i + 3
        const int32x4_t at = vmlaq_n_s32(vdupq_n_s32(0x03020100), vandq_s32(i, vdupq_n_s32(15)), 0x04040404);
        return vreinterpretq_f32_u8(vqtbl4q_u8(whole, vreinterpretq_u8_s32(at)));
    };
    return {four(index.a), four(index.b)};
}
template <int BITS> struct Levels {
    V step, low;
    Levels(float s, float l) : step(set1(s)), low(set1(l)) {}
    template <int S> V at(I n) const {
        constexpr int all = (1 << BITS) - 1;
        return fma(step, to_float({bits_of<S, all>(n.a), bits_of<S, all>(n.b)}), low);
    }
};
INLINE V load_fours(const float* p, int64_t row) { return {vld1q_f32(p), vld1q_f32(p + 4 * row)}; }
INLINE void store_fours(float* p, int64_t row, V x) { vst1q_f32(p, x.a); vst1q_f32(p + 4 * row, x.b); }
INLINE V zip_low(V x, V y) { return {vzip1q_f32(x.a, y.a), vzip1q_f32(x.b, y.b)}; }
INLINE V zip_high(V x, V y) { return {vzip2q_f32(x.a, y.a), vzip2q_f32(x.b, y.b)}; }
INLINE float32x4_t lows(float32x4_t x, float32x4_t y) { return vcombine_f32(vget_low_f32(x), vget_low_f32(y)); }
INLINE float32x4_t highs(float32x4_t x, float32x4_t y) { return vcombine_f32(vget_high_f32(x), vget_high_f32(y)); }
INLINE V pairs_low(V x, V y) { return {lows(x.a, y.a), lows(x.b, y.b)}; }
INLINE V pairs_high(V x, V y) { return {highs(x.a, y.a), highs(x.b, y.b)}; }
INLINE void sum_fours(V x, float* out) { vst1q_f32(out, vaddq_f32(x.a, x.b)); }

INLINE U halves(U codes) {  // e2m1 codes to twice their number, signed
    static const int8_t numbers[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    const uint8x16_t table = vreinterpretq_u8_s8(vld1q_s8(numbers));
    return {vqtbl1q_u8(table, codes.a), vqtbl1q_u8(table, codes.b)};
}
// The instruction multiplies signed bytes: 8-bit codes are taken less 128.
template <int BITS> struct Dot {
    static constexpr int bias = BITS == 8 ? 128 : BITS == HALVES ? 12 : 0;
    typedef I P;
    INLINE int32x4_t dot(int32x4_t p, uint8x16_t w, uint8x16_t x) {
        if (BITS == 8) w = veorq_u8(w, vdupq_n_u8(0x80));
        return vdotq_s32(p, vreinterpretq_s8_u8(w), vreinterpretq_s8_u8(x));
    }
    INLINE P open(I total) { return total; }
    INLINE P step(P p, U w, U x) { return {dot(p.a, w.a, x.a), dot(p.b, w.b, x.b)}; }
    INLINE I close(I, P p) { return p; }
};
