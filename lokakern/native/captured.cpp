#include "captured.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>
#include <string>

#include "driver.h"

namespace lokakern {
namespace {

// From cuda.h.
constexpr int kRelaxed = 2, kNonBlocking = 1;          // CUstreamCaptureMode, CUstream_flags
constexpr int kKernelNode = 0, kMemsetNode = 2;        // CUgraphNodeType
constexpr int kCooperative = 2, kClusterDimension = 4, kClusterPolicy = 5;  // CUlaunchAttributeID
constexpr size_t kValueBytes = 64;                     // of CUlaunchAttributeValue
void* const kBufferPointer = reinterpret_cast<void*>(1);  // CU_LAUNCH_PARAM_BUFFER_POINTER
void* const kBufferSize = reinterpret_cast<void*>(2);

struct KernelNode {  // CUDA_KERNEL_NODE_PARAMS_v2
  void* function;
  uint32_t shape[7];
  void** parameters;
  void** extra;
  void* kernel;
  void* context;
};

struct MemsetNode {  // CUDA_MEMSET_NODE_PARAMS
  uint64_t address;
  size_t pitch;
  uint32_t value, element_bytes;
  size_t width, height;
};

struct Attribute {  // CUlaunchAttribute
  uint32_t id, unused;
  uint32_t value[kValueBytes / 4];
};

void check(int failed, const char* doing) {
  if (failed) throw LaunchFailure(std::string(doing) + ": " + error_text(failed));
}

// Invented addresses of operands: multiples of 2^34, in the third capture of kAlignment only.
std::vector<uint64_t> invented(size_t count, uint64_t capture) {
  std::vector<uint64_t> made(count);
  for (uint64_t i = 0; i < count; ++i)
    made[i] = (uint64_t{1} << 44) + (i << 40) + capture * ((i + 1) << 34) +
              (capture == 2 ? CapturedLaunches::kAlignment * (2 * i + 1) : 0);
  return made;
}

std::vector<void*> nodes_in_order(void* graph) {
  size_t count = 0;
  check(call_driver("cuGraphGetNodes", graph, static_cast<void**>(nullptr), &count),
        "cuGraphGetNodes");
  std::vector<void*> found(count), ordered;
  check(call_driver("cuGraphGetNodes", graph, found.data(), &count), "cuGraphGetNodes");
  while (ordered.size() < count) {
    const auto next = std::find_if(found.begin(), found.end(), [&](void* node) {
      void* before = nullptr;
      size_t before_count = 0;
      check(call_driver("cuGraphNodeGetDependencies", node, static_cast<void**>(nullptr),
                        &before_count),
            "cuGraphNodeGetDependencies");
      if (before_count != !ordered.empty()) return false;
      if (!before_count) return true;
      check(call_driver("cuGraphNodeGetDependencies", node, &before, &before_count),
            "cuGraphNodeGetDependencies");
      return before == ordered.back();
    });
    if (next == found.end()) throw LaunchFailure("its launches are not one after the other");
    ordered.push_back(*next);
  }
  return ordered;
}

void read_attribute(void* node, int id, uint32_t* value, size_t count) {
  uint32_t found[kValueBytes / 4] = {};
  check(call_driver("cuGraphKernelNodeGetAttribute", node, id, static_cast<void*>(found)),
        "cuGraphKernelNodeGetAttribute");
  std::copy_n(found, count, value);
}

}  // namespace

std::vector<AddressWord> address_words(const std::vector<std::vector<uint8_t>>& parameters,
                                       const std::vector<std::vector<uint64_t>>& addresses,
                                       const std::vector<uint64_t>& bytes) {
  const size_t size = parameters.at(0).size();
  for (const auto& others : parameters)
    if (others.size() != size) throw LaunchFailure("its parameters have no fixed size");
  const auto word = [&](size_t capture, size_t place) {
    uint64_t value = 0;
    std::memcpy(&value, parameters[capture].data() + place, std::min<size_t>(8, size - place));
    return value;
  };
  std::vector<AddressWord> found;
  for (size_t place = 0; place < size; place += 8) {
    const uint64_t first = word(0, place);
    const auto is_equal = [&](size_t capture) { return word(capture, place) == first; };
    if (is_equal(1) && is_equal(2)) continue;
    const size_t before = found.size();
    for (uint32_t i = 0; i < bytes.size() && place + 8 <= size; ++i) {
      const uint64_t offset = first - addresses[0][i];
      const auto is_its = [&](size_t capture) {
        return word(capture, place) - addresses[capture][i] == offset;
      };
      if (offset < bytes[i] && is_its(1) && is_its(2))
        found.push_back({static_cast<uint32_t>(place), i, offset});
    }
    if (found.size() != before + 1)
      throw LaunchFailure("its parameters differ by more than addresses, at byte " +
                          std::to_string(place));
  }
  return found;
}

CapturedLaunches::CapturedLaunches(const std::vector<uint64_t>& bytes, const Make& make) {
  std::vector<std::vector<uint64_t>> addresses;
  std::vector<std::vector<Launch>> captures;
  for (uint64_t capture = 0; capture < 3; ++capture) {
    addresses.push_back(invented(bytes.size(), capture));
    captures.push_back(captured(addresses.back(), make));
    if (captures.back().size() != captures[0].size())
      throw LaunchFailure("it makes other launches for other addresses");
  }
  for (size_t i = 0; i < captures[0].size(); ++i) {
    Launch& launch = captures[0][i];
    std::vector<std::vector<uint8_t>> parameters;
    for (const auto& capture : captures) {
      const Launch& other = capture[i];
      const bool is_same = other.function == launch.function && other.words == launch.words &&
                           std::equal(other.shape, other.shape + 7, launch.shape) &&
                           std::equal(other.cluster, other.cluster + 3, launch.cluster) &&
                           other.policy == launch.policy;
      if (!is_same) throw LaunchFailure("it makes other launches for other addresses");
      parameters.push_back(other.parameters);
    }
    launch.addresses = address_words(parameters, addresses, bytes);
  }
  launches_ = std::move(captures[0]);
}

std::vector<CapturedLaunches::Launch> CapturedLaunches::captured(
    const std::vector<uint64_t>& addresses, const Make& make) {
  const auto destroy = [](const char* name) {
    return [name](void* owned) { call_driver(name, owned); };
  };
  void* made = nullptr;
  check(call_driver("cuStreamCreate", &made, kNonBlocking), "cuStreamCreate");
  const std::unique_ptr<void, std::function<void(void*)>> stream(made,
                                                                 destroy("cuStreamDestroy_v2"));
  check(call_driver("cuStreamBeginCapture_v2", stream.get(), kRelaxed), "cuStreamBeginCapture");
  std::exception_ptr raised;
  try {
    make(addresses, stream.get());
  } catch (...) {
    raised = std::current_exception();
  }
  void* found = nullptr;
  const int failed = call_driver("cuStreamEndCapture", stream.get(), &found);
  const std::unique_ptr<void, std::function<void(void*)>> graph(found, destroy("cuGraphDestroy"));
  if (raised) std::rethrow_exception(raised);
  check(failed, "cuStreamEndCapture");
  std::vector<Launch> launches;
  for (void* node : nodes_in_order(graph.get())) launches.push_back(read_node(node));
  return launches;
}

CapturedLaunches::Launch CapturedLaunches::read_node(void* node) {
  int kind = -1;
  check(call_driver("cuGraphNodeGetType", node, &kind), "cuGraphNodeGetType");
  if (kind == kKernelNode) return read_kernel(node);
  if (kind == kMemsetNode) return read_fill(node);
  throw LaunchFailure("it makes launches of kind " + std::to_string(kind));
}

CapturedLaunches::Launch CapturedLaunches::read_kernel(void* node) {
  KernelNode found{};
  check(call_driver("cuGraphKernelNodeGetParams_v2", node, &found), "cuGraphKernelNodeGetParams");
  if (!found.function || !found.extra)
    throw LaunchFailure("a captured kernel has no function, or no buffer of parameters");
  Launch launch{};
  launch.function = found.function;
  std::copy_n(found.shape, 7, launch.shape);
  uint32_t cooperative = 0;
  read_attribute(node, kCooperative, &cooperative, 1);
  if (cooperative) throw LaunchFailure("it makes a cooperative launch");
  read_attribute(node, kClusterDimension, launch.cluster, 3);
  read_attribute(node, kClusterPolicy, &launch.policy, 1);
  const uint8_t* buffer = nullptr;
  size_t size = 0;
  for (void** entry = found.extra; *entry; entry += 2) {
    if (*entry == kBufferPointer) buffer = static_cast<const uint8_t*>(entry[1]);
    if (*entry == kBufferSize) size = *static_cast<size_t*>(entry[1]);
  }
  if (!buffer || !size || size > size_t{kMostParameterBytes})
    throw LaunchFailure("a captured kernel has " + std::to_string(size) + " bytes of parameters");
  launch.parameters.assign(buffer, buffer + size);
  return launch;
}

CapturedLaunches::Launch CapturedLaunches::read_fill(void* node) {
  MemsetNode found{};
  check(call_driver("cuGraphMemsetNodeGetParams", node, &found), "cuGraphMemsetNodeGetParams");
  const size_t bytes = found.width * found.element_bytes;
  if (found.value || found.height != 1 || bytes % 4 || found.address % 4)
    throw LaunchFailure("it fills memory with anything other than words of zeros");
  Launch launch{};
  launch.words = bytes / 4;
  launch.parameters.resize(sizeof found.address);
  std::memcpy(launch.parameters.data(), &found.address, sizeof found.address);
  return launch;
}

bool CapturedLaunches::uses(uint32_t operand) const {
  for (const Launch& launch : launches_)
    for (const AddressWord& word : launch.addresses)
      if (word.operand == operand) return true;
  return false;
}

void CapturedLaunches::launch(const std::vector<uint64_t>& addresses, int device,
                              void* stream) const {
  const Driver& to = driver();
  alignas(64) uint8_t memory[kMostParameterBytes];
  for (const Launch& launch : launches_) {
    size_t size = launch.parameters.size();
    std::memcpy(memory, launch.parameters.data(), size);
    for (const AddressWord& word : launch.addresses) {
      const uint64_t address = addresses[word.operand] + word.offset;
      std::memcpy(memory + word.place, &address, sizeof address);
    }
    if (!launch.function) {
      uint64_t address = 0;
      std::memcpy(&address, memory, sizeof address);
      check(in_context(device, [&] { return to.fill(address, 0, launch.words, stream); }),
            "filling a workspace");
      continue;
    }
    Attribute attributes[2] = {};
    struct {  // CUlaunchConfig
      uint32_t shape[7];
      void* stream;
      const void* attributes;
      uint32_t count;
    } config{};
    std::copy_n(launch.shape, 7, config.shape);
    config.stream = stream;
    config.attributes = attributes;
    if (launch.cluster[0]) {
      attributes[0].id = kClusterDimension;
      std::copy_n(launch.cluster, 3, attributes[0].value);
      attributes[1].id = kClusterPolicy;
      attributes[1].value[0] = launch.policy;
      config.count = launch.policy ? 2 : 1;
    }
    void* extra[] = {kBufferPointer, memory, kBufferSize, &size, nullptr};
    check(in_context(device,
                     [&] { return to.launch(&config, launch.function, nullptr, extra); }),
          "launching a kernel of a library");
  }
}

}  // namespace lokakern
