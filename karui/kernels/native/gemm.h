// Products with every kind of weight; see gemm.cpp.
#pragma once
#include "weights.h"

#define WITHIN __attribute__((visibility("hidden")))  // between the parts of a library, not from outside

// Chunk c of a panel as floats [32][16]: float(code - zero) * scale, in fp32.
WITHIN void decode_chunk(const Linear& w, int panel, int c, float* out);

// Panels [first, last) of y[:, :n] = x W^T. `scratch` holds k_padded * 16 floats.
WITHIN void multiply(const Linear& w, const Activations& a, int rows, int first, int last, float* y, int ldy, bool accumulate, float* scratch);
