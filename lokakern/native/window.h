// What a watch takes of operands in a sampled step, and the numbers of a window, without Python.
//
// `lokakern.probe.hooks` and `lokakern.probe.windows` do the same by torch and NumPy, with the same
// bits: a sampled step would wait for the interpreter at each of some 80 launches, and the training
// for the thread of the watch at each of some 40 calls.
#pragma once

#include <ATen/core/Tensor.h>

#include <array>
#include <cstdint>
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
  // Of each operand the samples of its calls, of each weight the sizes of its rows and columns; all
  // on one device. Nothing waits for it.
  WindowNumbers(const std::vector<std::vector<at::Tensor>>& operands,
                const std::vector<std::vector<at::Tensor>>& weights, const WindowLimits& limits);

  // Must run when the device is done: in octaves, the spread of rows of operands, of rows of weights,
  // of columns of both, and of elements of operands; and of operands the shares of rows that are not
  // finite, the means over deviations, in octaves, and, no numbers of the window, the shares once
  // more and how many rows were sampled.
  std::vector<double> compute() const;

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
  std::vector<Operand> operands_, weights_;
  at::Tensor values_;  // float32 on the CPU, pinned where the device is none
};

}  // namespace lokakern
