// The usual eager call of a converted layer, and its gradients, without Python's own work.
//
// `lokakern.nn.linear.Linear.forward` asks here first. Where anything is unusual (another dtype, a
// subclass, a transform, a static scale, ...) the answer is None, and Python makes the call.
#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/linear.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/csrc/utils/python_strings.h>

#include <map>

#include "layer.h"
#include "ops.h"

namespace lokakern {
namespace {

// A product's route, and at which m it has a kernel; see `lokakern.nn.routed_matmul`.
struct Route {
  c10::IValue text;
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
using Routes = std::array<Route, 3>;

Routes read_routes(pybind11::handle described) {
  Routes routes;
  size_t place = 0;
  for (const auto& item : described) {
    Route& route = routes.at(place++);
    const auto [text, is_checked, starts] =
        item.cast<std::tuple<std::string, bool,
                             std::array<std::vector<std::pair<int64_t, bool>>, 2>>>();
    route.text = text;
    route.is_plain = text.empty();
    route.is_checked = is_checked;
    route.starts = starts;
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
    if (!described.is_none()) place->second = std::make_unique<const Routes>(read_routes(described));
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
  if (known->size() > 65536) return {};
  const auto name = pybind11::reinterpret_borrow<pybind11::function>(find)(
      pybind11::reinterpret_borrow<pybind11::object>(activating),
      (*routes)[0].text.toStringRef(), m, k).cast<std::string>();
  Py_INCREF(activating);
  return (*known)[key] = name.empty() ? c10::IValue() : c10::IValue(name);
}

at::Tensor run_op(const char* name, std::initializer_list<c10::IValue> arguments) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  torch::jit::Stack stack(arguments);
  if (has_no_modes())
    replay_op(op, stack);
  else  // a backward pass may have modes that the forward pass did not have
    op.callBoxed(stack);
  return stack[0].toTensor();
}

at::Tensor multiply(const at::Tensor& a, const c10::IValue& b, const c10::IValue& data,
                    const c10::IValue& scale, const c10::IValue& bias, const Route& route) {
  return run_op("lokakern::routed_gemm",
                 {a, b, data, scale, bias, route.text, {}, {}, std::string(), false});
}

// As `RoutedLinear` in Python, for bfloat16 operands.
struct RoutedLinear : torch::autograd::Function<RoutedLinear> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x,
                            const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                            const Routes* routes) {
    context->save_for_backward({x, weight});
    context->saved_data["routes"] = reinterpret_cast<int64_t>(routes);
    context->saved_data["has_bias"] = bias.has_value();
    const Route& route = (*routes)[0];
    if (route.is_plain) return at::linear(x, weight, bias);
    return multiply(x, weight.t(), {}, {}, bias, route);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    const at::Tensor &grad = gradients[0], &x = saved[0], &weight = saved[1];
    at::Tensor to_x, to_weight, to_bias;
    if (!grad.defined()) return {to_x, to_weight, to_bias, {}};
    const auto* routes = reinterpret_cast<const Routes*>(context->saved_data["routes"].toInt());
    const bool has_bias = context->saved_data["has_bias"].toBool();  // none has no edge
    if (c10::GradMode::is_enabled()) {  // to be differentiated again: unquantized, in torch's order
      if (context->needs_input_grad(0)) to_x = grad.mm(weight);
      if (context->needs_input_grad(1)) to_weight = grad.t().mm(x);
      if (has_bias && context->needs_input_grad(2)) to_bias = grad.sum(0);
      return {to_x, to_weight, to_bias, {}};
    }
    if (context->needs_input_grad(1)) {
      const Route& route = (*routes)[2];
      to_weight = route.is_plain ? grad.t().mm(x)
                                 : run_op("lokakern::weight_gradient", {grad, x, route.text});
    }
    if (context->needs_input_grad(0)) {
      const Route& route = (*routes)[1];
      to_x = route.is_plain ? grad.mm(weight) : multiply(grad, weight, {}, {}, {}, route);
    }
    if (has_bias && context->needs_input_grad(2)) to_bias = grad.sum(0);
    return {to_x, to_weight, to_bias, {}};
  }
};

bool is_usual(const at::Tensor& x, const at::Tensor& like) {
  static thread_local Words words;
  words.clear();
  return x.scalar_type() == at::kBFloat16 && x.device() == like.device() &&
         add_tensor(x, {}, words);
}

// Nothing between torch's operators and their kernels that a layer has to know of.
bool is_usual_state(const at::Tensor& x) {
  if (!has_no_modes() || at::impl::torch_function_mode_enabled() ||
      torch::jit::tracer::isTracing())
    return false;
  const auto device = x.device().type();
  return !at::autocast::is_autocast_enabled(device) ||
         at::autocast::get_autocast_dtype(device) == at::kBFloat16;
}

PyObject* item(PyObject* dict, PyObject* name) {
  return dict && PyDict_CheckExact(dict) ? PyDict_GetItemWithError(dict, name) : nullptr;
}

bool is_none(PyObject* object) { return !object || object == Py_None; }

// A reference of its own: another thread may replace a weight.
std::optional<at::Tensor> tensor_in(PyObject* object) {
  if (!object || !THPVariable_CheckExact(object)) return std::nullopt;
  return THPVariable_Unpack(object);
}

struct Names {
  PyObject *parameters, *buffers, *weight, *bias, *fp8_data, *fp8_views, *held, *plan, *kept,
      *gathered;
};

const Names& names() {
  static const Names made = [] {
    const auto name = [](const char* text) { return PyUnicode_InternFromString(text); };
    return Names{name("_parameters"), name("_buffers"), name("weight"),   name("bias"),
                 name("fp8_data"),    name("_fp8_views"), name("held_weight"), name("_plan"),  name("_kept"),
                 name("_gathered")};
  }();
  return made;
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

at::Tensor quantized(const at::Tensor& x, const at::Tensor& weight,
                     const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& data,
                     const std::optional<at::Tensor>& scale, const Routes& routes, bool has_grad) {
  const at::Tensor rows = rows_of(x);
  if (has_grad) return shaped(RoutedLinear::apply(rows, weight, bias, &routes), x);
  const bool is_read = !data || routes[0].is_checked;
  return shaped(multiply(rows, is_read ? c10::IValue(weight.t()) : c10::IValue(), data, scale, bias,
                         routes[0]),
                x);
}

}  // namespace

PyObject* call_layer(PyObject*, PyObject* const* given, Py_ssize_t count) {
  if (count != 3 && count != 6) {
    PyErr_SetString(PyExc_TypeError, "call_layer: expected 3 or 6 arguments");
    return nullptr;
  }
  PyObject** const place = _PyObject_GetDictPtr(given[0]);
  PyObject* const dict = place ? *place : nullptr;
  PyObject* const plan = item(dict, names().plan);
  const Routes* const routes = is_none(plan) ? nullptr : routes_of(plan, given[2]);
  if (!routes || !is_none(item(dict, names().kept)) || !is_none(item(dict, names().gathered)))
    Py_RETURN_NONE;
  PyObject* const parameters = item(dict, names().parameters);
  PyObject* const bias_object = item(parameters, names().bias);
  const auto x = tensor_in(given[1]), weight = tensor_in(item(parameters, names().weight)),
             bias = tensor_in(bias_object);
  if (!x || !weight || (!bias && !is_none(bias_object)) || !is_usual(*x, *x) ||
      !is_usual(*weight, *x) || (bias && !is_usual(*bias, *x)) || !is_usual_state(*x))
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
                       held->scalar_type() == x->scalar_type() &&
                       held->sizes() == weight->sizes() &&
                       (held->stride(-1) == 1 || x->stride(-1) != 1);
  c10::IValue activation, activator;
  if (count == 6) {
    if (!data || (*routes)[0].is_checked) Py_RETURN_NONE;
    activation = THPUtils_unpackString(given[3]);
    activator = activator_of(given[4], routes, m, x->size(-1), given[5]);
    if (activator.isNone()) Py_RETURN_NONE;
  }
  at::Tensor y;
  {
    const pybind11::gil_scoped_release others;  // a launch waits where the queue is full
    if (count == 6)
      y = shaped(run_op("lokakern::activated_gemm", {rows_of(*x), activation, activator, *data,
                                                      *scale, bias, (*routes)[0].text}),
                 *x);
    else if (quantizes)
      y = quantized(*x, *weight, bias, data, scale, *routes, has_grad);
    else
      y = at::linear(*x, is_held ? *held : *weight, bias);
  }
  return THPVariable_Wrap(std::move(y));
}

}  // namespace lokakern
