#pragma once

#include "plan.h"

namespace lokakern {

struct Driver {
  LaunchKernel launch;
  EncodeTiled encode;
  Memset32 fill;
};

constexpr int kInvalidContext = 201;

const Driver& driver();
std::string error_text(int failed);
// Makes the device's primary context, torch's, current in this thread if none is.
void use_context(int device);
// torch's, of a device that need not be the current one.
void* current_stream(int device);
bool is_capturing(void* stream);
std::string device_name(int device);

}  // namespace lokakern
