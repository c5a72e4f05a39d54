// CUDA's driver, or HIP, loaded at first use: neither building nor loading this library needs them.
#include "driver.h"

#include <c10/core/impl/VirtualGuardImpl.h>
#include <dlfcn.h>

#include <mutex>

namespace lokakern {
namespace {

void* library() {
  static void* const found = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (!found) throw LaunchFailure("CUDA kernels need NVIDIA's driver, libcuda.so.1");
  return found;
}

template <typename Function>
Function symbol(const char* name) {
  return reinterpret_cast<Function>(driver_symbol(name));
}

// torch for AMD, through which the functions of its HIP are found; null elsewhere.
void* torch_hip() {
  static void* const found = dlopen("libtorch_hip.so", RTLD_NOW | RTLD_NOLOAD);
  return found;
}

template <typename Function>
Function hip_symbol(const char* name) {
  void* const found = dlsym(torch_hip(), name);
  if (!found) throw LaunchFailure(std::string("HIP has no ") + name);
  return reinterpret_cast<Function>(found);
}

// As cuLaunchKernelEx; kernels of HIP have no attributes.
int launch_by_hip(const void* given, void* function, void** parameters, void**) {
  using Launch = int (*)(void*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t,
                         uint32_t, void*, void**, void**);
  static const auto launch = hip_symbol<Launch>("hipModuleLaunchKernel");
  const auto& [shape, stream, attributes, count] = *static_cast<const LaunchConfig*>(given);
  return launch(function, shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], shape[6],
                stream, parameters, nullptr);
}

int fill_by_hip(uint64_t address, unsigned pattern, size_t count, void* stream) {
  using Fill = int (*)(void*, int, size_t, void*);
  static const auto fill = hip_symbol<Fill>("hipMemsetD32Async");
  return fill(reinterpret_cast<void*>(address), static_cast<int>(pattern), count, stream);
}

Driver loaded() {
  Driver d{};
  if (torch_hip()) {
    d.launch = launch_by_hip;
    d.fill = fill_by_hip;
    return d;
  }
  d.launch = symbol<LaunchKernel>("cuLaunchKernelEx");
  d.encode = symbol<EncodeTiled>("cuTensorMapEncodeTiled");
  d.fill = symbol<Memset32>("cuMemsetD32Async");
  return d;
}

Driver replaced{};
bool is_replaced = false;
CurrentStream replaced_current = nullptr;
ExchangeStream replaced_exchange = nullptr;

void check(int failed, const std::string& doing) {
  if (failed) throw LaunchFailure(doing + ": " + error_text(failed));
}

}  // namespace

void* driver_symbol(const char* name) {
  void* const found = dlsym(library(), name);
  if (!found) throw LaunchFailure(std::string("NVIDIA's driver has no ") + name);
  return found;
}

const Driver& driver() {
  if (is_replaced) return replaced;
  static const Driver found = loaded();
  return found;
}

void use_driver(LaunchKernel launch, EncodeTiled encode, Memset32 fill) {
  replaced = Driver{launch, encode, fill};
  is_replaced = launch != nullptr;
}

std::string error_text(int failed) {
  if (is_replaced) return "error " + std::to_string(failed);
  if (torch_hip())
    return std::string(hip_symbol<const char* (*)(int)>("hipGetErrorString")(failed)) + " (" +
           std::to_string(failed) + ")";
  const char *name = nullptr, *text = nullptr;
  call_driver("cuGetErrorName", failed, &name);
  call_driver("cuGetErrorString", failed, &text);
  return std::string(name ? name : "unknown error") + " (" + std::to_string(failed) +
         "): " + (text ? text : "");
}

void use_context(int device) {
  void* context = nullptr;
  check(call_driver("cuCtxGetCurrent", &context), "cuCtxGetCurrent");
  if (context) return;
  check(call_driver("cuDevicePrimaryCtxRetain", &context, device), "cuDevicePrimaryCtxRetain");
  check(call_driver("cuCtxSetCurrent", context), "cuCtxSetCurrent");
}

PrimaryContext::PrimaryContext(int device) {
  void* own = nullptr;
  check(call_driver("cuCtxGetCurrent", &before_), "cuCtxGetCurrent");
  check(call_driver("cuDevicePrimaryCtxRetain", &own, device), "cuDevicePrimaryCtxRetain");
  check(call_driver("cuCtxSetCurrent", own), "cuCtxSetCurrent");
}

PrimaryContext::~PrimaryContext() { call_driver("cuCtxSetCurrent", before_); }

void* current_stream(int device) {
  if (replaced_current) return replaced_current(device);
  using Current = int (*)(int32_t, void**);  // torch's C interface, see shim.h of AOTInductor
  static const Current current = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
    if (!torch_cuda) torch_cuda = torch_hip();
    void* found = torch_cuda ? dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream") : nullptr;
    if (!found) throw LaunchFailure("torch does not tell its current CUDA stream");
    return reinterpret_cast<Current>(found);
  }();
  void* stream = nullptr;
  if (current(device, &stream)) throw LaunchFailure("torch has no current CUDA stream");
  return stream;
}

c10::Stream exchange_stream(c10::Stream stream) {
  if (!replaced_exchange)
    return c10::impl::VirtualGuardImpl(stream.device_type()).exchangeStream(stream);
  return c10::Stream(c10::Stream::UNSAFE, stream.device(),
                     replaced_exchange(stream.id(), stream.device_index()));
}

bool has_streams(c10::Device device) { return device.is_cuda() || replaced_exchange; }

void use_streams(CurrentStream current, ExchangeStream exchange) {
  replaced_current = current;
  replaced_exchange = exchange;
}

bool is_capturing(void* stream) {
  using Ask = int (*)(void*, int*);
  static const auto ask = torch_hip() ? hip_symbol<Ask>("hipStreamIsCapturing")
                                      : symbol<Ask>("cuStreamIsCapturing");
  int status = 0;
  return ask(stream, &status) == 0 && status != 0;
}

int exchange_capture_mode(int mode) {
  call_driver("cuThreadExchangeStreamCaptureMode", &mode);
  return mode;
}

void* load_kernel(std::string_view cubin, const std::string& entry, int64_t shared_bytes,
                  int64_t cluster, int device) {
  constexpr int kMaxDynamicSharedBytes = 8, kNonPortableCluster = 14;  // CUfunction_attribute
  constexpr int kRelaxed = 2;  // CUstreamCaptureMode: code may be loaded during a capture
  void *library = nullptr, *kernel = nullptr, *function = nullptr;
  int mode = kRelaxed;
  call_driver("cuThreadExchangeStreamCaptureMode", &mode);
  const auto load = [&] {
    check(call_driver("cuLibraryLoadData", &library, static_cast<const void*>(cubin.data()),
                      static_cast<void*>(nullptr), static_cast<void*>(nullptr), 0u,
                      static_cast<void*>(nullptr), static_cast<void*>(nullptr), 0u),
          "loading " + entry);
    check(call_driver("cuLibraryGetKernel", &kernel, library, entry.c_str()), "finding " + entry);
    if (shared_bytes > 48 * 1024)
      check(call_driver("cuKernelSetAttribute", kMaxDynamicSharedBytes,
                        static_cast<int>(shared_bytes), kernel, device),
            "shared memory of " + entry);
    if (cluster > 8)
      check(call_driver("cuKernelSetAttribute", kNonPortableCluster, 1, kernel, device),
            "clusters of " + entry);
    check(call_driver("cuKernelGetFunction", &function, kernel), "loading " + entry);
  };
  try {
    load();
  } catch (...) {
    call_driver("cuThreadExchangeStreamCaptureMode", &mode);
    throw;
  }
  call_driver("cuThreadExchangeStreamCaptureMode", &mode);
  return function;
}

std::string device_name(int device) {
  std::array<char, 256> name{};
  check(call_driver("cuInit", 0u), "cuInit");
  check(call_driver("cuDeviceGetName", name.data(), static_cast<int>(name.size()), device),
        "the name of GPU " + std::to_string(device));
  return name.data();
}

}  // namespace lokakern
