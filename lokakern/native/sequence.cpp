// The eager call of a sequence, without Python's part of modules that have no setting at its rows.
//
// A call of a module takes the host 3 us beside its operators. Modules of the classes below run the
// operators of their `forward` here, with what their dictionaries hold at the time; those with
// hooks, a `forward` of their own, or other arguments are called as Python calls them.
#include "sequence.h"

#include <ATen/Context.h>
#include <ATen/ops/_addmm_activation.h>
#include <ATen/ops/batch_norm.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/tanh.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_strings.h>

#include <algorithm>
#include <tuple>

#include "layer.h"
#include "module.h"

namespace lokakern {
namespace {

namespace py = pybind11;

enum class Kind {
  kConverted, kLinear, kRelu, kLayerNorm, kBatchNorm, kDropout, kGelu, kSilu, kSigmoid, kTanh,
  kIdentity
};

// A state of a place, see `_states_at` in Python: a product that applies the relu behind it.
constexpr long kRectified = 3;
// `COLUMNS` of `lokakern.nn.rectified`: of other rows layer and relu run one by one.
constexpr int64_t kColumns = 8;

struct KnownClass {
  py::object type, forward;
  Kind kind;
};

// Never released: the interpreter may be gone before.
struct Classes {
  std::vector<KnownClass> known;
  std::vector<py::object> global_hooks;
  py::object call, call_impl, module_class;
  py::object sequence;  // methods are its own: another thread may take the class from a module
  PyObject* const backward_hooks = name_of("_backward_hooks");
  PyObject* const backward_pre_hooks = name_of("_backward_pre_hooks");
  PyObject* const compiled_call = name_of("_compiled_call_impl");
  PyObject* const call_name = name_of("__call__");
  PyObject* const call_impl_name = name_of("_call_impl");
  PyObject* const training = name_of("training");
  PyObject* const inplace = name_of("inplace");
  PyObject* const approximate = name_of("approximate");
  PyObject* const normalized_shape = name_of("normalized_shape");
  PyObject* const eps = name_of("eps");
  PyObject* const momentum = name_of("momentum");
  PyObject* const running_mean = name_of("running_mean");
  PyObject* const running_var = name_of("running_var");
  PyObject* const by_rows = name_of("_by_rows");
  PyObject* const handoffs = name_of("_handoffs");
  PyObject* const handed = name_of("_handed");
  PyObject* const run_from = name_of("_run_from");

  Classes() {
    const auto torch_nn = py::module_::import("torch.nn");
    const auto add = [&](const py::object& type, Kind kind) {
      if (is_own(type, "forward")) known.push_back({type, type.attr("forward"), kind});
    };
    for (const auto* name : {"Linear", "PlainLinear"})
      add(py::module_::import("lokakern.nn.linear").attr(name), Kind::kConverted);
    const std::pair<const char*, Kind> kinds[] = {
        {"Linear", Kind::kLinear},       {"ReLU", Kind::kRelu},
        {"LayerNorm", Kind::kLayerNorm}, {"BatchNorm1d", Kind::kBatchNorm},
        {"Dropout", Kind::kDropout},     {"GELU", Kind::kGelu},
        {"SiLU", Kind::kSilu},           {"Sigmoid", Kind::kSigmoid},
        {"Tanh", Kind::kTanh},           {"Identity", Kind::kIdentity}};
    for (const auto& [name, kind] : kinds) add(torch_nn.attr(name), kind);
    const auto module = py::module_::import("torch.nn.modules.module");
    for (const auto* name : {"_global_forward_hooks", "_global_forward_pre_hooks",
                             "_global_backward_hooks", "_global_backward_pre_hooks"})
      global_hooks.push_back(module.attr(name));
    const py::object root = torch_nn.attr("Module");
    call = is_own(root, "__call__") ? root.attr("__call__") : py::object();
    call_impl = is_own(root, "_call_impl") ? root.attr("_call_impl") : py::object();
    module_class = root;
    sequence = py::module_::import("lokakern.nn.static_handoff").attr("BoundedSequential");
  }

  // Whether a method is of its class's file: a library may have replaced it before, and a
  // replacement that copies the name of the module (`functools.wraps`) has globals of its own.
  static bool is_own(const py::object& type, const char* name) {
    const py::object method = type.attr(name), none = py::none();
    const auto modules = py::module_::import("sys").attr("modules");
    return py::getattr(method, "__globals__", none)
        .is(modules[type.attr("__module__")].attr("__dict__"));
  }

  const KnownClass* find(PyObject* module) const {
    for (const auto& each : known)
      if (each.type.ptr() == reinterpret_cast<PyObject*>(Py_TYPE(module))) return &each;
    return nullptr;
  }

  bool has_global_hooks() const {
    return std::any_of(global_hooks.begin(), global_hooks.end(),
                       [](const py::object& hooks) { return !is_empty(hooks.ptr()); });
  }
};

const Classes& classes() {
  static const Classes* made = nullptr;  // an import may let another thread in
  if (!made) made = new Classes;
  return *made;
}

// Whether a class has this method; not if it is null, as of one that was replaced before.
bool has_attribute(PyObject* type, PyObject* name, const py::object& expected) {
  const auto found = py::reinterpret_steal<py::object>(PyObject_GetAttr(type, name));
  if (!found) PyErr_Clear();
  return found && found.is(expected);
}

// Whether a call of a module is that of its class's own forward. Global hooks may be those of a
// module that ran before it.
bool is_plain(PyObject* dict, const KnownClass& known) {
  const auto& of = classes();
  return !of.has_global_hooks() && is_empty(item(dict, names().hooks)) &&
         is_empty(item(dict, names().pre_hooks)) && is_empty(item(dict, of.backward_hooks)) &&
         is_empty(item(dict, of.backward_pre_hooks)) && !item(dict, names().forward) &&
         is_none(item(dict, of.compiled_call)) &&
         has_attribute(known.type.ptr(), names().forward, known.forward) &&
         has_attribute(known.type.ptr(), of.call_name, of.call);
}

std::optional<double> float_in(PyObject* object) {
  if (!object || !PyFloat_CheckExact(object)) return std::nullopt;
  return PyFloat_AS_DOUBLE(object);
}

// A tensor, an undefined one for None, or nothing for anything else.
std::optional<at::Tensor> optional_in(PyObject* object) {
  return object == Py_None ? at::Tensor() : tensor_in(object);
}

std::optional<std::vector<int64_t>> sizes_in(PyObject* object) {
  if (!object || !PyTuple_Check(object)) return std::nullopt;
  std::vector<int64_t> sizes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(object); ++i) {
    PyObject* const size = PyTuple_GET_ITEM(object, i);
    if (!PyLong_CheckExact(size)) return std::nullopt;
    sizes.push_back(PyLong_AsLongLong(size));
  }
  return sizes;
}

template <typename Op>
at::Tensor without_gil(const Op& op) {
  const py::gil_scoped_release others;  // a launch waits where the queue is full
  return op();
}

// The output of a plain module of a known class, by what it holds; undefined if Python has to look.
at::Tensor output_of(PyObject* dict, Kind kind, const at::Tensor& x) {
  const auto& of = classes();
  for (PyObject* name : {names().weight, names().bias, of.running_mean, of.running_var})
    if (item(dict, name)) return {};  // an attribute, which hides a parameter or a buffer
  PyObject* const parameters = item(dict, names().parameters);
  const auto in_place = [&] { return item(dict, of.inplace) != Py_False; };
  switch (kind) {
    case Kind::kConverted:
    case Kind::kLinear: {
      const auto weight = tensor_in(item(parameters, names().weight));
      const auto bias = optional_in(item(parameters, names().bias));
      if (!weight || !bias) return {};
      return without_gil([&] { return at::linear(x, *weight, *bias); });
    }
    case Kind::kLayerNorm: {
      const auto weight = optional_in(item(parameters, names().weight)),
                 bias = optional_in(item(parameters, names().bias));
      const auto shape = sizes_in(item(dict, of.normalized_shape));
      const auto eps = float_in(item(dict, of.eps));
      if (!weight || !bias || !shape || !eps) return {};
      const bool has_cudnn = at::globalContext().userEnabledCuDNN();
      return without_gil(
          [&] { return at::layer_norm(x, *shape, *weight, *bias, *eps, has_cudnn); });
    }
    case Kind::kBatchNorm: {
      PyObject* const buffers = item(dict, names().buffers);
      const auto weight = optional_in(item(parameters, names().weight)),
                 bias = optional_in(item(parameters, names().bias)),
                 mean = tensor_in(item(buffers, of.running_mean)),
                 variance = tensor_in(item(buffers, of.running_var));
      const auto eps = float_in(item(dict, of.eps)), momentum = float_in(item(dict, of.momentum));
      if (!weight || !bias || !mean || !variance || !eps || !momentum || x.dim() != 2 ||
          item(dict, of.training) != Py_False)
        return {};
      const bool has_cudnn = at::globalContext().userEnabledCuDNN();
      return without_gil([&] {
        return at::batch_norm(x, *weight, *bias, *mean, *variance, false, *momentum, *eps,
                              has_cudnn);
      });
    }
    case Kind::kDropout:
      return item(dict, of.training) == Py_False ? x : at::Tensor();
    case Kind::kIdentity:
      return x;
    case Kind::kRelu:
      return in_place() ? at::Tensor() : without_gil([&] { return at::relu(x); });
    case Kind::kSilu:
      return in_place() ? at::Tensor() : without_gil([&] { return at::silu(x); });
    case Kind::kGelu: {
      PyObject* const approximate = item(dict, of.approximate);
      if (!approximate || !PyUnicode_CheckExact(approximate)) return {};
      const auto how = THPUtils_unpackString(approximate);
      return without_gil([&] { return at::gelu(x, how); });
    }
    case Kind::kSigmoid:
      return without_gil([&] { return at::sigmoid(x); });
    case Kind::kTanh:
      return without_gil([&] { return at::tanh(x); });
  }
  return {};
}

// As `rows_in` of Python; -1 for what is no usual tensor.
int64_t row_count(const at::Tensor& x) {
  if (x.is_nested() || !x.dim()) return -1;
  int64_t rows = 1;
  for (const int64_t size : x.sizes().slice(0, x.dim() - 1)) rows *= size;
  return rows;
}

// As ``module(x)`` in Python; null if it raises.
py::object called(PyObject* module, const py::object& x, PyObject* describe) {
  PyObject* const dict = dict_of(module);
  const auto* known = classes().find(module);
  if (known && dict && THPVariable_CheckExact(x.ptr()) && is_plain(dict, *known)) {
    if (known->kind == Kind::kConverted && has_plan(dict)) {
      PyObject* const given[] = {module, x.ptr(), describe};
      const auto y = py::reinterpret_steal<py::object>(layer_output(given, 3));
      if (!y || !y.is_none()) return y;
    } else {
      const at::Tensor given = THPVariable_Unpack(x.ptr());
      at::Tensor y = output_of(dict, known->kind, given);
      if (y.defined()) return py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(y)));
    }
  }
  return py::reinterpret_steal<py::object>(PyObject_CallOneArg(module, x.ptr()));
}

// A layer and the relu behind it in one launch, as `lokakern.nn.rectified`; undefined where Python
// would call one by one, for a gradient or with other dtypes; nothing if Python has to look.
std::optional<at::Tensor> rectified(PyObject* layer, PyObject* relu, const py::object& input,
                                    PyObject* describe) {
  PyObject *const dict = dict_of(layer), *const other = dict_of(relu);
  const auto *const known = classes().find(layer), *const last = classes().find(relu);
  if (!dict || !other || !known || !last || known->kind != Kind::kConverted ||
      last->kind != Kind::kRelu || !THPVariable_CheckExact(input.ptr()) ||
      !is_plain(dict, *known) || !is_plain(other, *last) || item(dict, names().weight) ||
      item(dict, names().bias))
    return std::nullopt;
  const at::Tensor& x = THPVariable_Unpack(input.ptr());
  PyObject* const parameters = item(dict, names().parameters);
  const auto weight = tensor_in(item(parameters, names().weight)),
             bias = tensor_in(item(parameters, names().bias));
  if (!weight || !bias) return std::nullopt;
  const auto operands = {&x, &*weight, &*bias};
  for (const at::Tensor* each : operands)
    if (!is_usual(*each, x)) return std::nullopt;
  const auto half = x.scalar_type();
  if (half != at::kBFloat16 && half != at::kHalf) return at::Tensor();
  if (weight->dim() == 2 && weight->size(1) % kColumns) return at::Tensor();
  for (const at::Tensor* each : operands)
    if (each->scalar_type() != half ||
        (at::GradMode::is_enabled() && each->requires_grad()))
      return at::Tensor();
  if (x.dim() < 2 || (x.dim() > 2 && !x.is_contiguous()) || x.size(-1) != weight->size(-1) ||
      at::autocast::is_autocast_enabled(x.device().type()) ||
      !is_unquantized(item(dict, names().plan), describe, row_count(x), half))
    return std::nullopt;
  return without_gil([&] {
    const at::Tensor rows = x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
    at::Tensor y = at::_addmm_activation(*bias, rows, weight->t());
    if (x.dim() == 2) return y;
    auto sizes = x.sizes().vec();
    sizes.back() = y.size(-1);
    return y.view(sizes);
  });
}

}  // namespace

PyObject* call_sequence(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 3) {
    PyErr_SetString(PyExc_TypeError, "call_sequence: expected a sequence, a tensor, a function");
    return nullptr;
  }
  const auto& of = classes();
  PyObject* const dict = dict_of(given[0]);
  PyObject *const by_rows = item(dict, of.by_rows), *const modules = item(dict, names().modules);
  if (!by_rows || !modules || reinterpret_cast<PyObject*>(Py_TYPE(given[1])) != THPVariableClass ||
      !is_usual_state() || of.has_global_hooks() ||
      !has_attribute(of.module_class.ptr(), of.call_impl_name, of.call_impl))
    Py_RETURN_NONE;
  const int64_t m = row_count(THPVariable_Unpack(given[1]));
  if (m < 0) Py_RETURN_NONE;
  const py::int_ rows(m);
  PyObject* const found = item(by_rows, rows.ptr());
  if (!found || !PyTuple_CheckExact(found) || PyTuple_GET_SIZE(found) != 2) Py_RETURN_NONE;
  const auto known = py::reinterpret_borrow<py::tuple>(found);  // which a call may replace
  const py::object states = known[0], handoff = known[1];
  PyObject* const handoffs = item(dict, of.handoffs);  // which another thread may have changed
  if (!handoffs || !PyTuple_CheckExact(handoffs) || !PyTuple_GET_SIZE(handoffs) ||
      PyTuple_GET_ITEM(handoffs, PyTuple_GET_SIZE(handoffs) - 1) != handoff.ptr())
    Py_RETURN_NONE;
  c10::SmallVector<py::object, 16> children;  // a call may change the dictionary
  PyObject *name = nullptr, *child = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(modules, &place, &name, &child);)
    children.push_back(py::reinterpret_borrow<py::object>(child));
  const py::object expected = handoff[py::int_(1)];
  const auto count_of = [](const py::object& tuple) {
    return PyTuple_Check(tuple.ptr()) ? static_cast<size_t>(PyTuple_GET_SIZE(tuple.ptr())) : 0;
  };
  if (count_of(states) != children.size() || count_of(expected) != children.size())
    Py_RETURN_NONE;
  for (size_t i = 0; i < children.size(); ++i)
    if (children[i].ptr() != PyTuple_GET_ITEM(expected.ptr(), i)) Py_RETURN_NONE;
  auto y = py::reinterpret_borrow<py::object>(given[1]);
  for (size_t place = 0; place < children.size();) {
    const long state = PyLong_AsLong(PyTuple_GET_ITEM(states.ptr(), place));
    const py::int_ here(place);
    // A hook, or another module, may have changed the rows.
    if (state && (!THPVariable_CheckExact(y.ptr()) || row_count(THPVariable_Unpack(y.ptr())) != m))
      return PyObject_CallMethodObjArgs(of.sequence.ptr(), of.run_from, given[0], y.ptr(),
                                        here.ptr(), handoff.ptr(), nullptr);
    bool is_alone = state < 2;
    if (state == kRectified && place + 1 < children.size()) {
      auto both = rectified(children[place].ptr(), children[place + 1].ptr(), y, given[2]);
      if (both && both->defined()) {
        y = py::reinterpret_steal<py::object>(THPVariable_Wrap(std::move(*both)));
        place += 2;
        continue;
      }
      is_alone = both.has_value();
    }
    if (is_alone) {
      y = called(children[place++].ptr(), y, given[2]);
      if (!y) return nullptr;
      continue;
    }
    const auto handed = py::reinterpret_steal<py::object>(PyObject_CallMethodObjArgs(
        of.sequence.ptr(), of.handed, given[0], y.ptr(), here.ptr(), rows.ptr(), handoff.ptr(),
        nullptr));
    if (!handed) return nullptr;
    std::tie(y, place) = handed.cast<std::tuple<py::object, size_t>>();
  }
  return y.release().ptr();
}

}  // namespace lokakern
