// cuBLASLt's products of FP8 matrices with a plan that is made once.
//
// `torch._scaled_mm` makes descriptors and asks for an algorithm in every call, which costs the
// host more than the launch. A product does so at its first call, with torch's settings.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "captured.h"

namespace lokakern {

// The functions of cuBLASLt that are called; they return a status, 0 for success.
struct Lt {
  int (*create)(void** handle);
  int (*product_create)(void** product, int compute, int scale);
  int (*product_set)(void* product, int attribute, const void* value, size_t bytes);
  int (*product_destroy)(void* product);
  int (*layout_create)(void** layout, int dtype, uint64_t rows, uint64_t columns, int64_t stride);
  int (*layout_destroy)(void* layout);
  int (*preference_create)(void** preference);
  int (*preference_set)(void* preference, int attribute, const void* value, size_t bytes);
  int (*preference_destroy)(void* preference);
  int (*heuristic)(void* handle, void* product, void* a, void* b, void* c, void* d,
                   void* preference, int requested, void* found, int* count);
  int (*multiply)(void* handle, void* product, const void* alpha, const void* a, void* a_layout,
                  const void* b, void* b_layout, const void* beta, const void* c, void* c_layout,
                  void* d, void* d_layout, const void* algorithm, void* workspace, size_t bytes,
                  void* stream);
  // Not cuBLASLt's; they stand here for tests.
  int (*is_capturing)(void* stream);
  size_t (*most_workspace_bytes)();  // that torch lets an algorithm take
};

// The number of functions in `Lt`.
inline constexpr size_t kLtFunctions = sizeof(Lt) / sizeof(void*);

// Replaces cuBLASLt for later plans, of CPU tensors too; none: the real one. For tests.
void use_lt(const std::vector<uint64_t>& functions);

// How many products are launched with their own plan and how many by torch, and why the last. Of
// those with a plan, how many are launched without cuBLASLt, and why the last other one is not.
struct LtCounts {
  int64_t kept, refused, captured;
  std::string reason, uncaptured_reason;
};
LtCounts lt_counts();

// out[m, n] = (sum_k a[m, k] b[k, n]) * a_scale * b_scale + bias[n], of torch's `_scaled_mm`, or
// with scales of parts of k, of its `_scaled_mm_v2`.
struct Operands {
  const void *a, *b, *a_scale, *b_scale, *bias;  // bias may be null
  void* out;
};

class Product {
 public:
  // Of a and b: one each; [m, 1] and [1, n]; or column-major [m, k / 128] and, of 128 x 128 and with
  // padding, [b_scale_rows, n / 128].
  enum Scales { kOfTensors, kOfRows, kOfBlocks };
  struct Form {
    int64_t m, n, k, a_stride, b_stride;  // a is row-major, b column-major
    at::ScalarType a_dtype, b_dtype;      // FP8
    at::ScalarType half;                  // bfloat16 or float16: of the contiguous out, and bias
    Scales scales;
    int64_t b_scale_rows;
    bool has_bias;
    bool is_fast;   // sums without promotion
  };

  Product(const Form& form, c10::Device device)
      : form_(form), device_(device.is_cuda() ? device : c10::Device(at::kCPU)) {}

  // Whether products are possible there at all.
  static bool is_possible(c10::Device device);

  // Launches the product; false if torch is to do it.
  //
  // The first call outside of a capture finds out whether torch gives the same bits: it allocates
  // operands of the same layouts, multiplies them both ways and waits for the comparison. Only
  // then is the product launched, in this call and all later ones: without cuBLASLt if what it
  // launches could be captured and gives these bits, too. Threads may call at once. Raises
  // LaunchFailure.
  bool multiply(const Operands& operands, void* stream);

 private:
  using Owned = std::unique_ptr<void, int (*)(void*)>;
  enum State { kUnknown, kKept, kRefused };

  void check(void* out, void* stream);
  void make();
  void choose();
  void capture();
  void set_pointers(const Operands& operands);
  void launch(const Operands& operands, void* stream, bool is_captured);
  void launch_by_lt(const Operands& operands, void* workspace, void* stream);
  at::Tensor matrix(int64_t rows, int64_t stride, at::ScalarType dtype, uint64_t seed,
                    bool cancels, bool is_negated) const;
  at::Tensor numbers(int64_t count, uint64_t seed) const;
  std::pair<at::Tensor, at::Tensor> scales() const;
  void multiply_by_torch(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                         const at::Tensor& a_scale, const at::Tensor& b_scale,
                         const std::optional<at::Tensor>& bias) const;

  const Form form_;
  const c10::Device device_;
  std::atomic<State> state_{kUnknown};
  std::mutex mutex_;  // pointers to scales are part of cuBLASLt's descriptor
  std::optional<CapturedLaunches> captured_;
  const Lt* lt_ = nullptr;
  void* handle_ = nullptr;
  Owned product_{nullptr, nullptr}, a_{nullptr, nullptr}, b_{nullptr, nullptr},
      out_{nullptr, nullptr};
  struct Found {  // cublasLtMatmulHeuristicResult_t
    uint64_t algorithm[8];
    size_t workspace_bytes;
    int state;
    float waves;
    int reserved[4];
  } found_{};
};

}  // namespace lokakern
