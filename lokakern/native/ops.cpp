// The ops of torch.ops.lokakern on GPUs: replay the plan of a call, or let Python make the call.
//
// For each op NAME with a plan, Python registers NAME_cold with the same arguments, which makes the
// call as without this library and records it. A program without Python has only the plans of
// files (`load_plans`).
#include <torch/library.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "driver.h"
#include "ops.h"
#include "reader.h"

namespace lokakern {

thread_local const Words* recorded = nullptr;

void add_text(std::string_view text, Words& words) {
  words.push_back(static_cast<int64_t>(text.size()));
  for (size_t i = 0; i < text.size(); i += sizeof(int64_t)) {
    int64_t word = 0;
    std::memcpy(&word, text.data() + i, std::min(sizeof word, text.size() - i));
    words.push_back(word);
  }
}

namespace {

bool add_value(const c10::IValue& value, Words& words, Inputs& inputs) {
  if (value.isNone() || (value.isTensor() && !value.toTensor().defined())) {
    words.push_back(0);
  } else if (value.isTensor()) {
    words.push_back(1);
    const at::Tensor& tensor = value.toTensor();
    if (!add_tensor(tensor, inputs, words)) return false;
    inputs.push_back(&tensor);
  } else if (value.isInt()) {
    words.append({2, value.toInt()});
  } else if (value.isDouble()) {
    int64_t bits = 0;
    const double number = value.toDouble();
    std::memcpy(&bits, &number, sizeof bits);
    words.append({3, bits});
  } else if (value.isBool()) {
    words.append({4, value.toBool()});
  } else if (value.isString()) {
    words.push_back(5);
    add_text(value.toStringRef(), words);
  } else if (value.isList() || value.isDoubleList() || value.isIntList()) {
    const auto list = value.toListRef();
    words.append({6, static_cast<int64_t>(list.size())});
    for (const auto& item : list)  // tensors are those of the list, which the stack keeps
      if (!add_value(item, words, inputs)) return false;
  } else {
    return false;
  }
  return true;
}

std::string described(const std::string& name, const Inputs& inputs) {
  std::ostringstream words;
  words << name << "(";
  for (const auto* x : inputs) words << x->scalar_type() << x->sizes() << ", ";
  words << "...)";
  return words.str();
}

void call_cold(const c10::OperatorHandle& op, const Inputs& inputs, torch::jit::Stack* stack) {
  const auto& name = op.operator_name();
  const auto cold = c10::Dispatcher::singleton().findSchema({name.name + "_cold", ""});
  TORCH_CHECK(cold.has_value(), described(name.name, inputs),
              " has no plan in what lokakern_load_plans loaded; save the model's plans at these shapes");
  cold->callBoxed(stack);
}

// The op call that is to be recorded, of those under way in this thread, while this lives.
class ToRecord {
 public:
  explicit ToRecord(const Words* words) { recorded = words; }
  ~ToRecord() { recorded = outer_; }
  ToRecord(const ToRecord&) = delete;

 private:
  const Words* outer_ = recorded;
};

}  // namespace

void (*raise_in_python)(const LaunchFailure&) = nullptr;

void replay_op(const c10::OperatorHandle& op, torch::jit::Stack& given) {
  torch::jit::Stack* const stack = &given;
  Words words;
  Inputs inputs;
  const auto arguments = torch::jit::last(*stack, op.schema().arguments().size());
  words.push_back(0);  // where the device goes
  add_text(op.operator_name().name, words);
  bool is_known = true;
  for (const auto& value : arguments) is_known = is_known && add_value(value, words, inputs);
  is_known = is_known && !inputs.empty();
  if (is_known) {
    const auto device = inputs[0]->device();
    for (const auto* x : inputs) is_known = is_known && x->device() == device;
    words[0] = device.index();
  }
  if (!is_known) {
    const ToRecord now(nullptr);  // an op that calls this one may be recorded
    return call_cold(op, inputs, stack);
  }
  const auto entry = book().find(words);
  if (entry->plan) {
    Results results;
    try {
      entry->plan->run(inputs, results);
    } catch (const LaunchFailure& failure) {
      if (raise_in_python) raise_in_python(failure);
      throw;
    }
    torch::jit::drop(*stack, arguments.size());
    for (auto& made : results) stack->emplace_back(std::move(made));
    return;
  }
  // The first call compiles and chooses; the second is as all later ones are.
  const bool is_recorded = entry->is_recordable && ++entry->calls > 1;
  const ToRecord now(is_recorded ? &words : nullptr);
  call_cold(op, inputs, stack);
}

namespace {

void call(const c10::OperatorHandle& op, c10::DispatchKeySet, torch::jit::Stack* stack) {
  replay_op(op, *stack);
}

}  // namespace

std::string text_of(const Words& words) {
  return {reinterpret_cast<const char*>(words.data()), words.size() * sizeof(int64_t)};
}

Words words_of(std::string_view text) {
  Words words;
  words.resize(text.size() / sizeof(int64_t));
  std::memcpy(words.data(), text.data(), words.size() * sizeof(int64_t));
  return words;
}

namespace {

constexpr int64_t kMostBytes = int64_t{1} << 31;
constexpr int64_t kMostPlans = 8192;  // half of the book

std::string contents(const std::string& path) {
  std::error_code failed;
  const auto size = std::filesystem::file_size(path, failed);  // fails unless it is a plain file
  if (failed) throw BadPlan("cannot read " + path + ": " + failed.message());
  if (size > kMostBytes) throw BadPlan(path + " is larger than a file of plans");
  std::string text(size, '\0');
  std::ifstream file(path, std::ios::binary);
  if (!file.read(text.data(), static_cast<std::streamsize>(size)))
    throw BadPlan("cannot read " + path);
  return text;
}

// The driver takes code without its size: what its headers name must lie inside of it.
void check_cubin(const std::string& cubin, const std::string& entry) {
  const auto field = [&](size_t at, auto value) -> uint64_t {
    std::memcpy(&value, cubin.data() + at, sizeof value);
    return value;
  };
  constexpr size_t kHeader = 64, kProgram = 56, kSection = 64;  // ELF, 64 bits
  bool fits = cubin.size() >= kHeader && !cubin.compare(0, 5, "\x7f" "ELF\x02");
  const auto inside = [&](uint64_t first, uint64_t size) {
    return first <= cubin.size() && size <= cubin.size() - first;
  };
  if (fits) {
    const uint64_t programs = field(32, uint64_t{}), sections = field(40, uint64_t{});
    const uint64_t program_count = field(56, uint16_t{}), section_count = field(60, uint16_t{});
    fits = inside(programs, program_count * kProgram) &&
           inside(sections, section_count * kSection) &&
           (!program_count || field(54, uint16_t{}) == kProgram) &&
           (!section_count || field(58, uint16_t{}) == kSection);
    for (uint64_t i = 0; fits && i < section_count; ++i) {
      constexpr uint32_t kNoBits = 8;  // such as of shared memory: takes no bytes of the file
      const size_t at = sections + i * kSection;
      fits = field(at + 4, uint32_t{}) == kNoBits ||
             inside(field(at + 24, uint64_t{}), field(at + 32, uint64_t{}));
    }
  }
  if (!fits) throw BadPlan("the code of " + entry + " is damaged");
}

Words read_signature(Reader& from, int device) {
  const auto text = from.text(1 << 16);
  Words words = words_of(text);
  // An op's name follows the device; in signatures of Python's functions it is an address.
  if (text.size() % sizeof(int64_t) || words.size() < 3 || words[1] < 1 || words[1] > 256)
    throw BadPlan("a signature of a plan is damaged");
  words[0] = device;
  return words;
}

}  // namespace

int64_t load_plans(const std::string& path, int device) {
  const std::string text = contents(path);
  Reader from(text);
  if (from.text(64) != "lokakern plans 2")
    throw BadPlan(path + " is not a file of lokakern's plans, or of another version");
  const std::string product(from.text(256)), found = device_name(device);
  if (product != found)
    throw LaunchFailure(path + " holds kernels chosen and compiled for " + product +
                        "; this GPU is " + found + ": save the model's plans there");
  // Nothing of a damaged file is loaded.
  struct Kernel {
    std::string entry, cubin;  // copied: aligned
    int64_t shared_bytes, cluster;
  };
  std::vector<Kernel> kernels(from.number(0, 1 << 12));
  for (auto& kernel : kernels) {
    kernel.entry = from.text(256);
    kernel.shared_bytes = from.number(0, 1 << 20);
    kernel.cluster = from.number(1, 64);
    kernel.cubin = from.text(kMostBytes);
    check_cubin(kernel.cubin, kernel.entry);
  }
  std::vector<std::pair<Words, std::string_view>> plans(from.number(0, kMostPlans));
  for (auto& [words, plan] : plans) {
    words = read_signature(from, device);
    plan = from.text(1 << 24);
  }
  from.finish();
  const c10::Device where(c10::kCUDA, static_cast<c10::DeviceIndex>(device));
  std::vector<void*> functions(kernels.size());
  const auto make = [&](std::string_view plan) {
    return std::make_shared<const Plan>(plan, where, std::vector<at::Tensor>{}, &functions);
  };
  for (const auto& [words, plan] : plans) make(plan);
  const PrimaryContext current(device);
  for (size_t i = 0; i < kernels.size(); ++i)
    functions[i] = load_kernel(kernels[i].cubin, kernels[i].entry, kernels[i].shared_bytes,
                               kernels[i].cluster, device);
  for (const auto& [words, plan] : plans) {
    auto entry = std::make_shared<Entry>();
    entry->plan = make(plan);
    entry->is_loaded = true;
    book().install(words, std::move(entry));
  }
  return static_cast<int64_t>(plans.size());
}

}  // namespace lokakern

TORCH_LIBRARY_IMPL(lokakern, CUDA, library) {
  for (const char* name : lokakern::kOps)
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&lokakern::call>());
}

// Without Python nobody has defined the ops.
extern "C" __attribute__((visibility("default"))) void lokakern_define_ops() {
  static torch::Library* const library =
      new torch::Library(torch::Library::FRAGMENT, "lokakern", std::nullopt, __FILE__, __LINE__);
  for (const char* schema : lokakern::kSchemas) library->def(schema);
}

// Defines the ops and installs the plans of a file. Returns null, or the reason against it.
extern "C" __attribute__((visibility("default"))) const char* lokakern_load_plans(const char* path,
                                                                                 int device) {
  static thread_local std::string reason;
  try {
    static std::once_flag once;
    std::call_once(once, lokakern_define_ops);
    lokakern::load_plans(path, device);
    return nullptr;
  } catch (const std::exception& error) {
    reason = error.what();
    return reason.c_str();
  }
}
