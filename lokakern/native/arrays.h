// CuPy's arrays as operands and results of plans: what `lokakern.arrays` does, without Python.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/utils/pybind.h>

#include <list>
#include <optional>
#include <utility>
#include <vector>

namespace lokakern {

// What `bind_arrays` was given last. Its references are kept for good.
struct ArrayLibrary {
  PyTypeObject* array = nullptr;      // arrays are exactly of this class; null before `bind_arrays`
  PyTypeObject* quantized = nullptr;  // lokakern.arrays.QuantizedArray
  PyObject* library = nullptr;        // lokakern.arrays.Library, of the arrays
  PyObject* memory = nullptr;         // class: memory(address, bytes, owner, GPU)
  PyObject* pointer = nullptr;        // class: pointer(memory, offset)
  PyObject* current = nullptr;        // current(GPU).ptr is the library's current stream
  PyObject* entered = nullptr;        // entered(ptr, GPU): the same as an object of torch
  std::vector<std::pair<PyObject*, at::ScalarType>> dtypes;
  bool is_cuda = true;  // false in tests without a GPU
  bool has_known_layout = false;  // see arrays.cpp
};

const ArrayLibrary& array_library();

void bind_arrays(ArrayLibrary made);

// The arrays of a call as tensors that share their memory. This keeps the arrays; where something
// keeps a tensor or its memory longer, that keeps the array.
class TakenArrays {
 public:
  TakenArrays() = default;
  ~TakenArrays();
  TakenArrays(const TakenArrays&) = delete;

  // Null where Python has to take the array, or to refuse it.
  const at::Tensor* add(PyObject* array);

  struct Item {
    at::Tensor tensor;
    PyObject* array;  // owned; null where idle
  };

 private:
  std::list<Item> items_;
};

// Whether results of a dtype become arrays.
bool has_dtype(at::ScalarType dtype);

// A tensor, of such a dtype, as an array that shares its memory. Null: an error of Python is set.
PyObject* give_array(const at::Tensor& made);

// The QuantizedTensor of a QuantizedArray of this library, borrowed; null of another library's.
PyObject* tensor_of_quantized(PyObject* quantized);

// A QuantizedTensor as a QuantizedArray. Null: an error of Python is set.
PyObject* quantized_of_tensor(PyObject* tensor);

// The library's current stream is torch's until this ends. Raises what Python raises.
class OnCurrentStream {
 public:
  explicit OnCurrentStream(c10::Device device);
  ~OnCurrentStream();
  OnCurrentStream(const OnCurrentStream&) = delete;

 private:
  std::optional<c10::Stream> before_;
};

}  // namespace lokakern
