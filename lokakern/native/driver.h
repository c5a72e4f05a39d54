#pragma once

#include <c10/core/Stream.h>

#include <string>

#include "plan.h"

namespace lokakern {

struct Driver {
  LaunchKernel launch;
  EncodeTiled encode;
  Memset32 fill;
};

constexpr int kInvalidContext = 201;
constexpr int64_t kMostParameterBytes = 4096;  // of a kernel

const Driver& driver();
std::string error_text(int failed);
// Makes the device's primary context, torch's, current in this thread if none is.
void use_context(int device);
// Makes the device's primary context current in this thread until the end of the block: functions
// of kernels belong to the context that is current when they are loaded.
class PrimaryContext {
 public:
  explicit PrimaryContext(int device);
  ~PrimaryContext();
  PrimaryContext(const PrimaryContext&) = delete;
  PrimaryContext& operator=(const PrimaryContext&) = delete;

 private:
  void* before_ = nullptr;
};
// What a call of the driver returns, made again in a thread whose first CUDA call it is.
int in_context(int device, const auto& call) {
  const int failed = call();
  if (failed != kInvalidContext) return failed;
  use_context(device);
  return call();
}
// torch's, of a device that need not be the current one.
void* current_stream(int device);
// Makes a stream torch's current one of its device; returns the former.
c10::Stream exchange_stream(c10::Stream stream);
// Whether work on a device waits in streams.
bool has_streams(c10::Device device);
// Replaces torch's functions for streams, which name them by numbers; for tests without a GPU.
using CurrentStream = void* (*)(int device);
using ExchangeStream = int64_t (*)(int64_t id, int device);
void use_streams(CurrentStream current, ExchangeStream exchange);
bool is_capturing(void* stream);
// Sets what this thread may call while others capture, CUstreamCaptureMode; returns the former.
int exchange_capture_mode(int mode);
std::string device_name(int device);
// The address of a function of the driver. Raises LaunchFailure.
void* driver_symbol(const char* name);
// Calls a function of the driver that no test replaces; returns its status.
int call_driver(const char* name, auto... arguments) {
  return reinterpret_cast<int (*)(decltype(arguments)...)>(driver_symbol(name))(arguments...);
}

}  // namespace lokakern
