#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/python_headers.h>

#include <cstdint>

namespace lokakern {

// call_layer(layer, x, describe[, activation, activating, find]): the output of a
// `lokakern.nn.linear.Linear`, or None where Python has to make the call. ``describe`` tells the
// routes of a plan, or None; ``find`` the kernel that activates and quantizes x.
// Raises C++ exceptions, such as LaunchFailure.
PyObject* call_layer(PyObject*, PyObject* const* given, Py_ssize_t count);

// As call_layer, for C++: also an output without FP8 is ATen's, without Python.
PyObject* layer_output(PyObject* const* given, Py_ssize_t count);

// Whether a tensor has elements, only memory and no tangent, on the device of another tensor.
bool is_usual(const at::Tensor& x, const at::Tensor& like);

// Whether a layer of a plan for this dtype multiplies its own weight, whole and unquantized, at m
// rows.
bool is_unquantized(PyObject* plan, PyObject* describe, int64_t m, at::ScalarType half);

// call_chain(x, recipe, owner, beside): the output of a chain by a `lokakern.nn.chain_call.Recipe`,
// or None where its modules changed, where x or a tensor ``beside`` is unusual, where a gradient is
// needed, and where the call has no plan. ``owner`` stands for None among the modules of the recipe.
// Raises C++ exceptions, such as LaunchFailure.
PyObject* call_chain(PyObject*, PyObject* const* given, Py_ssize_t count);

}  // namespace lokakern
