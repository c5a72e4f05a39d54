// GELU in scaled_gemm.cu, which defines its activations itself.
//
// A macro cannot tell a definition from a call, but the first word in its brackets can: that of a
// definition is a type.
#pragma once
#include "gelu.cuh"

#define activated(v) ACTIVATED_##v)
#define ACTIVATED_float activated(float
#define ACTIVATED_v gelu(v
