// How a weight matrix [n, k] lies in memory. karui/kernels/native/weights.py builds these structures; keep the two in step.
//
// Rows are taken in panels of 16 and inputs in chunks of 32. A panel is stored whole, chunk after chunk; n is padded to a
// multiple of 16, k to a multiple of 32 and of the group size. Padding has scale 0.
//
// Quantized (bits 2, 3, 4, 6, 8). Codes are unsigned; value = (code - zero) * scale. A chunk is 8 quads (quad q = inputs
//   4q .. 4q+3 of all 16 rows = 64 bytes, row r at bytes 4r .. 4r+3), and quads share bytes:
//     8 bits: 512 bytes, quad q is vector q
//     4 bits: 256 bytes, quad q is bits 4*(q%2) of vector q/2
//     2 bits: 128 bytes, quad q is bits 2*(q%4) of vector q/4
//     3 bits: 192 bytes, the low two bits as above, then one vector holding bit 2 of quad q at bit q
//     6 bits: 384 bytes, the low four bits as 4 bits, then the high two bits as 2 bits
//   scales [panel][group][16], fp16 or fp32; zeros [panel][group][16] uint8, or one number for the whole matrix.
// nf4: laid out as 4 bits, value = table[code] * scale; always multiplied with float activations.
// e2m1 (MXFP4, NVFP4): laid out as 4 bits, value = table[code] * scale, where table holds twice the number that the code stands for, whole
//   and within +-12, and scale is half of the grid's; so its products are integers too.
// float (fp32, fp16, bf16): [panel][k][16].
#pragma once
#include <stdint.h>

constexpr int PANEL = 16, CHUNK = 32;

enum Kind : int32_t { QUANTIZED = 0, NF4 = 1, FP32 = 2, FP16 = 3, BF16 = 4, E2M1 = 5 };

struct Linear {
    int32_t kind, bits;
    int32_t n, k;           // logical shape
    int32_t k_padded;       // multiple of 32 and of group
    int32_t group;          // inputs that share a scale; k_padded when a row has one scale
    int32_t block;          // inputs whose integer products are summed before the float sum: 16, or a multiple of 32 dividing group
    int32_t per_token;      // activations: 1 one scale per token, 0 one scale per block
    int32_t act_bits;       // 8: integer products; 16: weights are dequantized, activations stay float
    int32_t scale_fp32;     // 1: fp32 scales, 0: fp16
    int32_t zero;           // the zero point of every group when zeros is null
    int32_t padding;
    const uint8_t* codes;
    const void* scales;
    const uint8_t* zeros;
    const float* bias;      // [n] or null
    const float* table;     // nf4, e2m1: 16 values
};

// Whether a linear reads int8 activations.
static inline bool integer(const Linear& w) { return (w.kind == QUANTIZED || w.kind == E2M1) && w.act_bits == 8; }

static inline int chunk_bytes(const Linear& w) {
    switch (w.kind) {
        case FP32: return CHUNK * PANEL * 4;
        case FP16: case BF16: return CHUNK * PANEL * 2;
        default: return CHUNK * PANEL * w.bits / 8;
    }
}
static inline int num_panels(const Linear& w) { return (w.n + PANEL - 1) / PANEL; }

// Activations of T tokens for one linear: float rows always, int8 codes when the linear wants them. Codes lie in tiles of TILE rows,
// so that a kernel reaches all rows of a tile from one pointer.
#ifdef __AMX_INT8__
constexpr int TILE = 16;
#else
constexpr int TILE = 8;
#endif
struct Activations {
    const float* x;         // [T, ldx], columns k .. padded with zeros
    int ldx;
    const int8_t* codes;    // [T / TILE][chunk][TILE rows][32]
    const float* scale;     // [T / TILE][block][TILE rows]
    const int32_t* sum;     // the same shape: sum of codes, times -(zero - bias) when the weight has one zero point
};
