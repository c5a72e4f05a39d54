// The Python side: public functions replay their plans without Python's own work.
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>
#include <pybind11/numpy.h>

#include <unordered_set>

#include "arrays.h"
#include "captured.h"
#include "driver.h"
#include "layer.h"
#include "ops.h"
#include "sequence.h"
#include "window.h"

namespace lokakern {
namespace {

// What of Python's objects the code below reads, set once by `bind`; never released.
PyObject* quantized_type = nullptr;
PyObject* launch_error = nullptr;
std::unordered_set<PyTypeObject*>* constant_types = nullptr;  // equal objects of these act alike
PyObject* canonical = nullptr;  // dict: equal objects of one type share a place in signatures
std::unordered_set<PyObject*>* kept = nullptr;  // the objects in it
PyObject *s_data, *s_scale, *s_granularity, *s_transposed, *s_source, *s_budget,
    *s_padded, *s_signature, *s_views, *s_out;

struct Call {
  // The first operand decides, as in `lokakern.arrays`.
  enum Kind { kOfNothing, kOfTensors, kOfArrays };
  Words words;
  Inputs inputs;
  c10::SmallVector<PyObject*, 16> objects;  // of the inputs, borrowed
  TakenArrays arrays;
  Kind kind = kOfNothing;
  bool has_quantized_tensor = false;
  bool has_grad = false;
  bool has_list = false;  // which other threads may change
  size_t out = SIZE_MAX;  // the input that is an array to write to

  bool is_of(Kind given) {
    if (kind == kOfNothing) kind = given;
    return kind == given;
  }
};

// Keeps a call's tensors while other threads run, where its arguments do not.
class Held {
 public:
  explicit Held(const Call& call) : call_(call) {
    if (call_.has_list)
      for (PyObject* object : call_.objects) Py_INCREF(object);
  }
  ~Held() {
    if (call_.has_list)
      for (PyObject* object : call_.objects) Py_DECREF(object);
  }
  Held(const Held&) = delete;

 private:
  const Call& call_;
};

// Where a result comes from.
struct Template {
  enum Kind { kTensor, kInput, kQuantized, kTuple, kNone } kind = kNone;
  int64_t index = 0;  // of a result or of an input
  std::vector<Template> parts;  // data and scale, or items
  PyObject* granularity = nullptr;
  bool transposed = false;
};

struct PythonEntry : Entry {
  Template result;
};

bool add_object(PyObject* object, Call& call, int depth = 0);

bool add_tensor_object(PyObject* object, Call& call) {
  const at::Tensor& tensor = THPVariable_Unpack(object);
  call.words.push_back(1);
  if (!add_tensor(tensor, call.inputs, call.words)) return false;
  call.has_grad |= tensor.requires_grad();
  call.inputs.push_back(&tensor);
  call.objects.push_back(object);
  return true;
}

bool add_array(PyObject* object, Call& call) {
  if (!call.is_of(Call::kOfArrays)) return false;
  const at::Tensor* const tensor = call.arrays.add(object);
  call.words.push_back(1);
  if (!tensor || !add_tensor(*tensor, call.inputs, call.words)) return false;
  call.inputs.push_back(tensor);
  call.objects.push_back(object);
  return true;
}

bool add_quantized(PyObject* object, Call& call) {
  call.words.push_back(7);
  for (PyObject* name : {s_data, s_scale, s_source, s_padded, s_granularity, s_transposed,
                         s_budget}) {
    PyObject* value = PyObject_GetAttr(object, name);
    if (!value) {
      PyErr_Clear();
      return false;
    }
    const bool fits = THPVariable_CheckExact(value) ? add_tensor_object(value, call)
                                                    : add_object(value, call, 1);
    Py_DECREF(value);  // the object keeps it
    if (!fits) return false;
  }
  return true;
}

constexpr size_t kMostKept = 65536;

// Equal objects of one type have one address, which stays theirs.
bool add_canonical(PyObject* object, Call& call) {
  if (!kept->count(object)) {
    // What is kept must not hold tensors, as a named tuple does.
    if (!constant_types->count(Py_TYPE(object))) return false;
    PyObject* type = reinterpret_cast<PyObject*>(Py_TYPE(object));
    PyObject* pair = PyTuple_Pack(2, type, object);
    const bool is_full = kept->size() >= kMostKept;
    PyObject* found = !pair     ? nullptr
                      : is_full ? PyDict_GetItemWithError(canonical, pair)
                                : PyDict_SetDefault(canonical, pair, object);
    Py_XDECREF(pair);
    if (!found) {
      PyErr_Clear();
      return false;
    }
    if (found == object) kept->insert(object);
    object = found;
  }
  call.words.push_back(8);
  call.words.push_back(reinterpret_cast<int64_t>(object));
  return true;
}

bool add_object(PyObject* object, Call& call, int depth) {
  if (object == Py_None) {
    call.words.push_back(0);
    return true;
  }
  if (THPVariable_CheckExact(object))
    return call.is_of(Call::kOfTensors) && add_tensor_object(object, call);
  if (reinterpret_cast<PyObject*>(Py_TYPE(object)) == quantized_type) {
    // Among arrays, too, such as a weight that was loaded from a file, but not before them.
    if (!call.is_of(Call::kOfTensors)) call.has_quantized_tensor = true;
    return add_quantized(object, call);
  }
  if (Py_TYPE(object) == array_library().array) return add_array(object, call);
  if (Py_TYPE(object) == array_library().quantized) {
    PyObject* const tensor = call.is_of(Call::kOfArrays) ? tensor_of_quantized(object) : nullptr;
    return tensor && reinterpret_cast<PyObject*>(Py_TYPE(tensor)) == quantized_type &&
           add_quantized(tensor, call);
  }
  if (PyFloat_CheckExact(object)) {
    int64_t bits = 0;
    const double number = PyFloat_AS_DOUBLE(object);
    std::memcpy(&bits, &number, sizeof bits);
    call.words.append({3, bits});
    return true;
  }
  if (PyBool_Check(object)) {
    call.words.append({4, object == Py_True});
    return true;
  }
  if (PyLong_CheckExact(object)) {
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(object, &overflow);
    call.words.append({2, number});
    return !overflow;
  }
  if (PyList_CheckExact(object) || PyTuple_CheckExact(object)) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    call.words.append({PyList_CheckExact(object) ? 6 : 9, size});
    call.has_list |= PyList_CheckExact(object);
    if (depth > 2 || size > 64) return false;
    for (Py_ssize_t i = 0; i < size; ++i)
      if (!add_object(PySequence_Fast_GET_ITEM(object, i), call, depth + 1)) return false;
    return true;
  }
  if (THPVariable_Check(object)) return false;  // a subclass of Tensor
  return add_canonical(object, call);
}

// Fills in the signature of a call; false where such calls have no plans.
bool describe(int64_t function, PyObject* args, PyObject* kwargs, Call& call) {
  call.words.append({0, function, PyTuple_GET_SIZE(args)});
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); ++i)
    if (!add_object(PyTuple_GET_ITEM(args, i), call)) return false;
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t place = 0;
  while (PyDict_Next(kwargs, &place, &name, &value)) {
    // Names in a call are interned.
    if (!PyUnicode_CHECK_INTERNED(name)) return false;
    call.words.push_back(reinterpret_cast<int64_t>(name));
    if (name == s_out && Py_TYPE(value) == array_library().array) call.out = call.inputs.size();
    if (!add_object(value, call)) return false;
  }
  if (call.inputs.empty()) return false;
  // Names do not tell which operand is the first.
  if (call.has_quantized_tensor && !PyTuple_GET_SIZE(args)) return false;
  const c10::Device device = call.inputs[0]->device();
  for (const auto* x : call.inputs)
    if (x->device() != device) return false;
  call.words[0] = device.index();
  return true;
}

PyObject* quantized(PyObject* data, PyObject* scale, const Template& from) {
  auto* type = reinterpret_cast<PyTypeObject*>(quantized_type);
  PyObject* made = type->tp_alloc(type, 0);
  if (!made) return nullptr;
  const std::pair<PyObject*, PyObject*> fields[] = {
      {s_data, data},          {s_scale, scale},    {s_granularity, from.granularity},
      {s_transposed, from.transposed ? Py_True : Py_False},
      {s_source, Py_None},     {s_budget, Py_None}, {s_padded, Py_None},
      {s_signature, Py_None},  {s_views, Py_None}};
  for (const auto& [name, value] : fields) {
    if (PyObject_GenericSetAttr(made, name, value)) {  // the class itself is frozen
      Py_DECREF(made);
      return nullptr;
    }
  }
  return made;
}

// The result of a call with arrays that is an input: ``out`` itself, or another array.
PyObject* returned_array(size_t index, const Call& call) {
  const auto address = [&](size_t i) { return call.inputs[i]->unsafeGetTensorImpl()->data(); };
  if (call.out >= call.inputs.size() || address(call.out) != address(index))
    return give_array(*call.inputs[index]);
  PyObject* const out = call.objects[call.out];
  Py_INCREF(out);
  return out;
}

PyObject* assemble(const Template& from, const Call& call, const Results& results,
                   bool is_part = false) {
  const bool gives_arrays = call.kind == Call::kOfArrays && !is_part;
  switch (from.kind) {
    case Template::kNone: Py_RETURN_NONE;
    case Template::kTensor:
      return gives_arrays ? give_array(results[from.index]) : THPVariable_Wrap(results[from.index]);
    case Template::kInput: {
      if (gives_arrays) return returned_array(static_cast<size_t>(from.index), call);
      if (call.kind == Call::kOfArrays) return THPVariable_Wrap(*call.inputs[from.index]);
      PyObject* object = call.objects[from.index];
      Py_INCREF(object);
      return object;
    }
    case Template::kQuantized: {
      PyObject* data = assemble(from.parts[0], call, results, true);
      PyObject* scale = assemble(from.parts[1], call, results, true);
      PyObject* made = data && scale ? quantized(data, scale, from) : nullptr;
      Py_XDECREF(data);
      Py_XDECREF(scale);
      if (!made || !gives_arrays) return made;
      PyObject* const array = quantized_of_tensor(made);
      Py_DECREF(made);
      return array;
    }
    case Template::kTuple: {
      PyObject* made = PyTuple_New(static_cast<Py_ssize_t>(from.parts.size()));
      for (size_t i = 0; made && i < from.parts.size(); ++i) {
        PyObject* item = assemble(from.parts[i], call, results, is_part);
        if (!item) {
          Py_CLEAR(made);
          break;
        }
        PyTuple_SET_ITEM(made, static_cast<Py_ssize_t>(i), item);
      }
      return made;
    }
  }
  Py_RETURN_NONE;
}

// Whether a result can be put together of arrays; elsewhere Python says what is missing.
bool gives_arrays(const Template& from, const Call& call, const Plan& plan) {
  const auto fits = [&](const Template& part) { return gives_arrays(part, call, plan); };
  switch (from.kind) {
    case Template::kNone: return false;
    case Template::kTensor: return has_dtype(plan.result_dtype(from.index));
    case Template::kInput: return has_dtype(call.inputs[from.index]->scalar_type());
    case Template::kQuantized: return true;
    case Template::kTuple: return std::all_of(from.parts.begin(), from.parts.end(), fits);
  }
  return false;
}

// replay(function, args, kwargs): the result; None where there is no plan; or the signature as
// bytes, if the call is to be made and recorded.
PyObject* replay(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count != 3 || !PyTuple_Check(given[1]) || !PyDict_Check(given[2])) {
    PyErr_SetString(PyExc_TypeError, "replay: expected a number, a tuple and a dict");
    return nullptr;
  }
  Call call;
  if (!is_plain_state() ||
      !describe(reinterpret_cast<int64_t>(given[0]), given[1], given[2], call))
    Py_RETURN_NONE;
  if (call.has_grad && c10::GradMode::is_enabled()) Py_RETURN_NONE;
  const auto entry = book().find(call.words);
  const bool is_of_arrays = call.kind == Call::kOfArrays;
  if (!entry->plan) {  // Python makes a call with arrays by one with tensors, which is recorded
    if (is_of_arrays || !entry->is_recordable || ++entry->calls < 2) Py_RETURN_NONE;
    const std::string text = text_of(call.words);
    return PyBytes_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
  }
  const Template& result = static_cast<const PythonEntry&>(*entry).result;
  if (is_of_arrays && !gives_arrays(result, call, *entry->plan)) Py_RETURN_NONE;
  Results results;
  const Held held(call);
  const auto name = [&] {
    return pybind11::str(pybind11::handle(given[0]).attr("__name__")).cast<std::string>();
  };
  try {
    SHOW_CALL("lokakern." + name());
    std::optional<OnCurrentStream> on_stream;
    if (is_of_arrays) on_stream.emplace(call.inputs[0]->device());
    const pybind11::gil_scoped_release others;  // a launch waits where the queue is full
    entry->plan->run(call.inputs, results);
  } catch (const LaunchFailure& error) {
    PyErr_SetString(launch_error, error.what());
    return nullptr;
  }
  return assemble(result, call, results);
  END_HANDLE_TH_ERRORS
}

// Items of lists, kept while other threads run, which may change the lists.
class Items {
 public:
  Items() = default;
  ~Items() {
    for (PyObject* item : kept_) Py_DECREF(item);
  }
  Items(const Items&) = delete;
  void keep(PyObject* item) {
    Py_INCREF(item);
    kept_.push_back(item);
  }

 private:
  c10::SmallVector<PyObject*, 32> kept_;
};

// As `add_value` of ops.cpp, without a conversion.
bool add_argument(PyObject* object, Words& words, Inputs& inputs, Items& items, int depth = 0) {
  if (object == Py_None) {
    words.push_back(0);
  } else if (THPVariable_CheckExact(object)) {
    const at::Tensor& tensor = THPVariable_Unpack(object);
    words.push_back(1);
    if (!add_tensor(tensor, inputs, words)) return false;
    inputs.push_back(&tensor);
  } else if (PyBool_Check(object)) {
    words.append({4, object == Py_True});
  } else if (PyFloat_CheckExact(object)) {
    int64_t bits = 0;
    const double number = PyFloat_AS_DOUBLE(object);
    std::memcpy(&bits, &number, sizeof bits);
    words.append({3, bits});
  } else if (PyUnicode_CheckExact(object)) {
    Py_ssize_t size = 0;
    const char* text = PyUnicode_AsUTF8AndSize(object, &size);  // kept in the object
    if (!text) {
      PyErr_Clear();
      return false;
    }
    words.push_back(5);
    add_text({text, static_cast<size_t>(size)}, words);
  } else if ((PyList_CheckExact(object) || PyTuple_CheckExact(object)) && !depth) {
    const Py_ssize_t size = PySequence_Fast_GET_SIZE(object);
    words.append({6, size});
    for (Py_ssize_t i = 0; i < size; ++i) {
      PyObject* const item = PySequence_Fast_GET_ITEM(object, i);
      items.keep(item);
      if (!add_argument(item, words, inputs, items, depth + 1)) return false;
    }
  } else {
    return false;
  }
  return true;
}

// call_op(name, ...): the result of an op, or a tuple of several, by the plan of its call; None
// where there is none. It spares the parsing and dispatching that torch does for any op.
PyObject* call_op(PyObject*, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  Words words;
  Inputs inputs;
  Items items;
  words.push_back(0);  // where the device goes
  Py_ssize_t size = 0;
  const char* name = count ? PyUnicode_AsUTF8AndSize(given[0], &size) : nullptr;
  if (!name) {
    PyErr_SetString(PyExc_TypeError, "call_op: expected the name of an op and its arguments");
    return nullptr;
  }
  add_text({name, static_cast<size_t>(size)}, words);
  for (Py_ssize_t i = 1; i < count; ++i)
    if (!add_argument(given[i], words, inputs, items)) Py_RETURN_NONE;
  if (inputs.empty() || !has_no_modes()) Py_RETURN_NONE;
  const auto device = inputs[0]->device();
  for (const auto* x : inputs)
    if (x->device() != device) Py_RETURN_NONE;
  words[0] = device.index();
  const auto entry = book().find(words);
  if (!entry->plan) Py_RETURN_NONE;
  Results results;
  try {
    SHOW_CALL(name);
    const pybind11::gil_scoped_release others;  // a launch waits where the queue is full
    entry->plan->run(inputs, results);
  } catch (const LaunchFailure& error) {
    PyErr_SetString(launch_error, error.what());
    return nullptr;
  }
  if (results.size() == 1) return THPVariable_Wrap(std::move(results[0]));
  PyObject* const all = PyTuple_New(static_cast<Py_ssize_t>(results.size()));
  for (size_t i = 0; all && i < results.size(); ++i)
    PyTuple_SET_ITEM(all, static_cast<Py_ssize_t>(i), THPVariable_Wrap(std::move(results[i])));
  return all;
  END_HANDLE_TH_ERRORS
}

template <PyObject* (*call)(PyObject*, PyObject* const*, Py_ssize_t)>
PyObject* launching(PyObject* module, PyObject* const* given, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  try {
    return call(module, given, count);
  } catch (const LaunchFailure& error) {
    PyErr_SetString(launch_error, error.what());
    return nullptr;
  }
  END_HANDLE_TH_ERRORS
}

PyMethodDef op_method = {"call_op", reinterpret_cast<PyCFunction>(call_op), METH_FASTCALL, nullptr};
PyMethodDef layer_method = {"call_layer", reinterpret_cast<PyCFunction>(launching<call_layer>),
                            METH_FASTCALL, nullptr};
PyMethodDef chain_method = {"call_chain", reinterpret_cast<PyCFunction>(launching<call_chain>),
                            METH_FASTCALL, nullptr};
PyMethodDef sequence_method = {"call_sequence",
                               reinterpret_cast<PyCFunction>(launching<call_sequence>),
                               METH_FASTCALL, nullptr};
PyMethodDef replay_method = {"replay", reinterpret_cast<PyCFunction>(replay), METH_FASTCALL,
                             nullptr};

Template template_of(pybind11::handle from) {
  Template made;
  if (from.is_none()) return made;
  const auto kind = from[pybind11::int_(0)].cast<std::string>();
  if (kind == "tensor" || kind == "input") {
    made.kind = kind == "tensor" ? Template::kTensor : Template::kInput;
    made.index = from[pybind11::int_(1)].cast<int64_t>();
    return made;
  }
  for (const auto& part : from[pybind11::int_(1)]) made.parts.push_back(template_of(part));
  made.kind = Template::kTuple;
  if (kind == "quantized") {
    made.kind = Template::kQuantized;
    pybind11::object granularity = from[pybind11::int_(2)];
    made.granularity = granularity.release().ptr();  // a member of an enum
    made.transposed = from[pybind11::int_(3)].cast<bool>();
  }
  return made;
}

void set_names() {
  const std::pair<PyObject**, const char*> names[] = {
      {&s_data, "data"},     {&s_scale, "scale"},   {&s_granularity, "granularity"},
      {&s_source, "source"}, {&s_budget, "budget"}, {&s_transposed, "transposed"},
      {&s_padded, "padded"}, {&s_signature, "_signature"}, {&s_views, "_transpose"},
      {&s_out, "out"}};
  for (const auto& [place, name] : names) *place = PyUnicode_InternFromString(name);
}

}  // namespace
}  // namespace lokakern

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  using namespace lokakern;
  kept = new std::unordered_set<PyObject*>;
  constant_types = new std::unordered_set<PyTypeObject*>;
  canonical = PyDict_New();
  set_names();
  py::register_exception_translator([](std::exception_ptr raised) {
    try {
      if (raised) std::rethrow_exception(raised);
    } catch (const LaunchFailure& error) {
      PyErr_SetString(launch_error ? launch_error : PyExc_RuntimeError, error.what());
    } catch (const BadPlan& error) {
      PyErr_SetString(PyExc_ValueError, error.what());
    }
  });
  module.def("bind", [](py::object type, py::object error, const py::tuple& constants) {
    quantized_type = type.release().ptr();
    launch_error = error.release().ptr();
    raise_in_python = [](const LaunchFailure& failure) {
      const py::gil_scoped_acquire python;
      PyErr_SetString(launch_error, failure.what());
      python_error raised;  // which the backward pass of another thread may carry
      raised.persist();
      throw raised;
    };
    for (const auto& constant : constants)
      constant_types->insert(reinterpret_cast<PyTypeObject*>(constant.inc_ref().ptr()));
  }, py::arg("type"), py::arg("error"), py::arg("constants") = py::tuple());
  // See `lokakern.arrays`.
  module.def("bind_arrays", [](py::object array, py::object quantized, py::object library,
                               py::object memory, py::object pointer, py::object current,
                               py::object entered,
                               const std::vector<std::pair<py::object, at::ScalarType>>& dtypes,
                               bool is_cuda) {
    ArrayLibrary made;
    made.array = reinterpret_cast<PyTypeObject*>(array.release().ptr());
    made.quantized = reinterpret_cast<PyTypeObject*>(quantized.release().ptr());
    made.library = library.release().ptr();
    made.memory = memory.release().ptr();
    made.pointer = pointer.release().ptr();
    made.current = current.release().ptr();
    made.entered = entered.release().ptr();
    for (const auto& [object, dtype] : dtypes)
      made.dtypes.emplace_back(object.inc_ref().ptr(), dtype);
    made.is_cuda = is_cuda;
    bind_arrays(std::move(made));
    return array_library().has_known_layout;
  }, py::arg("array"), py::arg("quantized"), py::arg("library"),
     py::arg("memory"), py::arg("pointer"), py::arg("current"), py::arg("entered"),
     py::arg("dtypes"), py::arg("is_cuda") = true);
  module.add_object("call_op", PyCFunction_New(&op_method, nullptr));
  module.add_object("call_layer", PyCFunction_New(&layer_method, nullptr));
  module.add_object("call_chain", PyCFunction_New(&chain_method, nullptr));
  module.add_object("call_sequence", PyCFunction_New(&sequence_method, nullptr));
  module.add_object("replay", PyCFunction_New(&replay_method, nullptr));
  module.def("inputs", [](py::tuple args, py::dict kwargs) {
    Call call;
    py::list found;
    if (describe(0, args.ptr(), kwargs.ptr(), call))
      for (PyObject* object : call.objects) found.append(py::handle(object));
    return found;
  });
  module.def("recorded", []() -> py::object {
    if (!recorded) return py::none();
    return py::bytes(text_of(*recorded));
  });
  module.def("install", [](const py::bytes& signature, const py::object& plan, int device,
                           bool is_cuda, std::vector<at::Tensor> constants,
                           const py::object& result) {
    auto entry = std::make_shared<PythonEntry>();
    entry->is_recordable = !plan.is_none();
    if (entry->is_recordable) {
      const c10::Device where(is_cuda ? c10::kCUDA : c10::kCPU,
                              static_cast<c10::DeviceIndex>(device));
      entry->plan = std::make_shared<Plan>(std::string(plan.cast<py::bytes>()), where,
                                           std::move(constants), nullptr);
      entry->result = template_of(result);
    }
    book().install(words_of(std::string(signature)), std::move(entry));
  });
  module.def("operators", [] {
    return std::vector<std::string>(kOperators.begin(), kOperators.end());
  });
  module.def("dtype_code", [](at::ScalarType dtype) { return static_cast<int>(dtype); });
  module.def("clear", [] { book().clear(); });
  module.def("size", [] { return book().size(); });
  scratch_of_graph = [](int64_t bytes, c10::Device device) {
    const c10::DeviceGuard guard(device);
    const py::gil_scoped_acquire python;
    const py::object zeros = py::module_::import("lokakern.scratch").attr("zeros");
    return zeros(bytes, device).cast<at::Tensor>();
  };
  module.def("own", [](int change) { owned_depth += change; });
  // As on a GPU, for tests without one.
  module.def("replay_chain", [](at::Tensor x, std::vector<std::optional<at::Tensor>> operands,
                                std::string plan, std::optional<at::Tensor> out) {
    const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(
        out ? "lokakern::routed_chain_into" : "lokakern::routed_chain", "");
    c10::List<std::optional<at::Tensor>> list;
    for (auto& operand : operands) list.push_back(std::move(operand));
    torch::jit::Stack stack{std::move(x), std::move(list), std::move(plan)};
    if (out) stack.emplace_back(*out);
    replay_op(op, stack);
    return out ? *out : stack.at(0).toTensor();
  }, py::arg("x"), py::arg("operands"), py::arg("plan"), py::arg("out") = py::none());
  module.def("use_driver", [](uint64_t launch, uint64_t encode, uint64_t fill) {
    use_driver(reinterpret_cast<LaunchKernel>(launch), reinterpret_cast<EncodeTiled>(encode),
               reinterpret_cast<Memset32>(fill));
  });
  module.def("use_streams", [](uint64_t current, uint64_t exchange) {
    use_streams(reinterpret_cast<CurrentStream>(current),
                reinterpret_cast<ExchangeStream>(exchange));
  });
  module.def("use_lt", &use_lt);
  module.def("lt_counts", [] {
    const LtCounts found = lt_counts();
    py::dict made;
    made["kept"] = found.kept;
    made["refused"] = found.refused;
    made["captured"] = found.captured;
    made["reason"] = found.reason;
    made["uncaptured_reason"] = found.uncaptured_reason;
    return made;
  });
  // (place, operand, offset) of each word, for tests.
  module.def("address_words", [](const std::vector<py::bytes>& parameters,
                                 const std::vector<std::vector<uint64_t>>& addresses,
                                 const std::vector<uint64_t>& bytes) {
    std::vector<std::vector<uint8_t>> captures;
    for (const std::string_view x : parameters) captures.emplace_back(x.begin(), x.end());
    std::vector<std::tuple<uint32_t, uint32_t, uint64_t>> found;
    for (const AddressWord& x : address_words(captures, addresses, bytes))
      found.emplace_back(x.place, x.operand, x.offset);
    return found;
  });
  module.def("load_plans", &load_plans, py::call_guard<py::gil_scoped_release>());
  // See `lokakern.probe.hooks` and `lokakern.probe.windows`.
  module.def("take_samples", torch::wrap_pybind_function_no_gil(&take_samples));
  module.def("sizes_of", torch::wrap_pybind_function_no_gil(&sizes_of));
  module.def("norms_of_rows", torch::wrap_pybind_function_no_gil(&norms_of_rows));
  module.def("as_tensors", torch::wrap_pybind_function(&as_tensors));
  py::class_<WindowPass, std::shared_ptr<WindowPass>>(module, "WindowPass")
      .def("tensors", torch::wrap_pybind_function_no_gil(&WindowPass::tensors))
      .def("values", torch::wrap_pybind_function_no_gil(&WindowPass::values));
  module.def("take_pass", torch::wrap_pybind_function_no_gil(&WindowPass::take));
  module.def("load_window_kernel", [](int device, const py::bytes& cubin, const KernelSizes& sizes) {
    load_window_kernel(device, std::string_view(cubin), sizes);
  });
  module.def("use_window_kernel", &use_window_kernel);
  module.def("window_kernel_failure", &window_kernel_failure);
  const auto window_numbers = [](const std::vector<std::vector<at::Tensor>>& operands,
                                 const std::vector<WindowNumbers::InPass>& in_passes,
                                 const std::vector<std::vector<at::Tensor>>& weights,
                                 int64_t elements, int64_t most_elements, double fewest_below,
                                 double least_share, double least_size,
                                 double least_variance) {
    const WindowLimits limits{elements,    most_elements, fewest_below,
                              least_share, least_size,    least_variance};
    return std::make_unique<WindowNumbers>(operands, in_passes, weights, limits);
  };
  module.def("window_numbers", torch::wrap_pybind_function_no_gil(window_numbers));
  py::class_<WindowNumbers>(module, "WindowNumbers")
      .def("compute", [](const WindowNumbers& window, uint64_t event) {
        std::vector<double> found;
        {
          const py::gil_scoped_release others;
          found = window.compute(event);
        }
        return py::array_t<double>(static_cast<py::ssize_t>(found.size()), found.data());
      });
}
