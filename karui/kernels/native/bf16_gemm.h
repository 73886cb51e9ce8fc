// C [m, n] = A [m, k] B [n, k]^T for fp32 operands whose values are bf16 numbers, as codes of 8 and 4 bits times powers of two or
// E4M3 scales are. The products are exact and summed in fp32, two at a time (vdpbf16ps: subnormal operands count as zero).
//
// A matrix has element (row, k) at x[row * down + k * along], one of the two strides being 1. The sum of one output is, whatever m,
// n and the number of threads: for pairs of k in order, sum += (product of the first) + (product of the second).
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

struct Strided { const float* x; int64_t down, along; };

#if defined(__x86_64__) && (defined(__clang__) || __GNUC__ >= 10)
#include <immintrin.h>
#define KARUI_BF16_GEMM __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

namespace bf16_gemm {

// A tile of C fills 24 registers; kPairs pairs of k are done at a time, so that a panel of B (24 KB) stays in the first cache.
constexpr int kRows = 12, kCols = 32, kPairs = 192;

// Two bf16 numbers in one word, the first one low.
inline uint32_t pair(float first, float second) {
    uint32_t a, b;
    std::memcpy(&a, &first, 4);
    std::memcpy(&b, &second, 4);
    return (a >> 16) | (b & 0xffff0000u);
}

// Rows of a matrix in panels of `wide`: out [panel][pair][wide], zeros beyond the edges.
KARUI_BF16_GEMM inline void pack(Strided s, int64_t rows, int64_t k, int wide, uint32_t* out) {
    const int64_t pairs = (k + 1) / 2;
    const __m512i odd = _mm512_set_epi16(63, 61, 59, 57, 55, 53, 51, 49, 47, 45, 43, 41, 39, 37, 35, 33, 31, 29, 27, 25, 23, 21, 19,
                                         17, 15, 13, 11, 9, 7, 5, 3, 1);  // the upper halves of 32 numbers
    for (int64_t first = 0; first < rows; first += wide, out += pairs * wide) {
        const int n = int(std::min<int64_t>(wide, rows - first));
        if (n < wide) std::memset(out, 0, size_t(pairs) * wide * 4);
        const float* x = s.x + first * s.down;
        if (s.along != 1) {
            for (int64_t p = 0; p < pairs; p++) {
                const float *r = x + 2 * p * s.along, *next = r + s.along;
                if (2 * p + 1 < k) for (int i = 0; i < n; i++) out[p * wide + i] = pair(r[i * s.down], next[i * s.down]);
                else for (int i = 0; i < n; i++) out[p * wide + i] = pair(r[i * s.down], 0.0f);
            }
            continue;
        }
        for (int i = 0; i < n; i++) {
            const float* r = x + i * s.down;
            int64_t p = 0;
            for (; 2 * p + 32 <= k; p += 16) {
                alignas(64) uint32_t words[16];
                const __m512i low = _mm512_loadu_si512(r + 2 * p), high = _mm512_loadu_si512(r + 2 * p + 16);
                _mm512_store_si512(words, _mm512_permutex2var_epi16(low, odd, high));
                for (int j = 0; j < 16; j++) out[(p + j) * wide + i] = words[j];
            }
            for (; p < pairs; p++) out[p * wide + i] = pair(r[2 * p], 2 * p + 1 < k ? r[2 * p + 1] : 0.0f);
        }
    }
}

KARUI_BF16_GEMM inline void tile(const uint32_t* a, const uint32_t* b, int64_t pairs, float* c, int64_t ldc, bool add) {
    __m512 sum[kRows][2];
    for (int i = 0; i < kRows; i++)
        for (int j = 0; j < 2; j++) sum[i][j] = add ? _mm512_loadu_ps(c + i * ldc + 16 * j) : _mm512_setzero_ps();
    for (int64_t p = 0; p < pairs; p++, a += kRows, b += kCols) {
        const __m512bh left = (__m512bh)_mm512_loadu_si512(b), right = (__m512bh)_mm512_loadu_si512(b + 16);
#pragma GCC unroll 12
        for (int i = 0; i < kRows; i++) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(int(a[i]));
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], x, left);
            sum[i][1] = _mm512_dpbf16_ps(sum[i][1], x, right);
        }
    }
    for (int i = 0; i < kRows; i++)
        for (int j = 0; j < 2; j++) _mm512_storeu_ps(c + i * ldc + 16 * j, sum[i][j]);
}

inline void rows(Strided a, Strided b, int64_t m, int64_t n, int64_t k, float* c) {
    const int64_t tall = (m + kRows - 1) / kRows;
    std::vector<uint32_t> left(size_t(tall) * kRows * kPairs), panel(size_t(kCols) * kPairs);
    alignas(64) float edge[kRows * kCols] = {};
    for (int64_t from = 0; from < k; from += 2 * kPairs) {
        const int64_t depth = std::min<int64_t>(2 * kPairs, k - from), pairs = (depth + 1) / 2;
        pack({a.x + from * a.along, a.down, a.along}, m, depth, kRows, left.data());
        for (int64_t j = 0; j < n; j += kCols) {
            const int64_t wide = std::min<int64_t>(kCols, n - j);
            pack({b.x + j * b.down + from * b.along, b.down, b.along}, wide, depth, kCols, panel.data());
            for (int64_t i = 0; i < tall; i++) {
                const int64_t high = std::min<int64_t>(kRows, m - i * kRows);
                const uint32_t* part = left.data() + i * kRows * pairs;
                float* out = c + i * kRows * n + j;
                if (high == kRows && wide == kCols) { tile(part, panel.data(), pairs, out, n, from > 0); continue; }
                for (int64_t r = 0; from > 0 && r < high; r++) std::memcpy(edge + r * kCols, out + r * n, wide * 4);
                tile(part, panel.data(), pairs, edge, kCols, from > 0);
                for (int64_t r = 0; r < high; r++) std::memcpy(out + r * n, edge + r * kCols, wide * 4);
            }
        }
    }
}

inline bool serves() { return __builtin_cpu_supports("avx512bf16") != 0; }

}  // namespace bf16_gemm
#else
namespace bf16_gemm {
inline bool serves() { return false; }
inline void rows(Strided, Strided, int64_t, int64_t, int64_t, float*) {}
}  // namespace bf16_gemm
#endif

extern "C" __attribute__((visibility("default"))) int karui_bf16_gemm_serves() { return bf16_gemm::serves(); }

// c [m, n] row-major; k > 0. The rows of C are shared out among `threads`.
extern "C" __attribute__((visibility("default"))) void karui_bf16_gemm(
    const float* a, int64_t a_down, int64_t a_along, const float* b, int64_t b_down, int64_t b_along, int64_t m, int64_t n, int64_t k,
    int threads, float* c) {
    const int64_t each = std::max<int64_t>(48, (m + threads - 1) / threads + 11) / 12 * 12;
    auto part = [=](int64_t first) {
        bf16_gemm::rows({a + first * a_down, a_down, a_along}, {b, b_down, b_along}, std::min(each, m - first), n, k, c + first * n);
    };
    std::vector<std::thread> team;
    for (int64_t first = each; first < m; first += each) team.emplace_back(part, first);
    part(0);
    for (auto& t : team) t.join();
}
