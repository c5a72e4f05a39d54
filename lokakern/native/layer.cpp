// The usual eager call of a converted layer, and its gradients, without Python's own work.
//
// `lokakern.nn.linear.Linear.forward` asks here first: operands in the dtype of the routes, bfloat16
// or float16, or those that autocast casts to it. Where anything is unusual (another dtype, a
// subclass, a transform, a static scale, ...) the answer is None, and Python makes the call.
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_strings.h>

#include <algorithm>
#include <limits>
#include <map>

#include "layer.h"
#include "module.h"
#include "ops.h"

namespace lokakern {

bool is_usual(const at::Tensor& x, const at::Tensor& like) {
  static thread_local Words words;
  words.clear();
  return x.device() == like.device() && add_tensor(x, {}, words);
}

namespace {

// A product's route, and at which m it has a kernel; see `lokakern.nn.routed_matmul`.
struct Route {
  c10::IValue text, scales;  // scales: granularity of the right operand
  bool is_plain = false, is_checked = false;
  std::array<std::vector<std::pair<int64_t, bool>>, 2> starts;  // m that 16 divides, and others

  bool quantizes_at(int64_t m) const {
    if (is_plain) return false;
    const auto& segments = starts[m % 16 != 0];
    size_t last = 0;
    while (last + 1 < segments.size() && segments[last + 1].first <= m) ++last;
    return segments[last].second;
  }
};

// The routes of output, grad_input and grad_weight.
struct Routes : std::array<Route, 3> {
  at::ScalarType half = at::kBFloat16;  // of operands and outputs; kHalf: float16
  // Least m at which one of them quantizes, of m that 16 divides, and of others.
  std::array<int64_t, 2> quantizes_from{std::numeric_limits<int64_t>::max(),
                                        std::numeric_limits<int64_t>::max()};
  bool is_held = false;  // whether the layer may multiply another weight than its parameter
  bool is_plain = true;  // whether none has a kernel, nor tells a dtype
};

Routes read_routes(pybind11::handle described, std::string_view plan) {
  Routes routes;
  routes.is_held = plan.substr(0, plan.find('\0')).find("held") != plan.npos;
  if (plan.find(";float16") != plan.npos) routes.half = at::kHalf;  // as `dtype_of` in Python
  size_t place = 0;
  for (const auto& item : described) {
    Route& route = routes.at(place++);
    const auto [text, is_checked, starts] =
        item.cast<std::tuple<std::string, bool,
                             std::array<std::vector<std::pair<int64_t, bool>>, 2>>>();
    route.text = text;
    route.scales = text.substr(0, text.find(';'));
    route.is_plain = text.empty();
    routes.is_plain = routes.is_plain && route.is_plain;
    route.is_checked = is_checked;
    route.starts = starts;
    for (size_t kind = 0; kind < starts.size(); ++kind)
      for (const auto& [start, is_quantizing] : starts[kind])
        if (is_quantizing)
          routes.quantizes_from[kind] = std::min(routes.quantizes_from[kind], start);
  }
  return routes;
}

// By the layer's plan, which stays alive here: there are as many as choices. Null: Python's.
const Routes* routes_of(PyObject* plan, PyObject* describe) {
  static auto* const known = new std::unordered_map<PyObject*, std::unique_ptr<const Routes>>;
  const auto found = known->find(plan);
  if (found != known->end()) return found->second.get();
  if (known->size() > 65536) return nullptr;
  const auto held = pybind11::reinterpret_borrow<pybind11::object>(plan);
  const auto described =
      pybind11::reinterpret_steal<pybind11::object>(PyObject_CallOneArg(describe, plan));
  if (!described) throw pybind11::error_already_set();
  const auto [place, is_new] = known->try_emplace(plan);
  if (is_new) {  // else another thread was here meanwhile, and its routes are in use
    Py_INCREF(plan);
    if (!described.is_none())
      place->second = std::make_unique<const Routes>(
          read_routes(described, held.cast<std::string_view>()));
  }
  return place->second.get();
}

// Name of the kernel that activates and quantizes the input at m, or None: what ``find`` tells.
c10::IValue activator_of(PyObject* activating, const Routes* routes, int64_t m, int64_t k,
                         PyObject* find) {
  using Key = std::tuple<PyObject*, const Routes*, int64_t, int64_t>;
  static auto* const known = new std::map<Key, c10::IValue>;
  const Key key{activating, routes, m, k};
  const auto found = known->find(key);
  if (found != known->end()) return found->second;
  if (known->size() > 65536) known->clear();  // a process that meets this many m; keys stay alive
  const auto name = pybind11::reinterpret_borrow<pybind11::function>(find)(
      pybind11::reinterpret_borrow<pybind11::object>(activating),
      (*routes)[0].text.toStringRef(), m, k).cast<std::string>();
  Py_INCREF(activating);
  return (*known)[key] = name.empty() ? c10::IValue() : c10::IValue(name);
}

torch::jit::Stack results_of(const char* name, std::initializer_list<c10::IValue> arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack(arguments);
  if (has_no_modes()) {
    SHOW_CALL(name);
    replay_op(op, stack);
  } else {  // a backward pass may have modes that the forward pass did not have
    op.callBoxed(stack);
  }
  return stack;
}

at::Tensor run_op(const char* name, std::initializer_list<c10::IValue> arguments) {
  return results_of(name, arguments)[0].toTensor();
}

at::Tensor multiply(const at::Tensor& a, const c10::IValue& b, const c10::IValue& data,
                    const c10::IValue& scale, const c10::IValue& bias, const Route& route) {
  return run_op("lokakern::routed_gemm",
                 {a, b, data, scale, bias, route.text, {}, {}, std::string(), false});
}

c10::IValue value_of(const at::Tensor& x) { return x.defined() ? c10::IValue(x) : c10::IValue(); }

// Raises what Python raises about a weight that changed since the forward pass.
void check_unchanged(const at::Tensor& weight, int64_t version) {
  if (version < 0 || static_cast<int64_t>(weight._version()) == version) return;
  const pybind11::gil_scoped_acquire python;
  try {
    pybind11::module_::import("lokakern.nn.routed_matmul").attr("unchanged")(weight, version);
    return;
  } catch (pybind11::error_already_set& error) {
    error.restore();
  }
  python_error raised;  // which the backward pass of another thread may carry
  raised.persist();
  throw raised;
}

// As `RoutedLinear` in Python, for x in the dtype of the routes and a weight in that or float32.
struct RoutedLinear : torch::autograd::Function<RoutedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const Routes* routes) {
    const Route &to_output = (*routes)[0], &to_input = (*routes)[1];
    at::Tensor kept = weight, turned, turned_scale;
    const auto half = x.scalar_type();
    if (weight.scalar_type() != half) {  // it may change before the backward pass
      if (to_input.is_plain) {
        kept = weight.to(half);
      } else if (x.requires_grad() && to_input.quantizes_at(x.size(0))) {
        const auto found = results_of("lokakern::quantize_weight",
                                      {weight.detach().t(), to_input.scales});
        turned = found[0].toTensor();
        turned_scale = found[1].toTensor();
        kept = at::Tensor();
      }
    }
    context->save_for_backward({x, kept, turned, turned_scale});
    context->saved_data["routes"] = reinterpret_cast<int64_t>(routes);
    context->saved_data["has_bias"] = bias.has_value();
    if (!kept.is_same(weight)) {
      context->saved_data["given"] = weight;
      context->saved_data["version"] =
          weight.is_inference() ? int64_t{-1} : static_cast<int64_t>(weight._version());
    }
    const at::Tensor& read = kept.defined() ? kept : weight;
    if (to_output.is_plain) return at::linear(x, read.to(half), bias);
    return multiply(x, read.t(), {}, {}, bias, to_output);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &grad = gradients[0], &x = saved[0], &weight = saved[1];
    at::Tensor to_x, to_weight, to_bias;
    if (!grad.defined()) return {to_x, to_weight, to_bias, {}};
    const auto* routes = reinterpret_cast<const Routes*>(context->saved_data["routes"].toInt());
    const bool has_bias = context->saved_data["has_bias"].toBool();  // none has no edge
    const auto found = context->saved_data.find("given");
    const bool is_given = found != context->saved_data.end();
    const at::Tensor given = is_given ? found->second.toTensor() : weight;
    if (c10::GradMode::is_enabled()) {  // to be differentiated again: unquantized, in torch's order
      if (is_given) check_unchanged(given, context->saved_data["version"].toInt());
      if (context->needs_input_grad(0)) to_x = grad.mm(given.to(x.scalar_type()));
      if (context->needs_input_grad(1)) to_weight = grad.t().mm(x).to(given.scalar_type());
      if (has_bias && context->needs_input_grad(2)) to_bias = grad.sum(0);
      return {to_x, to_weight, to_bias, {}};
    }
    if (context->needs_input_grad(1)) {
      const Route& route = (*routes)[2];
      to_weight = route.is_plain ? grad.t().mm(x)
                                 : run_op("lokakern::weight_gradient", {grad, x, route.text});
      to_weight = to_weight.to(given.scalar_type());
    }
    if (context->needs_input_grad(0)) {
      const Route& route = (*routes)[1];
      to_x = route.is_plain ? grad.mm(weight)
                            : multiply(grad, value_of(weight), value_of(saved[2]),
                                       value_of(saved[3]), {}, route);
    }
    if (has_bias && context->needs_input_grad(2)) to_bias = grad.sum(0);
    return {to_x, to_weight, to_bias, {}};
  }
};

// Whether the operands are multiplied in this dtype, as Python asks too. Weights of the other one
// are Python's, and so is what is bfloat16 where autocast casts to float16.
bool fits(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
          at::ScalarType half) {
  const auto device = x.device().type();
  const bool is_cast = at::autocast::is_autocast_enabled(device);
  if (is_cast && at::autocast::get_autocast_dtype(device) != half) return false;
  const auto has = [&](const at::Tensor& tensor, auto... others) {
    const auto dtype = tensor.scalar_type();
    return dtype == half || (is_cast && (... || (dtype == others)));
  };
  return has(x, at::kFloat, at::kHalf) && has(weight, at::kFloat) &&
         (!bias || has(*bias, at::kFloat, at::kHalf));
}

// Rows of x, of more dimensions than two.
at::Tensor rows_of(const at::Tensor& x) {
  return x.dim() == 2 ? x : x.reshape({-1, x.size(-1)});
}

at::Tensor shaped(const at::Tensor& y, const at::Tensor& x) {
  if (x.dim() == 2) return y;
  auto sizes = x.sizes().vec();
  sizes.back() = y.size(1);
  return y.view(sizes);
}

std::optional<at::Tensor> in_half(const std::optional<at::Tensor>& bias, const Routes& routes) {
  return bias ? std::optional(bias->to(routes.half)) : std::nullopt;
}

at::Tensor quantized(const at::Tensor& given, const at::Tensor& weight,
                     const std::optional<at::Tensor>& given_bias,
                     const std::optional<at::Tensor>& data, const std::optional<at::Tensor>& scale,
                     const Routes& routes, bool has_grad, bool is_recorded) {
  const at::Tensor x = given.to(routes.half);
  const auto bias = in_half(given_bias, routes);
  const at::Tensor rows = rows_of(x);  // last: gradients are passed on in this order
  if (has_grad) return shaped(RoutedLinear::apply(rows, weight, bias, &routes), x);
  c10::IValue right;
  if (!data || routes[0].is_checked)  // as `RoutedLinear` does, also without gradients
    right = (is_recorded && routes[1].is_plain ? weight.to(routes.half) : weight).t();
  return shaped(multiply(rows, right, data, scale, bias, routes[0]), x);
}

}  // namespace

bool is_unquantized(PyObject* plan, PyObject* describe, int64_t m, at::ScalarType half) {
  if (is_none(plan)) return true;  // of the class: no route
  const auto text = pybind11::handle(plan).cast<std::string_view>();
  if (text.empty()) return true;
  const Routes* const routes = routes_of(plan, describe);  // none of an altered weight
  return routes && !routes->is_held && routes->half == half && !(*routes)[0].quantizes_at(m);
}

namespace {

// Whether no product of a plan reads FP8 at the m of x.
bool is_unquantized_at(PyObject* plan, PyObject* given, PyObject* parameter, PyObject* describe) {
  const Routes* const routes = routes_of(plan, describe);
  const auto weight = tensor_in(parameter);
  if (!routes || routes->is_held || !weight ||
      reinterpret_cast<PyObject*>(Py_TYPE(given)) != THPVariableClass)
    return false;
  const at::Tensor x = THPVariable_Unpack(given);  // which another thread may release
  if (x.is_meta() || x.is_nested() || !x.dim() || !x.numel()) return false;
  // Python warns of dtypes that no kernel takes.
  if (x.scalar_type() != routes->half || !fits(x, *weight, std::nullopt, routes->half))
    return false;
  const int64_t m = x.numel() / x.size(-1);
  return m < routes->quantizes_from[m % 16 != 0] && is_usual_state();
}

// The output of `torch.nn.functional.linear`, or null with Python's error, where a layer is no more
// than that at the m of x; else nothing. Between the kernels of a model all memory that is read here is cold: with what
// `layer_output` reads, a layer took 2 to 3.5 us longer there than nn.Linear, although no longer if
// it was called again and again. This reads less than nn.Linear, which looks for its parameters in
// three places.
std::optional<PyObject*> linear_output(PyObject* layer, PyObject* x, PyObject* describe) {
  const auto imported = [](const char* module, const char* name) {
    return pybind11::object(pybind11::module_::import(module).attr(name)).release().ptr();
  };
  static PyObject* const linear = imported("torch.nn.functional", "linear");
  static PyObject* const own_class = imported("lokakern.nn.linear", "Linear");
  // A class of its own may have a weight that is no parameter.
  if (reinterpret_cast<PyObject*>(Py_TYPE(layer)) != own_class) return std::nullopt;
  PyObject* const dict = dict_of(layer);
  PyObject* const parameters = item(dict, names().parameters);
  const auto weight = pybind11::reinterpret_borrow<pybind11::object>(
      item(parameters, names().weight));
  const auto bias =
      pybind11::reinterpret_borrow<pybind11::object>(item(parameters, names().bias));
  if (!weight || !bias || item(dict, names().weight) || item(dict, names().bias))
    return std::nullopt;  // attributes hide parameters
  if (has_plan(dict) &&
      !is_unquantized_at(item(dict, names().plan), x, weight.ptr(), describe))
    return std::nullopt;
  PyObject* const given[] = {x, weight.ptr(), bias.ptr()};
  return PyObject_Vectorcall(linear, given, 3, nullptr);
}

}  // namespace

PyObject* call_layer(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 3 && count != 6) {
    PyErr_SetString(PyExc_TypeError, "call_layer: expected 3 or 6 arguments");
    return nullptr;
  }
  if (count == 3) {
    const auto y = linear_output(given[0], given[1], given[2]);
    if (y) return *y;
  }
  return layer_output(given, count);
}

PyObject* layer_output(PyObject* const* given, Py_ssize_t count) {
  PyObject* const dict = dict_of(given[0]);
  const Routes* const routes =
      has_plan(dict) ? routes_of(item(dict, names().plan), given[2]) : nullptr;
  if (!routes || !is_none(item(dict, names().kept)) || !is_none(item(dict, names().gathered)))
    Py_RETURN_NONE;
  if (item(dict, names().weight) || item(dict, names().bias))
    Py_RETURN_NONE;  // attributes, which hide parameters
  PyObject* const parameters = item(dict, names().parameters);
  PyObject* const bias_object = item(parameters, names().bias);
  const auto x = tensor_in(given[1]), weight = tensor_in(item(parameters, names().weight)),
             bias = tensor_in(bias_object);
  // A held weight without kernels may be of either dtype.
  const auto half = routes->is_plain && weight && weight->scalar_type() == at::kHalf ? at::kHalf
                                                                                     : routes->half;
  if (!x || !weight || (!bias && bias_object != Py_None) || !is_usual(*x, *x) ||
      !is_usual(*weight, *x) || (bias && !is_usual(*bias, *x)) || !is_usual_state() ||
      !fits(*x, *weight, bias, half))
    Py_RETURN_NONE;
  if (x->dim() < 2 || weight->dim() != 2 || x->size(-1) != weight->size(1) || !x->numel() ||
      (x->dim() > 2 && !x->is_contiguous()))
    Py_RETURN_NONE;
  const bool is_recorded = c10::GradMode::is_enabled();
  const bool has_grad =
      is_recorded &&
      (x->requires_grad() || weight->requires_grad() || (bias && bias->requires_grad()));
  const int64_t m = x->numel() / x->size(-1);
  const bool quantizes =
      (*routes)[0].quantizes_at(m) ||
      (has_grad && ((*routes)[1].quantizes_at(m) || (*routes)[2].quantizes_at(m)));
  const bool is_cast = weight->scalar_type() != half;
  if (quantizes && is_cast) {
    const auto is_checked = [](const Route& route) { return route.is_checked; };
    if (item(dict, names().has_parameter) != Py_True ||
        std::any_of(routes->begin(), routes->end(), is_checked))
      Py_RETURN_NONE;
  }
  PyObject* const buffers = item(dict, names().buffers);
  std::optional<at::Tensor> data, scale;
  PyObject* const stored = quantizes ? item(buffers, names().fp8_data) : nullptr;
  if (!is_none(stored)) {  // frozen
    PyObject* const views = item(dict, names().fp8_views);
    if (has_grad || is_none(views) || PyTuple_GET_ITEM(views, 0) != stored) Py_RETURN_NONE;
    data = tensor_in(PyTuple_GET_ITEM(views, 1));
    scale = tensor_in(PyTuple_GET_ITEM(views, 2));
    if (!data || !scale || data->device() != x->device()) Py_RETURN_NONE;
  }
  const auto held = tensor_in(item(buffers, names().held));  // see `Routed.held`
  const bool is_held = held && !is_recorded && held->device() == x->device() &&
                       held->scalar_type() == weight->scalar_type() &&
                       held->sizes() == weight->sizes() &&
                       (held->stride(-1) == 1 || x->stride(-1) != 1);
  c10::IValue activation, activator;
  if (count == 6) {
    if (!data || (*routes)[0].is_checked || x->scalar_type() != half) Py_RETURN_NONE;
    activation = THPUtils_unpackString(given[3]);
    activator = activator_of(given[4], routes, m, x->size(-1), given[5]);
    if (activator.isNone()) Py_RETURN_NONE;
  }
  at::Tensor y;
  {
    const pybind11::gil_scoped_release others;  // a launch waits where the queue is full
    if (count == 6)
      y = shaped(run_op("lokakern::activated_gemm",
                        {rows_of(*x), activation, activator, *data, *scale,
                         in_half(bias, *routes), (*routes)[0].text}),
                 *x);
    else if (quantizes)
      y = quantized(*x, *weight, bias, data, scale, *routes, has_grad, is_recorded);
    else
      y = at::linear(*x, is_held ? *held : *weight, bias);
  }
  return THPVariable_Wrap(std::move(y));
}

// --- chains of layers

namespace {

// Whether a call of a module runs only its class's forward, and its attributes are those of
// ``fact``: module, class, names and objects of attributes that it has, and names of others.
bool is_unchanged(PyObject* fact, PyObject* owner) {
  PyObject* const given = PyTuple_GET_ITEM(fact, 0);
  PyObject* const module = given == Py_None ? owner : given;
  PyObject* const dict = dict_of(module);
  if (reinterpret_cast<PyObject*>(Py_TYPE(module)) != PyTuple_GET_ITEM(fact, 1) || !dict ||
      !is_empty(item(dict, names().hooks)) || !is_empty(item(dict, names().pre_hooks)) ||
      item(dict, names().forward))
    return false;
  PyObject* const present = PyTuple_GET_ITEM(fact, 2);
  for (Py_ssize_t i = 0; i + 1 < PyTuple_GET_SIZE(present); i += 2)
    if (item(dict, PyTuple_GET_ITEM(present, i)) != PyTuple_GET_ITEM(present, i + 1)) return false;
  PyObject* const absent = PyTuple_GET_ITEM(fact, 3);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(absent); ++i)
    if (item(dict, PyTuple_GET_ITEM(absent, i))) return false;
  return true;
}

// What a module has under a name in one of its dictionaries, such as "_buffers"; or null.
PyObject* held_by(PyObject* place, PyObject* owner) {
  PyObject* const module = PyTuple_GET_ITEM(place, 0);
  return item(item(dict_of(module == Py_None ? owner : module), PyTuple_GET_ITEM(place, 1)),
              PyTuple_GET_ITEM(place, 2));
}

bool is_beside(const at::Tensor& tensor, const at::Tensor& x) {
  return tensor.scalar_type() == x.scalar_type() && tensor.device() == x.device();
}

}  // namespace

PyObject* call_chain(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 4 || !PyTuple_Check(given[1]) || PyTuple_GET_SIZE(given[1]) < 6 ||
      !PyTuple_Check(given[3])) {
    PyErr_SetString(PyExc_TypeError, "call_chain: expected a tensor, a recipe, a module, a tuple");
    return nullptr;
  }
  PyObject* const recipe = given[1];
  PyObject *const plan = PyTuple_GET_ITEM(recipe, 0), *const facts = PyTuple_GET_ITEM(recipe, 1),
           *const children = PyTuple_GET_ITEM(recipe, 2),
           *const operands = PyTuple_GET_ITEM(recipe, 3),
           *const unread = PyTuple_GET_ITEM(recipe, 4), *const owner = given[2],
           *const beside = given[3];
  const auto half = PyTuple_GET_ITEM(recipe, 5) == Py_True ? at::kHalf : at::kBFloat16;
  if (reinterpret_cast<PyObject*>(Py_TYPE(given[0])) != THPVariableClass) Py_RETURN_NONE;
  const at::Tensor x = THPVariable_Unpack(given[0]);  // which another thread may release
  if (!is_usual(x, x) || x.scalar_type() != half || x.dim() < 2 || !is_usual_state() ||
      at::autocast::is_autocast_enabled(x.device().type()))
    Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(facts); ++i)
    if (!is_unchanged(PyTuple_GET_ITEM(facts, i), owner)) Py_RETURN_NONE;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(children); ++i) {
    PyObject* const child = PyTuple_GET_ITEM(children, i);
    if (held_by(child, owner) != PyTuple_GET_ITEM(child, 3)) Py_RETURN_NONE;
  }
  bool has_grad = x.requires_grad();
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(unread); ++i) {
    const auto tensor = tensor_in(held_by(PyTuple_GET_ITEM(unread, i), owner));
    if (!tensor || !is_beside(*tensor, x)) Py_RETURN_NONE;
    has_grad |= tensor->requires_grad();
  }
  // The signature of call_op, by the operands that the modules have now.
  const Py_ssize_t inner = PyTuple_GET_SIZE(operands), outer = PyTuple_GET_SIZE(beside);
  c10::SmallVector<at::Tensor, 40> held;
  held.reserve(inner + outer + 1);  // so that none moves
  Words words;
  Inputs inputs;
  const auto add = [&](const at::Tensor& tensor) {
    held.push_back(tensor);
    words.push_back(1);
    if (tensor.device() != x.device() || !add_tensor(held.back(), inputs, words)) return false;
    inputs.push_back(&held.back());
    return true;
  };
  words.push_back(x.device().index());
  add_text("lokakern::routed_chain", words);
  if (has_grad && c10::GradMode::is_enabled()) Py_RETURN_NONE;
  if (!add(rows_of(x))) Py_RETURN_NONE;
  words.append({6, inner + outer});
  for (Py_ssize_t i = 0; i < inner; ++i) {
    PyObject* const place = PyTuple_GET_ITEM(operands, i);
    if (place == Py_None) {
      words.push_back(0);
      continue;
    }
    PyObject* const kind = PyTuple_GET_ITEM(place, 3);  // None, bytes (False), or True: x's dtype
    PyObject* const object = held_by(place, owner);
    if (kind == Py_None) {
      if (object != Py_None) Py_RETURN_NONE;
      words.push_back(0);
      continue;
    }
    const auto tensor = tensor_in(object);
    if (!tensor || (kind == Py_True && !is_beside(*tensor, x)) || !add(*tensor))
      Py_RETURN_NONE;
    has_grad |= kind == Py_True && tensor->requires_grad();
  }
  for (Py_ssize_t i = 0; i < outer; ++i) {
    const auto tensor = tensor_in(PyTuple_GET_ITEM(beside, i));
    if (!tensor || !is_usual(*tensor, x) || !is_beside(*tensor, x) ||
        tensor->dim() != x.dim() ||
        tensor->sizes().slice(0, x.dim() - 1) != x.sizes().slice(0, x.dim() - 1))
      Py_RETURN_NONE;
    has_grad |= tensor->requires_grad();
    if ((has_grad && c10::GradMode::is_enabled()) || !add(rows_of(*tensor))) Py_RETURN_NONE;
  }
  if (has_grad && c10::GradMode::is_enabled()) Py_RETURN_NONE;
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(plan, &size);  // kept in the object
  if (!text) return nullptr;
  words.push_back(5);
  add_text({text, static_cast<size_t>(size)}, words);
  const auto entry = book().find(words);
  if (!entry->plan) Py_RETURN_NONE;
  Results results;
  at::Tensor y;
  {
    SHOW_CALL("lokakern::routed_chain");
    const pybind11::gil_scoped_release others;  // a launch waits where the queue is full
    entry->plan->run(inputs, results);
    y = shaped(results[0], x);
  }
  return THPVariable_Wrap(std::move(y));
}

}  // namespace lokakern
