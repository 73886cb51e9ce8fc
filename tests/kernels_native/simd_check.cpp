// Every operation of simd.h against plain loops over its lanes: prints the name of what differs and how often; silent when nothing does.
#include "simd.h"

#include <stdio.h>

#include <random>

static std::mt19937 bits(1);
static int failures = 0;

static void expect(const char* name, bool same) {
    if (!same && failures++ < 20) printf("%s\n", name);
}

static float number() {  // of any size, now and then a special one
    static const float special[] = {0.0f, -0.0f, 1.0f, -1.0f, 0.5f, 1.5f, 2.5f, 65504.0f, 6e-8f, 1e-7f, -6e-5f, INFINITY, -INFINITY};
    if (bits() % 8 == 0) return special[bits() % 13];
    return std::ldexp((float)(int32_t)bits() / 2147483648.0f, (int)(bits() % 34) - 18);
}

struct Lanes {  // W floats, and 4 W bytes
    float f[W];
    int32_t i[W];
    uint8_t u[4 * W];
    Lanes() {
        for (int k = 0; k < W; k++) f[k] = number(), i[k] = (int32_t)(bits() % 4001) - 2000;
        for (auto& b : u) b = (uint8_t)bits();
    }
    V v() const { return load(f); }
};

static bool equal(float a, float b) { return a == b || (a != a && b != b); }
static void same(const char* name, V got, const float* want) {
    float out[W];
    store(out, got);
    for (int k = 0; k < W; k++) expect(name, equal(out[k], want[k]));
}
static void same(const char* name, I got, const int32_t* want) {  // through floats, which hold these numbers exactly
    float floats[W];
    for (int k = 0; k < W; k++) floats[k] = (float)want[k];
    same(name, to_float(got), floats);
}
static I ints(const int32_t* n) {
    float f[W];
    for (int k = 0; k < W; k++) f[k] = (float)n[k];
    return round_int(load(f));
}
static void same_bytes(const char* name, U got, const uint8_t* want) {
    int32_t lane[W];
#define LANE(J) for (int k = 0; k < W; k++) lane[k] = want[4 * k + J]; same(name, byte_of<J>(got), lane);
    LANE(0) LANE(1) LANE(2) LANE(3)
#undef LANE
}

template <typename F> static void each(const char* name, V got, F want) {
    float w[W];
    for (int k = 0; k < W; k++) w[k] = want(k);
    same(name, got, w);
}

template <int BITS> static void dot_of(const char* name) {
    uint8_t codes[8][4 * W];
    int8_t x[8][4 * W];
    int32_t want[W] = {}, start[W];
    for (int k = 0; k < W; k++) start[k] = want[k] = (int32_t)(bits() % 1000);
    typedef Dot<BITS> D;
    I total = ints(start);
    auto p = D::open(total);
    for (int step = 0; step < 8; step++) {
        const bool extreme = bits() % 2;
        for (int j = 0; j < 4 * W; j++) {
            codes[step][j] = (uint8_t)(extreme ? (1 << (BITS == HALVES ? 4 : BITS)) - 1 : bits() % (1 << (BITS == HALVES ? 4 : BITS)));
            x[step][j] = (int8_t)(extreme ? -127 : (int)(bits() % 255) - 127);
        }
        U w = bytes(codes[step]);
        if (BITS == HALVES) w = halves(w);
        p = D::step(p, w, bytes(x[step]));
        static const int doubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        for (int j = 0; j < 4 * W; j++) {
            const int code = BITS == HALVES ? doubled[codes[step][j]] + 12 : codes[step][j];
            want[j / 4] += (code - D::bias) * x[step][j];
        }
    }
    same(name, D::close(total, p), want);
}

int main() {
    for (int round = 0; round < 2000; round++) {
        const Lanes a, b, c;
        each("add", add(a.v(), b.v()), [&](int k) { return a.f[k] + b.f[k]; });
        each("sub", sub(a.v(), b.v()), [&](int k) { return a.f[k] - b.f[k]; });
        each("mul", mul(a.v(), b.v()), [&](int k) { return a.f[k] * b.f[k]; });
        each("div", div(a.v(), b.v()), [&](int k) { return a.f[k] / b.f[k]; });
        each("vmax", vmax(a.v(), b.v()), [&](int k) { return a.f[k] > b.f[k] ? a.f[k] : b.f[k]; });
        each("vmin", vmin(a.v(), b.v()), [&](int k) { return a.f[k] < b.f[k] ? a.f[k] : b.f[k]; });
        each("vmax of none", vmax(set1(NAN), b.v()), [&](int k) { return b.f[k]; });
        each("vabs", vabs(a.v()), [&](int k) { return fabsf(a.f[k]); });
        each("set1", set1(a.f[0]), [&](int) { return a.f[0]; });
        each("zero_below", zero_below(a.v(), b.v(), 0.25f), [&](int k) { return b.f[k] >= 0.25f ? a.f[k] : 0.0f; });
        each("load int8", load((const int8_t*)a.u), [&](int k) { return (float)(int8_t)a.u[k]; });
        each("load_fours", load_fours(a.f, 0), [&](int k) { return a.f[k % 4]; });
        float fused[W];
        store(fused, fma(a.v(), b.v(), c.v()));
        for (int k = 0; k < W; k++) {
            const float near = a.f[k] * b.f[k] + c.f[k], size = fabsf(a.f[k] * b.f[k]) + fabsf(c.f[k]);
            expect("fma", equal(fused[k], near) || fabsf(fused[k] - near) <= 2e-7f * size);
        }
        float sum = 0, size = 0, most = a.f[0];
        bool finite = true;
        for (int k = 0; k < W; k++) {
            sum += a.f[k], size += fabsf(a.f[k]), most = a.f[k] > most ? a.f[k] : most;
            finite = finite && a.f[k] - a.f[k] == 0;
        }
        if (finite) expect("hsum", fabsf(hsum(a.v()) - sum) <= 1e-6f * size);
        expect("hmax", hmax(a.v()) == most);
        float fours[4];
        sum_fours(a.v(), fours);
        for (int k = 0; k < 4 && finite; k++) {
            float whole = 0;
            for (int j = k; j < W; j += 4) whole += a.f[j];
            expect("sum_fours", fabsf(fours[k] - whole) <= 1e-6f * size);
        }

        uint16_t half[W], raw[W];
        float back[W];
        store(half, a.v());
        store(back, load(half));
        for (int k = 0; k < W; k++) {
            const float x = a.f[k], step = std::ldexp(1.0f, (fabsf(x) < 0x1p-14f ? -14 : std::ilogb(x)) - 10);
            expect("float16", equal(back[k], x) || (fabsf(x) >= 65520.0f ? fabsf(back[k]) == INFINITY : fabsf(back[k] - x) <= step / 2));
        }
        for (auto& r : raw) r = (uint16_t)bits();
        each("load_bf16", load_bf16(raw), [&](int k) { return bits_to_float((uint32_t)raw[k] << 16); });
        store(half, load(raw));
        for (int k = 0; k < W; k++) {
            const bool none = (raw[k] & 0x7c00) == 0x7c00 && (raw[k] & 0x3ff);
            expect("float16 and back", none || half[k] == raw[k]);
        }

        int32_t n[W];
        for (int k = 0; k < W; k++) n[k] = a.u[k];
        same("iload_u8", iload_u8(a.u), n);
        for (int k = 0; k < W; k++) n[k] = a.i[k] + b.i[k];
        same("iadd", iadd(ints(a.i), ints(b.i)), n);
        for (int k = 0; k < W; k++) n[k] = a.i[k] - b.i[k];
        same("isub", isub(ints(a.i), ints(b.i)), n);
        for (int k = 0; k < W; k++) n[k] = a.i[k] * b.i[k];
        same("imul", imul(ints(a.i), ints(b.i)), n);
        int32_t total = 0;
        for (int k = 0; k < W; k++) total += a.i[k], n[k] = 7;
        same("iset1", iset1(7), n);
        expect("ihsum", ihsum(ints(a.i)) == total);
        float near[W];
        for (int k = 0; k < W; k++) near[k] = (float)a.i[k] / 8.0f, n[k] = (int32_t)lrintf(near[k]);
        same("round_int", round_int(load(near)), n);
        int8_t small[W];
        for (int k = 0; k < W; k++) n[k] = a.i[k] % 128;
        store_i8(small, ints(n));
        for (int k = 0; k < W; k++) expect("store_i8", small[k] == n[k]);
        for (int k = 0; k < W; k++) n[k] = a.i[k] % 100;
        each("pow2", pow2(ints(n)), [&](int k) { return std::ldexp(1.0f, n[k]); });

        uint8_t u[4 * W];
        same_bytes("bytes", bytes(a.u), a.u);
        for (int j = 0; j < 4 * W; j++) u[j] = a.u[j % 4];
        same_bytes("quad", quad((const int8_t*)a.u), u);
        for (int j = 0; j < 4 * W; j++) u[j] = a.u[j] & 15;
        same_bytes("field 0", field<0, 15>(bytes(a.u)), u);
        for (int j = 0; j < 4 * W; j++) u[j] = a.u[j] >> 4 & 15;
        same_bytes("field 4", field<4, 15>(bytes(a.u)), u);
        for (int j = 0; j < 4 * W; j++) u[j] = a.u[j] >> 6 & 3;
        same_bytes("field 6", field<6, 3>(bytes(a.u)), u);
        for (int j = 0; j < 4 * W; j++) u[j] = (uint8_t)(a.u[j] << 2) & 4;
        same_bytes("field_up", field_up<2, 4>(bytes(a.u)), u);
        for (int j = 0; j < 4 * W; j++) u[j] = a.u[j] | b.u[j];
        same_bytes("bor", bor(bytes(a.u), bytes(b.u)), u);
        for (int j = 0; j < 4 * W; j++) u[j] = a.u[j] ^ 0x80;
        same_bytes("flipped", flipped(bytes(a.u)), u);
        store_bytes(u, bytes(b.u));
        same_bytes("store_bytes", bytes(u), b.u);
        const Lanes others[2];
        const uint8_t* four[] = {a.u, b.u, others[0].u, others[1].u};
        U mixed[4];
        interleave(bytes(four[0]), bytes(four[1]), bytes(four[2]), bytes(four[3]), mixed);
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4 * W; j++) u[j] = four[j % 4][j / 16 * 16 + 4 * i + j % 16 / 4];
            same_bytes("interleave", mixed[i], u);
        }
        float apart[4 * W];
        store_fours(apart, 4, a.v());
        for (int k = 0; k < W; k++) expect("store_fours", equal(apart[k / 4 * 16 + k % 4], a.f[k]));

        float table[16];
        for (auto& t : table) t = number();
        for (int k = 0; k < W; k++) n[k] = a.u[k] & 15;
        each("lookup16", lookup16(table, ints(n)), [&](int k) { return table[n[k]]; });
        for (int k = 0; k < W; k++) n[k] = a.u[k];  // the code at bit 2, others around it
        each("Levels 4", Levels<4>(0.5f, -3.0f).template at<2>(ints(n)), [&](int k) { return 0.5f * (n[k] >> 2 & 15) - 3.0f; });
        each("Levels 2", Levels<2>(0.5f, -3.0f).template at<2>(ints(n)), [&](int k) { return 0.5f * (n[k] >> 2 & 3) - 3.0f; });
        const auto block = [](int k) { return k / 4 * 4; };
        each("zip_low", zip_low(a.v(), b.v()), [&](int k) { return (k % 2 ? b : a).f[block(k) + k % 4 / 2]; });
        each("zip_high", zip_high(a.v(), b.v()), [&](int k) { return (k % 2 ? b : a).f[block(k) + 2 + k % 4 / 2]; });
        each("pairs_low", pairs_low(a.v(), b.v()), [&](int k) { return (k % 4 < 2 ? a : b).f[block(k) + k % 2]; });
        each("pairs_high", pairs_high(a.v(), b.v()), [&](int k) { return (k % 4 < 2 ? a : b).f[block(k) + 2 + k % 2]; });

        float e[W], x[W];
        for (int k = 0; k < W; k++) x[k] = (float)a.i[k] / 25.0f;
        store(e, vexp(load(x)));
        for (int k = 0; k < W; k++) expect("vexp", x[k] < -87 ? e[k] == 0 : fabs(e[k] - exp((double)x[k])) <= 3e-7 * exp((double)x[k]));
        expect("vexp of -inf", exp1(-INFINITY) == 0);

        dot_of<2>("Dot 2"), dot_of<4>("Dot 4"), dot_of<8>("Dot 8"), dot_of<HALVES>("Dot of e2m1");
    }
    if (failures) printf("%d differences\n", failures);
    return failures != 0;
}
