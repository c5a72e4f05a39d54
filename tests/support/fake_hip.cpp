// A stand-in for torch's library for AMD, and HIP below it, that notes launches and makes none.
#include <cstddef>
#include <cstdint>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT uint64_t noted[16] = {};

EXPORT int hipModuleLaunchKernel(void* function, uint32_t x, uint32_t y, uint32_t z, uint32_t threads,
                                 uint32_t threads_y, uint32_t threads_z, uint32_t shared_bytes,
                                 void* stream, void** parameters, void** extra) {
  const uint64_t facts[] = {reinterpret_cast<uint64_t>(function), x, y, z, threads, threads_y,
                            threads_z, shared_bytes, reinterpret_cast<uint64_t>(stream),
                            reinterpret_cast<uint64_t>(extra)};
  for (int i = 0; i < 10; ++i) noted[i] = facts[i];
  for (int i = 0; i < 2; ++i) noted[10 + i] = *static_cast<uint64_t*>(parameters[i]);
  noted[12] = *static_cast<uint32_t*>(parameters[2]);
  return x == 999 ? 1 : 0;
}
EXPORT const char* hipGetErrorString(int) { return "invalid argument"; }
