// Launches of a library, captured once and made again with other addresses, without the library.
//
// A call of cuBLASLt costs the host 7 us more than the launches that it makes: it checks its
// arguments, encodes tensor maps and packs parameters, of which only the addresses differ from call
// to call. So its launches are captured for three sets of addresses. Where each 8 bytes of the
// parameters are either equal in all three, or an address of the same operand with the same offset,
// the launches can be made for any addresses.
#pragma once

#include <cstdint>
#include <functional>
#include <vector>

namespace lokakern {

// 8 bytes of parameters that hold an address of an operand.
struct AddressWord {
  uint32_t place;  // first byte
  uint32_t operand;
  uint64_t offset;  // bytes into the operand
};

// The words that are addresses, of parameters that were captured for three sets of them.
//
// `bytes` are the sizes of the operands; `addresses` has as many addresses for each capture. Raises
// LaunchFailure where parameters differ by anything but addresses, or an address belongs to no
// operand.
std::vector<AddressWord> address_words(const std::vector<std::vector<uint8_t>>& parameters,
                                       const std::vector<std::vector<uint64_t>>& addresses,
                                       const std::vector<uint64_t>& bytes);

class CapturedLaunches {
 public:
  using Make = std::function<void(const std::vector<uint64_t>& addresses, void* stream)>;
  // Addresses that are multiples of it, as are those of the captures; cuBLAS asks for no more.
  static constexpr uint64_t kAlignment = 256;

  // Captures what `make` launches on a stream of the current device, for operands of these sizes.
  // Nothing runs: the addresses are invented. Raises LaunchFailure where the launches cannot be
  // made again: anything but fills with zeros, and kernels with one buffer of parameters, one after
  // the other; cooperative launches; or parameters as in `address_words`. Of attributes those of
  // clusters are kept.
  CapturedLaunches(const std::vector<uint64_t>& bytes, const Make& make);

  // Whether any launch reads or writes an operand.
  bool uses(uint32_t operand) const;

  // Makes the launches. Raises LaunchFailure.
  void launch(const std::vector<uint64_t>& addresses, int device, void* stream) const;

 private:
  struct Launch {
    void* function;               // null: a fill of 4-byte words with zeros
    uint32_t shape[7];            // grid, block, dynamic shared bytes
    uint32_t cluster[3], policy;  // of scheduling clusters
    uint64_t words;               // of a fill
    std::vector<uint8_t> parameters;  // of a fill its address
    std::vector<AddressWord> addresses;
  };
  static std::vector<Launch> captured(const std::vector<uint64_t>& addresses, const Make& make);
  static Launch read_node(void* node);
  static Launch read_kernel(void* node);
  static Launch read_fill(void* node);

  std::vector<Launch> launches_;
};

}  // namespace lokakern
