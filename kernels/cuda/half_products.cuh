// Products of float16 for kernels with the main loop of FP8.
#pragma once
#include "mainloop.cuh"
#include "half_whole_products.cuh"
