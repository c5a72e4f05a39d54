#include "plan.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ScalarOps.h>
#include <ATen/ops/_scaled_mm.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>
#include <cstring>
#include <future>
#include <shared_mutex>
#include <sstream>
#include <unordered_map>

#include "driver.h"
#include "reader.h"

namespace lokakern {

thread_local int owned_depth = 0;
at::Tensor (*scratch_of_graph)(int64_t, c10::Device) = nullptr;

const std::array<const char*, 12> kOperators = {
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_mm",
    "aten::_scaled_mm_v2", "aten::copy_", "aten::clone", "aten::_to_copy", "aten::add_",
    "aten::add", "aten::sum"};

at::Tensor allocate(int64_t elements, at::ScalarType dtype, c10::Device device) {
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  return at::Tensor(at::detail::empty_generic({elements}, c10::GetAllocator(device.type()),
                                              c10::DispatchKeySet(key), dtype, std::nullopt));
}

namespace {

constexpr int64_t kAlignment = 512;  // of parts of an arena, as of the caching allocator
constexpr int64_t kMost = 1 << 20;  // of anything that a plan counts
constexpr size_t kAttributeBytes = 72;

int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

char* start_of(const at::Tensor& x) { return static_cast<char*>(x.data_ptr()); }

void fill(c10::Device device, char* address, int64_t words, uint32_t pattern, void* stream) {
  if (device.is_cpu()) {
    std::fill_n(reinterpret_cast<uint32_t*>(address), words, pattern);
    return;
  }
  const auto at = reinterpret_cast<uint64_t>(address);
  const auto submit = [&] { return driver().fill(at, pattern, words, stream); };
  if (const int failed = in_context(device.index(), submit))
    throw LaunchFailure("filling memory: " + error_text(failed));
}

// Bytes for good. In mode="reduce-overhead" torch.compile lets a thread allocate in the pool of a
// CUDA graph, where it raises an error for what outlives the call: another thread allocates.
at::Tensor allocate_to_keep(int64_t bytes, c10::Device device) {
  return std::async(std::launch::async, [=] {
           const c10::DeviceGuard guard(device);
           return allocate(bytes, at::kByte, device);
         }).get();
}

// Memory that launches leave as they found it: zeros. A launch on a stream waits for the one
// before, so all of a stream share one; a graph, and an owner, have their own. That of a graph is
// Python's, which has some that need not be cleared in each replay.
at::Tensor scratch(int64_t bytes, c10::Device device, void* stream) {
  static std::mutex mutex;
  static auto& of_stream = *new std::unordered_map<int64_t, at::Tensor>;  // torch may end before
  const int64_t words = round_up(bytes, 4) / 4;
  const auto zeros = [&](at::Tensor made) {
    fill(device, start_of(made), words, 0, stream);
    return made;
  };
  const bool is_captured = is_capturing(stream);
  if (is_captured && !owned_depth && scratch_of_graph) return scratch_of_graph(bytes, device);
  if (owned_depth || is_captured) return zeros(allocate(4 * words, at::kByte, device));
  std::lock_guard lock(mutex);
  auto& found = of_stream[reinterpret_cast<int64_t>(stream) * 64 + device.index()];
  if (!found.defined() || found.numel() < bytes) found = zeros(allocate_to_keep(4 * words, device));
  return found;
}

// The map for an address, from the last few; the driver needs 1 us for a new one.
const uint8_t* encoded(const Map& map, char* start, const Driver& to, int device) {
  const auto at = reinterpret_cast<uint64_t>(start);
  for (const auto& kept : map.kept)
    if (kept.address == at) return kept.bytes.data();
  auto& made = map.kept[map.oldest];
  map.oldest = (map.oldest + 1) % Map::kKept;
  made.address = 0;
  const uint32_t ones[5] = {1, 1, 1, 1, 1};
  alignas(64) uint8_t bytes[Map::kBytes];
  const int dtype = map.item == 1 ? 0 : map.item == 2 ? 1 : 7;  // UINT8, UINT16, FLOAT32
  const auto encode = [&] {
    return to.encode(bytes, dtype, map.sizes.size(), start, map.sizes.data(),
                     map.strides_bytes.data(), map.box.data(), ones, 0, map.swizzle, 3, 0);
  };
  if (const int failed = in_context(device, encode))
    throw LaunchFailure("cuTensorMapEncodeTiled: " + error_text(failed));
  std::memcpy(made.bytes.data(), bytes, Map::kBytes);
  made.address = at;
  return made.bytes.data();
}

using Buffers = std::vector<Buffer>;

// Bytes of a buffer; an input's are those of the tensor that the signature describes.
int64_t size_of(const Buffer& buffer) {
  const bool is_sized = buffer.kind == Buffer::kOutput || buffer.kind == Buffer::kWorkspace ||
                        buffer.kind == Buffer::kScratch || buffer.kind == Buffer::kComputed;
  return is_sized ? buffer.bytes : INT64_MAX;
}

Address read_address(Reader& from, const Buffers& buffers) {
  const int64_t buffer = from.number(0, static_cast<int64_t>(buffers.size()) - 1);
  return {buffer, from.number(0, size_of(buffers[buffer]))};
}

View read_view(Reader& from, const Buffers& buffers) {
  View view;
  const Address first = read_address(from, buffers);
  view.buffer = first.buffer;
  view.offset = first.offset;
  view.dtype = static_cast<at::ScalarType>(
      from.number(0, static_cast<int64_t>(at::ScalarType::Undefined) - 1));
  const int64_t rank = from.number(0, 16);
  for (int64_t i = 0; i < rank; ++i) view.sizes.push_back(from.number(0, INT64_MAX));
  for (int64_t i = 0; i < rank; ++i) view.strides.push_back(from.number(0, INT64_MAX));
  int64_t elements = 1, bytes = 0;  // up to the end of the last element
  bool fits = true;
  for (int64_t i = 0; i < rank; ++i) {
    if (!view.sizes[i]) return view;
    int64_t step = 0;
    fits = fits && !__builtin_mul_overflow(view.sizes[i] - 1, view.strides[i], &step) &&
           !__builtin_add_overflow(elements, step, &elements);
  }
  const auto item = static_cast<int64_t>(c10::elementSize(view.dtype));
  fits = fits && !__builtin_mul_overflow(elements, item, &bytes) &&
         !__builtin_add_overflow(bytes, view.offset, &bytes);
  if (!fits || bytes > size_of(buffers[view.buffer])) throw BadPlan("a view exceeds its buffer");
  if (view.offset % item) throw BadPlan("a view begins within an item");
  return view;
}

Launch read_launch(Reader& from, const Buffers& buffers, const std::vector<void*>* functions) {
  Launch launch{};
  const int64_t function = from.number(INT64_MIN, INT64_MAX);
  if (!functions) {
    launch.function = reinterpret_cast<void*>(function);
  } else {
    if (function < 0 || function >= static_cast<int64_t>(functions->size()))
      throw BadPlan("a launch names kernel " + std::to_string(function));
    launch.function = (*functions)[function];
  }
  for (auto& side : launch.shape) side = from.number(0, UINT32_MAX);
  const auto attributes = from.text(kAttributeBytes * 8);
  if (attributes.size() % kAttributeBytes) throw BadPlan("attributes of a launch are cut off");
  launch.attributes.assign(attributes.begin(), attributes.end());
  const auto values = from.text(kMostParameterBytes);
  launch.values.assign(values.begin(), values.end());
  const auto place = [&](int64_t bytes) {
    const auto last = static_cast<int64_t>(launch.values.size()) - bytes;
    return static_cast<uint32_t>(from.number(0, last));
  };
  const int64_t parameters = from.number(0, 256);
  for (int64_t i = 0; i < parameters; ++i) launch.parameters.push_back(place(1));
  const int64_t pointers = from.number(0, 256);
  for (int64_t i = 0; i < pointers; ++i) {
    const uint32_t at = place(8);
    launch.pointers.emplace_back(at, read_address(from, buffers));
  }
  const int64_t maps = from.number(0, 64);
  for (int64_t i = 0; i < maps; ++i) {
    Map map{};
    map.place = place(Map::kBytes);
    map.address = read_address(from, buffers);
    map.item = from.number(1, 4);
    map.swizzle = from.number(0, 3);
    const int64_t rank = from.number(1, 5);
    for (int64_t j = 0; j < rank; ++j) map.sizes.push_back(from.number(0, INT64_MAX));
    for (int64_t j = 1; j < rank; ++j) map.strides_bytes.push_back(from.number(0, INT64_MAX));
    for (int64_t j = 0; j < rank; ++j) map.box.push_back(from.number(1, 256));
    launch.maps.push_back(std::move(map));
  }
  return launch;
}

c10::IValue read_value(Reader& from, int64_t kind, c10::Device device) {
  switch (kind) {
    case 0: return {};
    case 2: return from.number(INT64_MIN, INT64_MAX);
    case 3: return from.real();
    case 4: return from.number(0, 1) != 0;
    case 5: return std::string(from.text(kMost));
    case 6: {
      std::vector<int64_t> numbers(from.number(0, kMost));
      for (auto& number : numbers) number = from.number(INT64_MIN, INT64_MAX);
      return numbers;
    }
    case 8: return device;
    case 9: {  // in the place of a tensor
      const auto number = read_value(from, from.number(2, 4), device).toScalar();
      at::Tensor wrapped = at::scalar_to_tensor(number);
      wrapped.unsafeGetTensorImpl()->set_wrapped_number(true);
      return wrapped;
    }
    default: throw BadPlan("unknown kind of argument " + std::to_string(kind));
  }
}

// A single view among the arguments, or the only one of a list; else null.
const View* view_at(const Operator& step, size_t i) {
  if (const auto* view = std::get_if<View>(&step.arguments[i])) return view;
  const auto* views = std::get_if<std::vector<View>>(&step.arguments[i]);
  return views && views->size() == 1 ? &views->front() : nullptr;
}

bool is_none_at(const Operator& step, size_t i) {
  const auto* value = std::get_if<c10::IValue>(&step.arguments[i]);
  return value && value->isNone();
}

// Whether a list of integers is this one.
bool are_at(const Operator& step, size_t i, const std::vector<int64_t>& numbers) {
  const auto* value = std::get_if<c10::IValue>(&step.arguments[i]);
  if (value) return value->isIntList() && value->toIntVector() == numbers;
  const auto* views = std::get_if<std::vector<View>>(&step.arguments[i]);
  return views && views->empty() && numbers.empty();  // no elements tell what they are
}

bool is(const View& x, at::ScalarType dtype, std::vector<int64_t> sizes,
        std::vector<int64_t> strides) {
  bool fits = x.dtype == dtype && x.sizes == sizes && x.strides.size() == strides.size();
  for (size_t i = 0; fits && i < sizes.size(); ++i)
    fits = sizes[i] == 1 || x.strides[i] == strides[i];
  return fits;
}

bool is_single(const View& x) {
  return x.dtype == at::kFloat &&
         std::all_of(x.sizes.begin(), x.sizes.end(), [](int64_t size) { return size == 1; });
}

// The product of a `_scaled_mm` with out, or with `is_v2` of a `_scaled_mm_v2` by blocks; null where
// its form is another one.
std::unique_ptr<Product> product_of(Operator& step, bool is_v2, c10::Device device) {
  constexpr int64_t kBlock = 128;
  if (!Product::is_possible(device)) return nullptr;
  const size_t b_scale_at = is_v2 ? 5 : 3, bias_at = is_v2 ? 8 : 4, fast_at = is_v2 ? 11 : 7;
  step.operands = {view_at(step, 0), view_at(step, 1), view_at(step, 2), view_at(step, b_scale_at),
                   view_at(step, bias_at), view_at(step, is_v2 ? 12 : 8)};
  const auto [a, b, a_scale, b_scale, bias, out] = step.operands;
  const auto* fast = std::get_if<c10::IValue>(&step.arguments[fast_at]);
  const bool is_usual = is_v2 ? are_at(step, 3, {4}) && are_at(step, 4, {}) &&
                                    are_at(step, 6, {5}) && are_at(step, 7, {}) &&
                                    are_at(step, 10, {})
                              : is_none_at(step, 5);
  if (!a || !b || !a_scale || !b_scale || !out || !(bias || is_none_at(step, bias_at)) ||
      !is_usual || !fast || !fast->isBool() || a->sizes.size() != 2 || b->sizes.size() != 2)
    return nullptr;
  const int64_t m = a->sizes[0], k = a->sizes[1], n = b->sizes[1];
  const auto is_fp8 = [&](at::ScalarType dtype) {
    return dtype == at::kFloat8_e4m3fn || (!is_v2 && dtype == at::kFloat8_e5m2);
  };
  int64_t b_scale_rows = 1;
  auto scales = Product::kOfRows;
  if (is_v2) {
    scales = Product::kOfBlocks;
    b_scale_rows = b_scale->sizes.size() == 2 ? b_scale->sizes[0] : 0;
    if (k % kBlock || n % kBlock || b_scale_rows < k / kBlock ||
        !is(*a_scale, at::kFloat, {m, k / kBlock}, {1, m}) ||
        !is(*b_scale, at::kFloat, {b_scale_rows, n / kBlock}, {1, b_scale_rows}))
      return nullptr;
  } else if (is_single(*a_scale) && is_single(*b_scale)) {
    scales = Product::kOfTensors;
  } else if (!is(*a_scale, at::kFloat, {m, 1}, {1, 1}) ||
             !is(*b_scale, at::kFloat, {1, n}, {1, 1})) {
    return nullptr;
  }
  const auto half = out->dtype;
  const bool fits =
      (half == at::kBFloat16 || half == at::kHalf) && m > 0 && n > 0 && k > 0 &&
      b->sizes[0] == k && is_fp8(a->dtype) && is_fp8(b->dtype) &&
      a->strides[1] == 1 && a->strides[0] >= k && b->strides[0] == 1 && b->strides[1] >= k &&
      is(*out, half, {m, n}, {n, 1}) && (!bias || is(*bias, half, {n}, {1}));
  if (!fits) return nullptr;
  const Product::Form form{m, n, k, a->strides[0], b->strides[1], a->dtype, b->dtype, half,
                           scales, b_scale_rows, bias != nullptr, fast->toBool()};
  return std::make_unique<Product>(form, device);
}

Operator read_operator(Reader& from, const Buffers& buffers, c10::Device device, bool is_own) {
  Operator step;
  const std::string name(from.text(256)), overload(from.text(256));
  if (!is_own && std::find(kOperators.begin(), kOperators.end(), name) == kOperators.end())
    throw BadPlan("plans of files do not call " + name);
  step.handle = c10::Dispatcher::singleton().findSchema({name, overload});
  if (!step.handle) throw BadPlan("this torch has no operator " + name + "." + overload);
  const auto count = static_cast<int64_t>(step.handle->schema().arguments().size());
  from.number(count, count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t kind = from.number(0, 9);
    if (kind == 1) {
      View view = read_view(from, buffers);
      const auto* alias = step.handle->schema().arguments()[i].alias_info();
      const Buffer& buffer = buffers[view.buffer];
      if (alias && alias->isWrite() && buffer.kind == Buffer::kInput)
        step.written.push_back(buffer.index);
      step.arguments.emplace_back(std::move(view));
    } else if (kind == 7) {
      std::vector<View> views;
      const int64_t length = from.number(0, 64);
      for (int64_t j = 0; j < length; ++j) views.push_back(read_view(from, buffers));
      step.arguments.emplace_back(std::move(views));
    } else {
      step.arguments.emplace_back(read_value(from, kind, device));
    }
  }
  if (overload == "out" && name == "aten::mm" && count == 3) step.kind = Operator::kMm;
  if (overload == "out" && name == "aten::addmm" && count == 6) step.kind = Operator::kAddmm;
  if (overload == "out" && name == "aten::_scaled_mm" && count == 9) {
    step.kind = Operator::kScaledMm;
    step.product = product_of(step, false, device);
  }
  if (overload == "out" && name == "aten::_scaled_mm_v2" && count == 13)
    step.product = product_of(step, true, device);
  const int64_t results = from.number(0, 8);
  for (int64_t i = 0; i < results; ++i) {
    const int64_t place = from.number(-1, static_cast<int64_t>(buffers.size()) - 1);
    if (place >= 0 && buffers[place].kind != Buffer::kComputed)
      throw BadPlan("an operator returns memory of something else");
    step.results.push_back(place);
  }
  return step;
}

}  // namespace

struct Plan::State {
  const Inputs& inputs;
  c10::SmallVector<char*, 24> start;  // of buffers
  c10::SmallVector<at::Tensor, 24> tensors;  // of buffers other than inputs
  at::Tensor arena;
};

Plan::Plan(std::string_view text, c10::Device device, std::vector<at::Tensor> constants,
           const std::vector<void*>* functions)
    : device_(device), constants_(std::move(constants)) {
  Reader from(text);
  if (from.number(INT64_MIN, INT64_MAX) != 2) throw BadPlan("a plan of another version");
  input_count_ = from.number(0, 256);
  const int64_t buffers = from.number(0, 4096);
  for (int64_t i = 0; i < buffers; ++i) {
    Buffer buffer{};
    buffer.kind = static_cast<Buffer::Kind>(from.number(0, 5));
    switch (buffer.kind) {
      case Buffer::kInput: buffer.index = from.number(0, input_count_ - 1); break;
      case Buffer::kConstant:
        buffer.index = from.number(0, static_cast<int64_t>(constants_.size()) - 1);
        break;
      case Buffer::kOutput:
        buffer.bytes = from.number(0, INT64_MAX / 2);
        buffers_.push_back(buffer);
        buffers_.back().view = read_view(from, buffers_);
        if (buffers_.back().view.buffer != i) throw BadPlan("an output is a view of another");
        continue;
      case Buffer::kWorkspace:
        buffer.bytes = from.number(0, INT64_MAX / 2);
        buffer.index = arena_bytes_;
        if (buffer.bytes > INT64_MAX / 2 - arena_bytes_)
          throw BadPlan("a plan asks for too much memory");
        arena_bytes_ = round_up(arena_bytes_ + buffer.bytes, kAlignment);
        break;
      case Buffer::kScratch:
      case Buffer::kComputed: buffer.bytes = from.number(0, INT64_MAX / 2); break;
    }
    buffers_.push_back(std::move(buffer));
  }
  const int64_t steps = from.number(0, 4096);
  for (int64_t i = 0; i < steps; ++i) {
    switch (from.number(0, 2)) {
      case 0: steps_.emplace_back(read_launch(from, buffers_, functions)); break;
      case 1: {
        const Address address = read_address(from, buffers_);
        const int64_t room = size_of(buffers_[address.buffer]) - address.offset;
        const int64_t words = from.number(0, room / 4);
        const auto pattern = static_cast<uint32_t>(from.number(0, UINT32_MAX));
        const Buffer& filled = buffers_[address.buffer];
        const int64_t written = filled.kind == Buffer::kInput ? filled.index : -1;
        steps_.emplace_back(Fill{address, words, pattern, written});
        break;
      }
      default:
        steps_.emplace_back(read_operator(from, buffers_, device, !functions));
        calls_operators_ = true;
    }
  }
  const int64_t results = from.number(0, 64);
  for (int64_t i = 0; i < results; ++i) results_.push_back(read_view(from, buffers_));
  written_.resize(from.number(0, input_count_));
  for (auto& input : written_) input = from.number(0, input_count_ - 1);
  from.finish();
}

Plan::~Plan() = default;

at::Tensor Plan::tensor_of(const View& view, const State& state) const {
  const Buffer& buffer = buffers_[view.buffer];
  const at::Tensor& whole = buffer.kind == Buffer::kInput ? *state.inputs[buffer.index]
                            : buffer.kind == Buffer::kWorkspace ? state.arena
                                                                : state.tensors[view.buffer];
  if (buffer.kind != Buffer::kWorkspace && !view.offset && whole.scalar_type() == view.dtype &&
      whole.sizes() == at::IntArrayRef(view.sizes) &&
      whole.strides() == at::IntArrayRef(view.strides))
    return whole;
  return view_of(view, whole, state);
}

at::Tensor Plan::view_of(const View& view, const at::Tensor& whole, const State& state) const {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(whole.storage()), whole.key_set(),
      c10::scalarTypeToTypeMeta(view.dtype));
  const char* first = static_cast<const char*>(whole.storage().data());
  const int64_t skipped = state.start[view.buffer] + view.offset - first;
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(skipped / static_cast<int64_t>(c10::elementSize(view.dtype)));
  impl->set_sizes_and_strides(view.sizes, view.strides);
  if (!whole.is_inference())  // writes to one are writes to all
    impl->set_version_counter(whole.unsafeGetTensorImpl()->version_counter());
  return made;
}

void Plan::run(const Inputs& inputs, Results& results) const {
  if (static_cast<int64_t>(inputs.size()) != input_count_)
    throw LaunchFailure("a plan for " + std::to_string(input_count_) + " tensors was given " +
                        std::to_string(inputs.size()));
  const c10::DeviceGuard guard(device_);
  std::optional<c10::impl::ExcludeDispatchKeyGuard> below;
  if (calls_operators_)
    below.emplace(c10::autograd_dispatch_keyset_with_ADInplaceOrView |
                  c10::autocast_dispatch_keyset);
  void* const stream = device_.is_cuda() ? current_stream(device_.index()) : nullptr;
  if (!constants_.empty() && device_.is_cuda() && is_capturing(stream)) keep_constants();
  State state{inputs, {}, {}, {}};
  state.start.resize(buffers_.size());
  state.tensors.resize(buffers_.size());
  if (arena_bytes_) state.arena = allocate(arena_bytes_, at::kByte, device_);
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const Buffer& buffer = buffers_[i];
    switch (buffer.kind) {
      case Buffer::kInput: state.start[i] = start_of(*inputs[buffer.index]); continue;
      case Buffer::kWorkspace: state.start[i] = start_of(state.arena) + buffer.index; continue;
      case Buffer::kComputed: continue;
      case Buffer::kConstant: state.tensors[i] = constants_[buffer.index]; break;
      case Buffer::kScratch: state.tensors[i] = scratch(buffer.bytes, device_, stream); break;
      case Buffer::kOutput: {
        const View& view = buffer.view;
        const auto item = static_cast<int64_t>(c10::elementSize(view.dtype));
        at::Tensor made = allocate(buffer.bytes / item, view.dtype, device_);
        made.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes, view.strides);
        state.tensors[i] = std::move(made);
      }
    }
    state.start[i] = start_of(state.tensors[i]);
  }
  for (const auto& step : steps_) {
    if (const auto* launched = std::get_if<Launch>(&step)) {
      launch(*launched, state, stream);
    } else if (const auto* filled = std::get_if<Fill>(&step)) {
      if (filled->written >= 0) inputs[filled->written]->unsafeGetTensorImpl()->bump_version();
      fill(device_, state.start[filled->address.buffer] + filled->address.offset, filled->words,
           filled->pattern, stream);
    } else {
      call(std::get<Operator>(step), state, stream);
    }
  }
  for (const int64_t input : written_)
    if (!inputs[input]->is_inference()) inputs[input]->unsafeGetTensorImpl()->bump_version();
  for (const View& view : results_) {
    const Buffer& buffer = buffers_[view.buffer];
    // A function that returns a view of an argument, such as x.detach(), does not return x.
    results.push_back(buffer.kind == Buffer::kInput
                          ? view_of(view, *inputs[buffer.index], state)
                          : tensor_of(view, state));
  }
}

// A graph reads constants for as long as it lives, and nobody tells when it ends.
void Plan::keep_constants() const {
  std::call_once(are_constants_kept_, [this] { new std::vector<at::Tensor>(constants_); });
}

void Plan::launch(const Launch& step, const State& state, void* stream) const {
  const Driver& to = driver();
  alignas(64) uint8_t memory[kMostParameterBytes];
  void* parameters[256];
  std::memcpy(memory, step.values.data(), step.values.size());
  for (const auto& [place, address] : step.pointers) {
    char* value = state.start[address.buffer] + address.offset;
    std::memcpy(memory + place, &value, sizeof value);
  }
  for (const Map& map : step.maps) {
    char* const start = state.start[map.address.buffer] + map.address.offset;
    const std::lock_guard lock(maps_mutex_);
    std::memcpy(memory + map.place, encoded(map, start, to, device_.index()), Map::kBytes);
  }
  for (size_t i = 0; i < step.parameters.size(); ++i) parameters[i] = memory + step.parameters[i];
  LaunchConfig config;
  std::memcpy(config.shape, step.shape.data(), sizeof config.shape);
  config.stream = stream;
  config.attributes = step.attributes.data();
  config.count = static_cast<uint32_t>(step.attributes.size() / kAttributeBytes);
  const auto submit = [&] { return to.launch(&config, step.function, parameters, nullptr); };
  const int failed = in_context(device_.index(), submit);
  if (!failed) return;
  std::ostringstream words;
  words << "grid " << config.shape[0] << "x" << config.shape[1] << "x" << config.shape[2] << ", "
        << config.shape[3] << " threads, " << config.shape[6] << " bytes of shared memory: "
        << error_text(failed);
  throw LaunchFailure(words.str());
}

void Plan::call(const Operator& step, State& state, void* stream) const {
  // Below autograd nobody else tells it of writes.
  for (const int64_t input : step.written)
    state.inputs[input]->unsafeGetTensorImpl()->bump_version();
  if (step.product) {
    const auto start = [&](const View* view) -> char* {
      return view ? state.start[view->buffer] + view->offset : nullptr;
    };
    const auto [a, b, a_scale, b_scale, bias, out] = step.operands;
    const Operands operands{start(a),       start(b),    start(a_scale),
                            start(b_scale), start(bias), start(out)};
    if (step.product->multiply(operands, stream)) return;
  }
  torch::jit::Stack stack;
  stack.reserve(step.arguments.size());
  for (const auto& argument : step.arguments) {
    if (const auto* value = std::get_if<c10::IValue>(&argument)) {
      stack.push_back(*value);
    } else if (const auto* view = std::get_if<View>(&argument)) {
      stack.emplace_back(tensor_of(*view, state));
    } else {
      std::vector<at::Tensor> list;
      for (const auto& view : std::get<std::vector<View>>(argument))
        list.push_back(tensor_of(view, state));
      stack.emplace_back(std::move(list));
    }
  }
  const auto optional = [&](size_t i) {
    return stack[i].isNone() ? std::optional<at::Tensor>() : stack[i].toTensor();
  };
  switch (step.kind) {
    case Operator::kMm: {
      at::Tensor out = stack[2].toTensor();
      at::mm_out(out, stack[0].toTensor(), stack[1].toTensor());
      return;
    }
    case Operator::kAddmm: {
      at::Tensor out = stack[5].toTensor();
      at::addmm_out(out, stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(),
                    stack[3].toScalar(), stack[4].toScalar());
      return;
    }
    case Operator::kScaledMm: {
      at::Tensor out = stack[8].toTensor();
      at::_scaled_mm_out(out, stack[0].toTensor(), stack[1].toTensor(), stack[2].toTensor(),
                         stack[3].toTensor(), optional(4), optional(5),
                         stack[6].toOptional<at::ScalarType>(), stack[7].toBool());
      return;
    }
    case Operator::kOther: break;
  }
  step.handle->callBoxed(stack);
  for (size_t i = 0; i < step.results.size(); ++i) {
    if (step.results[i] < 0) continue;
    at::Tensor made = stack.at(i).toTensor();
    const auto bytes = static_cast<int64_t>(made.storage().nbytes());
    const int64_t expected = buffers_[step.results[i]].bytes;
    if (bytes != expected)  // such as under another default dtype
      throw LaunchFailure(c10::toString(step.handle->operator_name()) + " returned " +
                          std::to_string(bytes) + " bytes; it returned " +
                          std::to_string(expected) + " when this call was recorded");
    state.start[step.results[i]] = static_cast<char*>(made.storage().mutable_data());
    state.tensors[step.results[i]] = std::move(made);
  }
}

// --- signatures

bool is_plain_tensor(const at::Tensor& tensor) {
  using c10::DispatchKey;
  static const c10::DispatchKeySet usual =
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset |
      c10::DispatchKeySet(
          {DispatchKey::Dense, DispatchKey::CUDA, DispatchKey::CPU, DispatchKey::BackendSelect}) |
      c10::DispatchKeySet(c10::DispatchKeySet::RAW, ~uint64_t{0} >> (64 - c10::num_backends));
  return !(tensor.key_set().raw_repr() & ~usual.raw_repr()) && tensor.layout() == at::kStrided;
}

bool add_tensor(const at::Tensor& tensor, const Inputs& before, Words& words) {
  if (!is_plain_tensor(tensor) || tensor._fw_grad(0).defined()) return false;
  // Tensors without elements have no address that tells them apart; meta tensors have none at all.
  if (!tensor.numel() || !(tensor.is_cuda() || tensor.is_cpu())) return false;
  const auto* impl = tensor.unsafeGetTensorImpl();
  const auto address = reinterpret_cast<uint64_t>(impl->data());
  int64_t twin = 0;  // the first earlier tensor at the same address, from 1
  for (size_t i = 0; i < before.size() && !twin; ++i)
    if (before[i]->unsafeGetTensorImpl()->data() == impl->data())
      twin = static_cast<int64_t>(i) + 1;
  const int64_t rank = tensor.dim();
  words.push_back(static_cast<int64_t>(tensor.scalar_type()) | rank << 8 |
                  static_cast<int64_t>(address & 15) << 16 | twin << 24);
  words.append(tensor.sizes().begin(), tensor.sizes().end());
  words.append(tensor.strides().begin(), tensor.strides().end());
  return true;
}

bool has_no_modes() {
  using c10::DispatchKey;
  const c10::DispatchKeySet usual({DispatchKey::BackendSelect, DispatchKey::ADInplaceOrView});
  return !(c10::impl::tls_local_dispatch_key_set().included_.raw_repr() & ~usual.raw_repr());
}

bool is_plain_state() {
  using c10::DispatchKey;
  if (!has_no_modes()) return false;
  // Autocast of a device takes its key out of those that are excluded.
  constexpr auto autocast = c10::DispatchKeySet({DispatchKey::AutocastCUDA, DispatchKey::AutocastCPU});
  return c10::impl::tls_local_dispatch_key_set().excluded_.has_all(autocast);
}

// --- the book

namespace {

struct HashOfWords {
  size_t operator()(const Words& words) const {
    uint64_t mixed = words.size();
    for (const int64_t word : words) {
      mixed = (mixed ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u;
      mixed ^= mixed >> 29;
    }
    return mixed;
  }
};

constexpr size_t kMostEntries = 16384;

}  // namespace

struct Book::Impl {
  std::shared_mutex mutex;
  std::atomic<uint64_t> clock = 0;  // counts new signatures
  std::unordered_map<Words, std::shared_ptr<Entry>, HashOfWords> entries;
};

Book::Impl& Book::impl() {
  static auto* const made = new Impl;  // never destroyed: torch may be gone before
  return *made;
}

std::shared_ptr<Entry> Book::find(const Words& words) {
  Impl& own = impl();
  {
    const std::shared_lock lock(own.mutex);
    const auto found = own.entries.find(words);
    if (found != own.entries.end()) {
      found->second->used.store(own.clock.load(std::memory_order_relaxed),
                                std::memory_order_relaxed);
      return found->second;
    }
  }
  std::vector<std::shared_ptr<Entry>> gone;  // after the lock: a tensor may wait for Python's lock
  const std::unique_lock lock(own.mutex);
  const uint64_t now = ++own.clock;
  if (own.entries.size() >= kMostEntries) {  // the half goes that was not used for longest
    std::vector<uint64_t> used;
    for (const auto& [_, entry] : own.entries)
      if (!entry->is_loaded) used.push_back(entry->used);
    const auto middle = used.begin() + static_cast<int64_t>(used.size() / 2);
    if (!used.empty()) std::nth_element(used.begin(), middle, used.end());
    std::erase_if(own.entries, [&](const auto& item) {
      const bool is_old = !item.second->is_loaded && item.second->used <= *middle;
      if (is_old) gone.push_back(item.second);
      return is_old;
    });
  }
  auto& entry = own.entries[words];
  if (!entry) entry = std::make_shared<Entry>();
  entry->used = now;
  return entry;
}

void Book::install(const Words& words, std::shared_ptr<Entry> entry) {
  Impl& own = impl();
  const std::unique_lock lock(own.mutex);
  entry->used = own.clock.load();
  own.entries[words].swap(entry);  // the older one goes after the lock
}

void Book::clear() {
  Impl& own = impl();
  decltype(own.entries) gone;
  const std::unique_lock lock(own.mutex);
  own.entries.swap(gone);
}

size_t Book::size() {
  Impl& own = impl();
  const std::shared_lock lock(own.mutex);
  return own.entries.size();
}

Book& book() {
  static Book made;
  return made;
}

}  // namespace lokakern
