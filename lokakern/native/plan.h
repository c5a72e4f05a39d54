// A plan: one call of an op, recorded once, that later calls with the same signature replay.
//
// A signature is everything that decides which kernels run and how: dtypes, sizes, strides,
// alignments and devices of the operands, and all other arguments. What remains are addresses:
// a plan allocates the results, fills in addresses and launches.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "lt.h"

namespace lokakern {

using Words = c10::SmallVector<int64_t, 128>;
using Inputs = c10::SmallVector<const at::Tensor*, 16>;
using Results = c10::SmallVector<at::Tensor, 4>;

// A kernel could not be launched or loaded.
struct LaunchFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Text of a plan that is cut off or damaged.
struct BadPlan : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A part of a buffer as a tensor; the offset is in bytes.
struct View {
  int64_t buffer, offset;
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
};

struct Address {
  int64_t buffer, offset;
};

struct Buffer {
  enum Kind : int64_t { kInput, kOutput, kWorkspace, kScratch, kComputed, kConstant };
  Kind kind;
  int64_t index = 0;  // of an input or constant; of a workspace its place in the arena
  int64_t bytes = 0;
  View view{};  // of an output
};

// The layout of a tensor for a kernel's bulk copies (TMA), and its encodings for recent addresses.
struct Map {
  static constexpr int kBytes = 128, kKept = 8;
  uint32_t place;  // among the kernel's parameters
  Address address;
  int64_t item, swizzle;
  std::vector<uint64_t> sizes, strides_bytes;
  std::vector<uint32_t> box;
  struct Encoded {
    uint64_t address = 0;
    std::array<uint8_t, kBytes> bytes;
  };
  mutable std::array<Encoded, kKept> kept;
  mutable int oldest = 0;
};

struct Launch {
  void* function;
  std::array<uint32_t, 7> shape;  // grid, block, dynamic shared bytes
  std::vector<uint8_t> attributes;  // CUlaunchAttribute, 72 bytes each
  std::vector<uint8_t> values;  // of all parameters; zero where addresses go
  std::vector<uint32_t> parameters;  // where each begins
  std::vector<std::pair<uint32_t, Address>> pointers;
  std::vector<Map> maps;
};

struct Fill {
  Address address;
  int64_t words;  // of 4 bytes
  uint32_t pattern;
  int64_t written;  // the input whose version changes, or -1
};

// An operator of torch, such as a library's product.
struct Operator {
  using Argument = std::variant<c10::IValue, View, std::vector<View>>;
  enum Kind { kOther, kMm, kAddmm, kScaledMm };  // those called without boxes
  struct Operands {
    const View *a, *b, *a_scale, *b_scale, *bias, *out;  // of the arguments; bias may be null
  };
  Kind kind = kOther;
  std::optional<c10::OperatorHandle> handle;
  std::vector<Argument> arguments;
  std::vector<int64_t> results;  // buffers
  std::vector<int64_t> written;  // inputs, whose versions change
  std::unique_ptr<Product> product;  // of FP8 matrices; null where cuBLASLt is not asked
  Operands operands{};               // of the product
};

class Plan {
 public:
  // Reads what `lokakern.native.record` writes.
  //
  // `functions` are the kernels that launches name by number; null where they name an address.
  // Raises BadPlan.
  Plan(std::string_view text, c10::Device device, std::vector<at::Tensor> constants,
       const std::vector<void*>* functions);
  ~Plan();

  // Allocates, launches, and appends the results. Raises LaunchFailure.
  void run(const Inputs& inputs, Results& results) const;

  at::ScalarType result_dtype(size_t index) const { return results_[index].dtype; }

 private:
  struct State;
  at::Tensor tensor_of(const View& view, const State& state) const;
  at::Tensor view_of(const View& view, const at::Tensor& whole, const State& state) const;
  void launch(const Launch& step, const State& state, void* stream) const;
  void call(const Operator& step, State& state, void* stream) const;
  void keep_constants() const;

  c10::Device device_;
  int64_t arena_bytes_ = 0;
  int64_t input_count_ = 0;
  bool calls_operators_ = false;
  std::vector<Buffer> buffers_;
  std::vector<std::variant<Launch, Fill, Operator>> steps_;
  std::vector<View> results_;
  std::vector<int64_t> written_;  // inputs to which launches write
  std::vector<at::Tensor> constants_;
  mutable std::once_flag are_constants_kept_;
  mutable std::mutex maps_mutex_;
};

// Names of torch's operators that plans of files may call; others are refused when saved.
extern const std::array<const char*, 12> kOperators;

// A tensor of one dimension from torch's allocator, made without its dispatcher.
at::Tensor allocate(int64_t elements, at::ScalarType dtype, c10::Device device);

// Whether a tensor is its memory: no subclass, not negated, wrapped or sparse.
bool is_plain_tensor(const at::Tensor& tensor);

// Adds what a tensor contributes to a signature; false where tensors of its kind have no plans.
bool add_tensor(const at::Tensor& tensor, const Inputs& before, Words& words);

// Whether torch is in a state that plans know: no transforms, no modes, no autocast.
bool is_plain_state();

// Whether no transform or mode of torch stands between an operator and its kernel.
bool has_no_modes();

// --- plans by signature

struct Entry {
  std::shared_ptr<const Plan> plan;  // null until the call was recorded
  std::atomic<int64_t> calls = 0;  // before that
  bool is_recordable = true;
  bool is_loaded = false;  // from a file: no call makes it again
  std::atomic<uint64_t> used = 0;  // when, by the book's clock
};

// Entry of a signature, made if there is none; references stay valid until `clear`.
class Book {
 public:
  std::shared_ptr<Entry> find(const Words& words);
  void install(const Words& words, std::shared_ptr<Entry> entry);
  void clear();
  size_t size();

 private:
  struct Impl;
  Impl& impl();
};

Book& book();

// Scratch memory belongs to one owner while this is above 0, see `lokakern.scratch.owned`.
extern thread_local int owned_depth;

// `lokakern.scratch.zeros`, while a graph is captured; null in a program without Python.
extern at::Tensor (*scratch_of_graph)(int64_t bytes, c10::Device device);

// --- the driver

struct LaunchConfig {  // CUlaunchConfig
  uint32_t shape[7];  // grid, block, dynamic shared bytes
  void* stream;
  const void* attributes;
  uint32_t count;
};

using LaunchKernel = int (*)(const void* config, void* function, void** parameters, void** extra);
using EncodeTiled = int (*)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*,
                            const uint32_t*, const uint32_t*, int, int, int, int);
using Memset32 = int (*)(uint64_t address, unsigned pattern, size_t count, void* stream);

// Replaces the driver's functions; for tests without a GPU.
void use_driver(LaunchKernel launch, EncodeTiled encode, Memset32 fill);

// Loads a kernel for good on a device, whose context is current. Raises LaunchFailure.
void* load_kernel(std::string_view cubin, const std::string& entry, int64_t shared_bytes,
                  int64_t cluster, int device);

// Installs the plans of a file that `lokakern.save_plans` wrote, for one GPU.
//
// Returns how many. Raises BadPlan, or LaunchFailure on another type of GPU.
int64_t load_plans(const std::string& path, int device);

}  // namespace lokakern
