#include "lt.h"

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/from_blob.h>
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "driver.h"

namespace lokakern {
namespace {

// From cublasLt.h and library_types.h.
constexpr int kCompute32F = 68, kR32F = 0, kR16F = 2, kR16BF = 14, kE4M3 = 28, kE5M2 = 29;
constexpr int kTransposeA = 3, kEpilogue = 7, kBiasPointer = 8, kAScalePointer = 17,
              kBScalePointer = 18, kFastAccumulation = 25, kBiasType = 26, kAScaleMode = 31,
              kBScaleMode = 32;
constexpr int32_t kOpT = 1, kEpilogueBias = 4;
constexpr int32_t kOuterVector = 3, kVector128 = 4, kBlock128x128 = 5;  // modes of scales
constexpr int kMostWorkspaceBytes = 1;

// From torch.nn.functional.ScalingType.
constexpr int64_t kOfVector128 = 4, kOfBlock128x128 = 5;

constexpr uintptr_t kOperandAlignment = 16;
constexpr int64_t kBlock = 128;

Lt replaced_lt{};
bool is_lt_replaced = false;

std::mutex counts_mutex;
LtCounts counts{};

// A function of torch's CUDA library or of those that it needs: the process may have another
// cuBLASLt too. Null if there is none.
void* torch_symbol(const char* name) {
  void* const torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  return torch_cuda ? dlsym(torch_cuda, name) : nullptr;
}

// Not every torch exports its limit: then it is torch's own on sm_90.
size_t torch_workspace_bytes() {
  // size_t at::cuda::getCUDABlasLtWorkspaceSize()
  void* const found = torch_symbol("_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv");
  return found ? reinterpret_cast<size_t (*)()>(found)() : size_t{32} << 20;
}

const Lt& lt() {
  if (is_lt_replaced) return replaced_lt;
  static const Lt found = [] {
    const auto symbol = [&](auto& to, const char* name) {
      to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(torch_symbol(name));
      if (!to) throw LaunchFailure(std::string("torch has loaded no ") + name);
    };
    Lt made{};
    symbol(made.create, "cublasLtCreate");
    symbol(made.product_create, "cublasLtMatmulDescCreate");
    symbol(made.product_set, "cublasLtMatmulDescSetAttribute");
    symbol(made.product_destroy, "cublasLtMatmulDescDestroy");
    symbol(made.layout_create, "cublasLtMatrixLayoutCreate");
    symbol(made.layout_destroy, "cublasLtMatrixLayoutDestroy");
    symbol(made.preference_create, "cublasLtMatmulPreferenceCreate");
    symbol(made.preference_set, "cublasLtMatmulPreferenceSetAttribute");
    symbol(made.preference_destroy, "cublasLtMatmulPreferenceDestroy");
    symbol(made.heuristic, "cublasLtMatmulAlgoGetHeuristic");
    symbol(made.multiply, "cublasLtMatmul");
    made.is_capturing = [](void* stream) { return int{is_capturing(stream)}; };
    made.most_workspace_bytes = torch_workspace_bytes;
    return made;
  }();
  return found;
}

void check_status(int status, const char* doing) {
  if (status)
    throw LaunchFailure(std::string(doing) + " of cuBLASLt returned " + std::to_string(status));
}

// In the order of captured launches; a workspace follows.
constexpr uint32_t kWorkspace = 6;

std::vector<uint64_t> addresses_of(const Operands& operands) {
  std::vector<uint64_t> found;
  for (const void* x : {operands.a, operands.b, operands.a_scale, operands.b_scale, operands.bias,
                        static_cast<const void*>(operands.out)})
    found.push_back(reinterpret_cast<uint64_t>(x));
  return found;
}

void* handle_of(const Lt& to, c10::Device device) {
  static std::mutex mutex;
  static std::array<void*, 129> handles{};  // for good; a device's index fits into a byte
  std::lock_guard lock(mutex);
  void*& handle = handles[device.is_cuda() ? device.index() + 1 : 0];
  if (!handle) check_status(to.create(&handle), "cublasLtCreate");
  return handle;
}

// Of all addresses; a power of two divides each if it divides this.
uint64_t low_bits(const Operands& operands) {
  uint64_t bits = 0;
  for (const uint64_t address : addresses_of(operands)) bits |= address;
  return bits;
}

int lt_dtype(at::ScalarType dtype) {
  switch (dtype) {
    case at::kHalf: return kR16F;
    case at::kBFloat16: return kR16BF;
    case at::kFloat8_e5m2: return kE5M2;
    default: return kE4M3;
  }
}

// Other threads may capture: what this one waits for is no part of their graphs.
class Uncaptured {
 public:
  explicit Uncaptured(c10::Device device) : is_cuda_(device.is_cuda()) {
    if (is_cuda_) mode_ = exchange_capture_mode(kRelaxed);
  }
  ~Uncaptured() {
    if (is_cuda_) exchange_capture_mode(mode_);
  }

 private:
  static constexpr int kRelaxed = 2;
  const bool is_cuda_;
  int mode_ = 0;
};

// Numbers that look random, the same in every process.
class Draw {
 public:
  explicit Draw(uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15u + 1) {}
  uint8_t byte() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint8_t>(state_ >> 56);
  }

 private:
  uint64_t state_;
};

}  // namespace

void use_lt(const std::vector<uint64_t>& functions) {
  if (!functions.empty() && functions.size() != kLtFunctions)
    throw LaunchFailure("use_lt: expected " + std::to_string(kLtFunctions) + " functions, found " +
                        std::to_string(functions.size()));
  is_lt_replaced = !functions.empty();
  if (is_lt_replaced) std::memcpy(&replaced_lt, functions.data(), sizeof replaced_lt);
}

LtCounts lt_counts() {
  const std::lock_guard lock(counts_mutex);
  return counts;
}

bool Product::is_possible(c10::Device device) { return device.is_cuda() || is_lt_replaced; }

bool Product::multiply(const Operands& operands, void* stream) {
  if (state_.load(std::memory_order_acquire) == kRefused) return false;
  // Algorithms may ask for aligned operands, and torch may choose another one for fewer SMs.
  const uint64_t alignment = low_bits(operands);
  if (alignment % kOperandAlignment || at::globalContext()._SMCarveout_EXPERIMENTAL()) return false;
  if (state_.load(std::memory_order_acquire) == kUnknown) {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) return false;  // another thread finds out
    if (state_.load(std::memory_order_acquire) == kUnknown) check(operands.out, stream);
    if (state_.load(std::memory_order_acquire) != kKept) return false;
  }
  if (captured_ && !(alignment % CapturedLaunches::kAlignment)) {
    launch(operands, stream, true);
    return true;
  }
  const std::lock_guard lock(mutex_);
  launch(operands, stream, false);
  return true;
}

void Product::check(void* out, void* stream) {
  std::string reason, not_captured;
  try {
    lt_ = &lt();
    if (lt_->is_capturing(stream)) return;
    const Uncaptured uncaptured(device_);
    make();
    const int64_t sizes[] = {form_.m, form_.n};
    const at::Tensor found = at::for_blob(out, sizes)
                                 .options(at::TensorOptions().device(device_).dtype(at::kShort))
                                 .target_device(device_)
                                 .make_tensor();
    at::Tensor expected = allocate(form_.m * form_.n, form_.half, device_).view(sizes);
    // Sums of random numbers, and sums that are zero but for rounding: those tell in which order
    // an algorithm adds.
    for (const bool cancels : {false, true}) {
      const at::Tensor a = matrix(form_.m, form_.a_stride, form_.a_dtype, 1, cancels, false);
      const at::Tensor b = matrix(form_.n, form_.b_stride, form_.b_dtype, 2, cancels, true).t();
      const auto [a_scale, b_scale] = scales();
      if (cancels && form_.scales == kOfBlocks) {  // those of parts of k would not let sums cancel
        a_scale.fill_(1);
        b_scale.fill_(1);
      }
      std::optional<at::Tensor> bias;
      if (form_.has_bias) bias = numbers(form_.n, 5).to(form_.half);
      if (bias && cancels) bias->zero_();
      multiply_by_torch(expected, a, b, a_scale, b_scale, bias);
      const Operands operands{a.data_ptr(),       b.data_ptr(), a_scale.data_ptr(),
                              b_scale.data_ptr(), bias ? bias->data_ptr() : nullptr, out};
      if (!cancels) {
        set_pointers(operands);  // the heuristic asks whether there are some
        choose();
      }
      const auto is_same = [&](bool is_captured) {
        launch(operands, stream, is_captured);
        return found.equal(expected.view(at::kShort));
      };
      if (!is_same(false)) throw LaunchFailure("cuBLASLt and torch give different bits");
      if (not_captured.empty() && device_.is_cuda()) {
        try {
          if (!captured_) capture();  // one for both comparisons
          found.fill_(-1);  // NaN
          if (!is_same(true)) throw LaunchFailure("captured launches give different bits");
        } catch (const std::exception& error) {
          not_captured = error.what();
          captured_.reset();
        }
      }
    }
  } catch (const c10::Error& error) {  // torch's operator does it, or says what is wrong
    reason = error.what_without_backtrace();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  const std::lock_guard lock(counts_mutex);
  if (reason.empty()) {
    ++counts.kept;
    counts.captured += captured_.has_value();
    if (!not_captured.empty()) counts.uncaptured_reason = not_captured;
  } else {
    ++counts.refused;
    counts.reason = reason;
  }
  state_.store(reason.empty() ? kKept : kRefused, std::memory_order_release);
}

void Product::multiply_by_torch(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                                const at::Tensor& a_scale, const at::Tensor& b_scale,
                                const std::optional<at::Tensor>& bias) const {
  if (form_.scales != kOfBlocks) {
    at::_scaled_mm_out(out, a, b, a_scale, b_scale, bias, std::nullopt, form_.half,
                       form_.is_fast);
    return;
  }
  // Not every torch has it. Its numbers of scales are those of torch.nn.functional.ScalingType.
  const auto op = c10::Dispatcher::singleton().findSchema({"aten::_scaled_mm_v2", "out"});
  TORCH_CHECK(op, "this torch has no _scaled_mm_v2");
  const auto list = [](const at::Tensor& x) { return c10::List<at::Tensor>({x}); };
  const auto numbers = [](std::initializer_list<int64_t> x) { return c10::List<int64_t>(x); };
  torch::jit::Stack stack{a, b, list(a_scale), numbers({kOfVector128}), numbers({}), list(b_scale),
                          numbers({kOfBlock128x128}), numbers({}), bias, form_.half, numbers({}),
                          form_.is_fast, out};
  op->callBoxed(stack);
}

// cuBLASLt computes column-major products, out^T = b^T a^T: its A is b.
void Product::make() {
  if (std::max(form_.a_stride, form_.b_stride) > 4 * form_.k)  // the comparison allocates as much
    throw LaunchFailure("rows of an operand are far apart");
  handle_ = handle_of(*lt_, device_);
  void* made = nullptr;
  check_status(lt_->product_create(&made, kCompute32F, kR32F), "cublasLtMatmulDescCreate");
  product_ = Owned(made, lt_->product_destroy);
  const auto set = [&](int attribute, auto value) {
    check_status(lt_->product_set(product_.get(), attribute, &value, sizeof value),
                 "cublasLtMatmulDescSetAttribute");
  };
  set(kTransposeA, kOpT);
  set(kFastAccumulation, int8_t{form_.is_fast});
  if (form_.scales != kOfTensors) {
    const bool is_blocked = form_.scales == kOfBlocks;
    set(kAScaleMode, is_blocked ? kBlock128x128 : kOuterVector);
    set(kBScaleMode, is_blocked ? kVector128 : kOuterVector);
  }
  if (form_.has_bias) {
    set(kEpilogue, kEpilogueBias);
    set(kBiasType, int32_t{lt_dtype(form_.half)});
  }
  const auto layout = [&](int dtype, int64_t rows, int64_t columns, int64_t stride) {
    check_status(lt_->layout_create(&made, dtype, rows, columns, stride),
                 "cublasLtMatrixLayoutCreate");
    return Owned(made, lt_->layout_destroy);
  };
  a_ = layout(lt_dtype(form_.a_dtype), form_.k, form_.m, form_.a_stride);
  b_ = layout(lt_dtype(form_.b_dtype), form_.k, form_.n, form_.b_stride);
  out_ = layout(lt_dtype(form_.half), form_.n, form_.m, form_.n);
}

void Product::choose() {
  void* made = nullptr;
  check_status(lt_->preference_create(&made), "cublasLtMatmulPreferenceCreate");
  const Owned preference(made, lt_->preference_destroy);
  const size_t most = lt_->most_workspace_bytes();  // the heuristic's answer depends on it
  check_status(lt_->preference_set(made, kMostWorkspaceBytes, &most, sizeof most),
               "cublasLtMatmulPreferenceSetAttribute");
  int count = 0;
  check_status(lt_->heuristic(handle_, product_.get(), b_.get(), a_.get(), out_.get(), out_.get(),
                              made, 1, &found_, &count),
               "cublasLtMatmulAlgoGetHeuristic");
  if (!count) throw LaunchFailure("cuBLASLt has no algorithm");
  check_status(found_.state, "cublasLtMatmulAlgoGetHeuristic");
}

void Product::set_pointers(const Operands& operands) {
  const auto set = [&](int attribute, const void* pointer) {
    check_status(lt_->product_set(product_.get(), attribute, &pointer, sizeof pointer),
                 "cublasLtMatmulDescSetAttribute");
  };
  set(kAScalePointer, operands.b_scale);
  set(kBScalePointer, operands.a_scale);
  if (form_.has_bias) set(kBiasPointer, operands.bias);
}

void Product::launch(const Operands& operands, void* stream, bool is_captured) {
  static thread_local int ready = -1;  // the device whose context this thread has
  if (device_.is_cuda() && ready != device_.index()) {
    use_context(device_.index());
    ready = device_.index();
  }
  at::Tensor workspace;
  if (found_.workspace_bytes && (!is_captured || captured_->uses(kWorkspace)))
    workspace = allocate(static_cast<int64_t>(found_.workspace_bytes), at::kByte, device_);
  void* const start = workspace.defined() ? workspace.data_ptr() : nullptr;
  if (!is_captured) {
    launch_by_lt(operands, start, stream);
    return;
  }
  auto addresses = addresses_of(operands);
  addresses.push_back(reinterpret_cast<uint64_t>(start));
  captured_->launch(addresses, device_.index(), stream);
}

void Product::launch_by_lt(const Operands& operands, void* workspace, void* stream) {
  set_pointers(operands);
  constexpr float one = 1, zero = 0;
  check_status(
      lt_->multiply(handle_, product_.get(), &one, operands.b, b_.get(), operands.a, a_.get(),
                    &zero, operands.out, out_.get(), operands.out, out_.get(), found_.algorithm,
                    workspace, found_.workspace_bytes, stream),
      "cublasLtMatmul");
}

void Product::capture() {
  const auto [a_scale, b_scale] = scales();
  const auto bytes_of = [](const at::Tensor& x) { return x.storage().nbytes(); };
  const auto bytes = [](int64_t rows, int64_t stride) {
    return static_cast<uint64_t>(rows) * static_cast<uint64_t>(stride);
  };
  const std::vector<uint64_t> sizes{
      bytes(form_.m, form_.a_stride), bytes(form_.n, form_.b_stride), bytes_of(a_scale),
      bytes_of(b_scale), form_.has_bias ? bytes(form_.n, 2) : 0, bytes(form_.m, form_.n * 2),
      found_.workspace_bytes};
  captured_.emplace(sizes, [&](const std::vector<uint64_t>& addresses, void* stream) {
    const auto at = [&](size_t place) { return reinterpret_cast<void*>(addresses[place]); };
    launch_by_lt({at(0), at(1), at(2), at(3), at(4), at(5)}, at(kWorkspace), stream);
  });
  for (const uint32_t operand : {0, 1, 5})  // a, b and out
    if (!captured_->uses(operand)) throw LaunchFailure("its parameters lack an operand");
}

// Finite FP8 numbers of all magnitudes, [rows, k] with this stride. Where they cancel, the second
// half of a row is the first half again, or its negative.
at::Tensor Product::matrix(int64_t rows, int64_t stride, at::ScalarType dtype, uint64_t seed,
                           bool cancels, bool is_negated) const {
  constexpr int64_t kStep = 3;  // each row begins that much later in one sequence
  constexpr uint8_t kSign = 0x80, kLargest = 0x7C, kTopOfExponent = 0x40;
  const int64_t count = rows * kStep + form_.k, half = form_.k / 2;
  at::Tensor sequence = allocate(count, at::kByte, at::kCPU);
  auto* const bytes = sequence.mutable_data_ptr<uint8_t>();
  Draw draw(seed);
  for (int64_t i = 0; i < count; ++i) {
    uint8_t code = draw.byte();
    if ((code & kLargest) == kLargest) code ^= kTopOfExponent;  // NaN and infinity are among them
    bytes[i] = cancels && i >= half ? bytes[i - half] ^ (is_negated ? kSign : 0) : code;
  }
  at::Tensor made = allocate(rows * stride, at::kByte, device_);
  made = made.as_strided({rows, form_.k}, {stride, 1});
  made.copy_(sequence.to(device_).as_strided({rows, form_.k}, {kStep, 1}));
  return made.view(dtype);
}

// Scales of a and b. Sums of so large numbers would overflow float16: theirs are brought down.
std::pair<at::Tensor, at::Tensor> Product::scales() const {
  const bool is_wide = form_.a_dtype == at::kFloat8_e5m2 || form_.b_dtype == at::kFloat8_e5m2;
  const double unit = form_.half == at::kBFloat16 ? 1 : is_wide ? 0x1p-16 : 0x1p-8;
  if (form_.scales == kOfBlocks) {
    const int64_t groups = form_.k / kBlock, blocks = form_.n / kBlock;
    return {numbers(groups * form_.m, 3).mul_(unit).view({groups, form_.m}).t(),
            numbers(blocks * form_.b_scale_rows, 4).view({blocks, form_.b_scale_rows}).t()};
  }
  const bool is_single = form_.scales == kOfTensors;
  return {numbers(is_single ? 1 : form_.m, 3).mul_(unit).unsqueeze(1),
          numbers(is_single ? 1 : form_.n, 4).unsqueeze(0)};
}

// float32 from 0.5 to 1.5.
at::Tensor Product::numbers(int64_t count, uint64_t seed) const {
  at::Tensor made = allocate(count, at::kFloat, at::kCPU);
  Draw draw(seed);
  std::generate_n(made.mutable_data_ptr<float>(), count,
                  [&] { return 0.5f + static_cast<float>(draw.byte()) / 255; });
  return made.to(device_);
}

}  // namespace lokakern
