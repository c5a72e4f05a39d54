// What C++ reads of a torch.nn.Module, and when it may call ATen in the place of Python.
#pragma once

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include "ops.h"

namespace lokakern {

inline PyObject* name_of(const char* text) { return PyUnicode_InternFromString(text); }

// Whether functions of torch have a mode, but for that of `torch.set_default_device`, which
// changes only functions that make tensors.
inline bool has_function_mode() {
  if (!at::impl::torch_function_mode_enabled()) return false;
  const auto& only = at::impl::PythonTorchFunctionTLS::get_stack_at(0);
  static PyObject* const name = name_of("torch.utils._device");
  static PyObject* const modules = PyImport_GetModuleDict();
  PyObject* const module = PyDict_GetItemWithError(modules, name);
  const auto of_device = pybind11::reinterpret_steal<pybind11::object>(
      module ? PyObject_GetAttrString(module, "DeviceContext") : nullptr);
  if (!of_device) PyErr_Clear();
  return at::impl::PythonTorchFunctionTLS::stack_len() > 1 || !of_device ||
         reinterpret_cast<PyObject*>(Py_TYPE(only->ptr(getPyInterpreter()))) != of_device.ptr();
}

// Nothing between torch's operators and their kernels that a layer has to know of.
inline bool is_usual_state() {
  return has_no_modes() && !has_function_mode() && !torch::jit::tracer::isTracing();
}

inline PyObject* dict_of(PyObject* object) {
  PyObject** const place = _PyObject_GetDictPtr(object);
  return place ? *place : nullptr;
}

inline PyObject* item(PyObject* dict, PyObject* name) {
  return dict && PyDict_CheckExact(dict) ? PyDict_GetItemWithError(dict, name) : nullptr;
}

inline bool is_none(PyObject* object) { return !object || object == Py_None; }

inline bool is_empty(PyObject* dict) {
  return dict && PyDict_Check(dict) && !PyDict_GET_SIZE(dict);
}

// A reference of its own: another thread may replace a weight.
inline std::optional<at::Tensor> tensor_in(PyObject* object) {
  if (!object || !THPVariable_CheckExact(object)) return std::nullopt;
  return THPVariable_Unpack(object);
}

struct Names {
  PyObject* const parameters = name_of("_parameters");
  PyObject* const buffers = name_of("_buffers");
  PyObject* const modules = name_of("_modules");
  PyObject* const weight = name_of("weight");
  PyObject* const bias = name_of("bias");
  PyObject* const forward = name_of("forward");
  PyObject* const hooks = name_of("_forward_hooks");
  PyObject* const pre_hooks = name_of("_forward_pre_hooks");
  // of `lokakern.nn.linear.Linear`
  PyObject* const plan = name_of("_plan");
  PyObject* const fp8_data = name_of("fp8_data");
  PyObject* const fp8_views = name_of("_fp8_views");
  PyObject* const held = name_of("held_weight");
  PyObject* const kept = name_of("_kept");
  PyObject* const gathered = name_of("_gathered");
  PyObject* const has_parameter = name_of("_has_parameter");
};

inline const Names& names() {
  static const Names made;
  return made;
}

// Whether a `Linear` has any route; of its class it has none.
inline bool has_plan(PyObject* dict) {
  PyObject* const plan = item(dict, names().plan);
  return plan && (!PyUnicode_CheckExact(plan) || PyUnicode_GET_LENGTH(plan));
}

}  // namespace lokakern
