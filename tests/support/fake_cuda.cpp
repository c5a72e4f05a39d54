// A stand-in for NVIDIA's driver that loads any code and launches none.
#include <cstdint>
#include <cstring>

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int cuInit(unsigned) { return 0; }
EXPORT int cuDeviceGetName(char* name, int size, int) {
  std::strncpy(name, "Imaginary GPU", size);
  return 0;
}
EXPORT int cuGetErrorName(int, const char** name) { *name = "CUDA_ERROR"; return 0; }
EXPORT int cuGetErrorString(int, const char** text) { *text = "imaginary"; return 0; }
// Device d's context is d + 1.
static thread_local void *current = nullptr, *retained = nullptr;
EXPORT int cuCtxGetCurrent(void** context) { *context = current; return 0; }
EXPORT int cuCtxSetCurrent(void* context) { current = context; return 0; }
EXPORT int cuDevicePrimaryCtxRetain(void** context, int device) {
  *context = retained = reinterpret_cast<void*>(static_cast<intptr_t>(device + 1));
  return 0;
}
EXPORT int cuThreadExchangeStreamCaptureMode(int*) { return 0; }
EXPORT int cuLibraryLoadData(void** library, const void* code, void*, void*, unsigned, void*, void*,
                             unsigned) {
  *library = const_cast<void*>(code);
  return std::memcmp(code, "\x7f" "ELF", 4) ? 200 : 0;
}
EXPORT int cuLibraryGetKernel(void** kernel, void* library, const char* entry) {
  *kernel = library;
  return std::strcmp(entry, "multiply") ? 500 : 0;
}
EXPORT int cuKernelSetAttribute(int, int, void*, int) { return 0; }
EXPORT int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return current == retained && current ? 0 : 201;  // a function of another device
}
