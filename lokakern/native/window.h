// What a watch takes of operands in a sampled step, and the numbers of a window, without Python.
//
// `lokakern.probe.hooks` and `lokakern.probe.windows` do the same by torch and NumPy, with the same
// bits: a sampled step would wait for the interpreter at each of some 80 launches, and the training
// for the thread of the watch at each of some 40 calls. Where there is its kernel
// (`kernels/cuda/window_samples.cu`), a pass takes two launches instead of 27 for nine layers.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lokakern {

// The largest magnitudes of the rows and of the columns of a matrix, and some of its rows.
using OperandSample = std::array<at::Tensor, 3>;
// Every so many-th row from one on.
using Part = std::pair<int64_t, int64_t>;

// Takes the samples of operands ``[..., columns]``, which are contiguous: the rows of an index, and
// magnitudes of a part of all rows.
std::vector<OperandSample> take_samples(const std::vector<at::Tensor>& operands,
                                        const std::vector<at::Tensor>& indices,
                                        const std::vector<Part>& parts);

// The largest magnitudes of the rows and of the columns of matrices.
std::vector<std::pair<at::Tensor, at::Tensor>> sizes_of(const std::vector<at::Tensor>& matrices);

// Which rows are read of a matrix, and which are kept: the first and steps to the next of both, and
// how many are kept, 0 for none.
using Places = std::array<int64_t, 5>;
// The sizes for which the kernel was compiled: rows and columns of a tile, the most rows that are
// kept, and the most matrices of a launch.
using KernelSizes = std::array<int64_t, 4>;

// What one launch took of some matrices, of one device, in one piece of memory.
class WindowPass {
 public:
  struct Taken {
    at::ScalarType dtype;
    int64_t columns, read_rows, kept_rows, element_step;
    // Where they begin among `values`, and the rows among the bytes of the memory.
    int64_t row_sizes, column_sizes, elements, deviations, means, kept;
    int64_t element_count() const {
      return (kept_rows * columns + element_step - 1) / element_step;
    }
  };

  // Null where the kernel takes no such matrices, is not loaded, or fails: torch takes them then. Of
  // what is kept so many elements are picked as `WindowNumbers` picks of a single call.
  static std::shared_ptr<WindowPass> take(const std::vector<at::Tensor>& matrices,
                                          const std::vector<Places>& places, int64_t elements);

  const Taken& at(size_t place) const { return taken_.at(place); }
  // As of `take_samples`, but that sizes are in float32.
  OperandSample tensors(size_t place) const;
  // All but the rows: float32, on the device.
  at::Tensor values() const;
  int64_t picked_of() const { return elements_; }

 private:
  std::vector<Taken> taken_;
  at::Tensor memory_;
  int64_t value_count_ = 0, elements_ = 0;
};

// Loads the kernel for a device, for good. Raises LaunchFailure.
void load_window_kernel(int device, std::string_view cubin, const KernelSizes& sizes);
// For tests without a GPU, with the driver's functions replaced: of the CPU, -1; 0 removes it.
void use_window_kernel(int device, uint64_t function, const KernelSizes& sizes);
// Why a launch failed on a device, after which there was no other; empty if none did.
std::string window_kernel_failure(int device);

// L2 norms of the rows of a matrix.
at::Tensor norms_of_rows(const at::Tensor& matrix);

// Numbers as tensors on the CPU.
std::vector<at::Tensor> as_tensors(const std::vector<int64_t>& numbers);

// Constants of `lokakern.probe.windows`.
struct WindowLimits {
  int64_t elements, most_elements;
  double fewest_below, least_share, least_size, least_variance;
};

// The sizes and rows of a window, on their way to the host, and the numbers of them.
class WindowNumbers {
 public:
  // What a pass took of an operand, or null, and its place there.
  using InPass = std::pair<std::shared_ptr<WindowPass>, int64_t>;

  // Of each operand the samples of its calls, or its only call's pass; of each weight the sizes of
  // its rows and columns; all on one device. Nothing waits for it.
  WindowNumbers(const std::vector<std::vector<at::Tensor>>& operands,
                const std::vector<InPass>& in_passes,
                const std::vector<std::vector<at::Tensor>>& weights, const WindowLimits& limits);

  // Waits for an event of CUDA behind the window, if one is given: in octaves, the spread of rows of
  // operands, of rows of weights, of columns of both, and of elements of operands; and of operands
  // the shares of rows that are not finite, the means over deviations, in octaves, and, no numbers of
  // the window, the shares once more and how many rows were sampled.
  std::vector<double> compute(uint64_t event) const;

 private:
  struct Piece {
    int64_t first, count;  // in `values_`
  };
  using Pieces = std::vector<Piece>;
  struct Operand {
    Pieces rows, columns, elements, deviations, means;
    int64_t sampled_rows = 0;
  };
  class Magnitudes;

  WindowLimits limits_;
  c10::DeviceIndex device_ = -1;
  std::vector<Operand> operands_, weights_;
  at::Tensor values_;  // float32 on the CPU, pinned where the device is none
};

}  // namespace lokakern
