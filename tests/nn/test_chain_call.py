"""Warm calls of chains in C++: their results, and what makes Python look at the modules again."""

from __future__ import annotations

import copy
import functools
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lokakern import mods, numerics
from lokakern.errors import UnsupportedError
from lokakern.native import NATIVE
from lokakern.nn import chain_call, routed_chain
from lokakern.nn.adoption import Chosen, apply_choice, remove_choice
from lokakern.nn.chain_plan import ChainLayer, plan_text
from lokakern.nn.crossed_forward import set_crosses
from lokakern.nn.linear import Linear
from lokakern.nn.linear_norm_act import LinearNormAct
from lokakern.nn.routed_matmul import in_dtype
from lokakern.nn.static_handoff import remove_handoff, set_handoff
from lokakern.nn.tail import Tail
from lokakern.types import Granularity
from tests.nn.test_crossed_forward import FULL, KINDS, Full, LowRank, N, crossed
from tests.nn.test_crossed_forward import rows as cross_rows
from tests.nn.test_routed_chain import BY_ROWS, PLAN, layer_of, plan_of, plan_of_one
from tests.support import native, routed_layers
from tests.support.routed_layers import BY_ROW, K, rows

Call = Callable[..., Tensor]
DTYPES = torch.bfloat16, torch.float16


@pytest.fixture
def warm(calls: list[Any]) -> Iterator[list[int]]:
    """Numbers of calls that C++ made, and of those that it left to Python."""
    with native.in_use() as library, pytest.MonkeyPatch.context() as patch:
        made = [0, 0]

        def counted(*given: Any) -> Any:
            y = library.call_chain(*given)
            made[y is None] += 1
            return y

        patch.setattr(NATIVE, "call_chain", counted)
        yield made


def sequence(dropout: float = 0.5, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """A chain of two layers among modules that are passed over, and another layer."""
    torch.manual_seed(0)
    model = nn.Sequential(
        Linear(K, 48), nn.LayerNorm(48), nn.ReLU(), nn.Dropout(dropout), nn.Identity(),
        Linear(48, 40), nn.Hardswish(), Linear(40, 8),
    ).to(dtype).eval()  # fmt: skip
    for parameter in model.parameters():
        if parameter.dim() == 1:
            nn.init.uniform_(parameter, -0.5, 1.0)
    return chained(model, in_dtype(PLAN, dtype))


def chained(model: nn.Sequential, plan: str = PLAN, key: str = "") -> nn.Sequential:
    count = len(model)
    set_handoff(model, [""] * count, [""] * count, key, [plan] + [""] * (count - 1))
    return model


def warmed(call: Call, *given: Tensor, calls: list[Any]) -> None:
    """Call until C++ makes the calls of chains."""
    count = len(calls)
    call(*given)
    for operands in calls[count:] or list(calls):
        for _ in range(2):
            NATIVE.module.replay_chain(*operands)
    for _ in range(2):
        call(*given)


def in_python(call: Call, *given: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(NATIVE, "call_chain", None)
        patch.setattr(NATIVE, "call_op", None)
        return call(*given)


# --- sequences


def hooked(model: nn.Sequential) -> None:
    model[0].register_forward_hook(lambda _, __, y: y * 2)


def hooked_norm(model: nn.Sequential) -> None:
    model[1].register_forward_pre_hook(lambda _, given: (given[0] * 2,))


def hooked_activation(model: nn.Sequential) -> None:
    model[2].register_forward_hook(lambda _, __, y: y * 2)


def hooked_dropout(model: nn.Sequential) -> None:
    model[3].register_forward_hook(lambda _, __, y: y * 2)


def with_a_forward(model: nn.Sequential) -> None:
    model[4].forward = lambda x: x * 2


def with_eps(model: nn.Sequential) -> None:
    model[1].eps = 0.5


def with_another_shape(model: nn.Sequential) -> None:
    model[1].normalized_shape = (24,)
    model[1].forward = lambda x: x * 2


def in_training(model: nn.Sequential) -> None:
    model[3].train()


def swapped(model: nn.Sequential) -> None:
    model[2] = nn.SiLU()


def swapped_in_place(model: nn.Sequential) -> None:
    model._modules["5"] = nn.Linear(48, 40).bfloat16()


def of_another_class(model: nn.Sequential) -> None:
    model[2].__class__ = nn.SiLU


def without_bias(model: nn.Sequential) -> None:
    model[0].bias = None


def without_norm_bias(model: nn.Sequential) -> None:
    model[1].bias = None


def shadowed(model: nn.Sequential) -> None:
    vars(model[0])["bias"] = torch.ones(48).bfloat16()


def of_float32(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[1].weight.float())
    model[1].bias = nn.Parameter(model[1].bias.float())
    model[1].forward = lambda x: x * 2


def with_a_weight_of_float32(model: nn.Sequential) -> None:
    """No launch reads this weight."""
    model[0].weight.data = model[0].weight.data.float()
    model[0].forward = lambda x: nn.functional.linear(x, model[0].weight.bfloat16())


def parametrized(model: nn.Sequential) -> None:
    nn.utils.parametrizations.weight_norm(model[0])


def padded(model: nn.Sequential) -> None:
    assert mods.apply(model[0], [mods.Pad(k=20, n=1)]).changed


def chosen_again(model: nn.Sequential) -> None:
    apply_choice(model[0], Chosen("other", (BY_ROW, "", ""), True))


def without_launches(model: nn.Sequential) -> None:
    chained(model, plan_of(first=64))


def undone(model: nn.Sequential) -> None:
    remove_handoff(model)


LEFT_TO_PYTHON = [
    hooked, hooked_norm, hooked_activation, hooked_dropout, with_a_forward, with_eps,
    with_another_shape, in_training, swapped, swapped_in_place, of_another_class, without_bias,
    without_norm_bias, shadowed, of_float32, with_a_weight_of_float32, parametrized, padded,
    chosen_again, without_launches, undone,
]  # fmt: skip


@pytest.mark.parametrize("place", [2, 6])
def test_another_gelu_is_seen(place: int, calls: list[Any], warm: list[int]) -> None:
    """The only activation whose function depends on an attribute."""
    torch.manual_seed(0)
    model = nn.Sequential(
        Linear(K, 48), nn.LayerNorm(48), nn.GELU(), nn.Dropout(0.5), nn.Identity(),
        Linear(48, 40), nn.GELU(), Linear(40, 8),
    ).bfloat16().eval()  # fmt: skip
    model = chained(model, PLAN.replace("relu", "gelu").replace("hardswish", "gelu"))
    x = rows()
    warmed(model, x, calls=calls)
    y, count = model(x), warm[0]
    assert count == 2 and torch.equal(y, in_python(model, x))
    model[place].approximate = "tanh"
    found = model(x)
    assert torch.equal(found, in_python(model, x)) and not torch.equal(found, y)
    assert warm[0] == count


@pytest.mark.parametrize("change", LEFT_TO_PYTHON)
def test_what_the_modules_show_is_seen(
    change: Callable[[nn.Sequential], None], calls: list[Any], warm: list[int]
) -> None:
    model, x = sequence(), rows()
    warmed(model, x, calls=calls)
    y, count = model(x), warm[0]
    assert count == 2 and torch.equal(y, in_python(model, x))
    change(model)
    torch.manual_seed(3)
    found = model(x)
    torch.manual_seed(3)
    assert torch.equal(found, in_python(model, x)) and not torch.equal(found, y)
    assert warm[0] == count


def with_another_bias(model: nn.Sequential) -> None:
    model[0].bias = nn.Parameter(model[0].bias * 2, requires_grad=False)


def with_another_norm_weight(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(model[1].weight * 2)


def with_bias_data(model: nn.Sequential) -> None:
    model[5].bias.data = model[5].bias.data * 2


def with_another_buffer(model: nn.Sequential) -> None:
    buffers = model[0]._buffers
    buffers["chain_scale_row"] = (buffers["chain_scale_row"].view(torch.float32) * 2).view(
        torch.uint8
    )


def with_loaded_weights(model: nn.Sequential) -> None:
    model.load_state_dict({name: x * 2 for name, x in model.state_dict().items()})


def of_copies(model: nn.Sequential) -> None:
    """As `Module.to` leaves it on another device, with other addresses."""
    model._apply(lambda x: x.clone() * 2 if x.dtype is torch.bfloat16 else x.clone())


@pytest.mark.parametrize(
    "change",
    [
        with_another_bias, with_another_norm_weight, with_bias_data, with_another_buffer,
        with_loaded_weights, of_copies,
    ],
)  # fmt: skip
def test_tensors_are_those_of_the_modules(
    change: Callable[[nn.Sequential], None], calls: list[Any], warm: list[int]
) -> None:
    model, x = sequence(), rows()
    warmed(model, x, calls=calls)
    y = model(x)
    change(model)
    for _ in range(2):  # a recipe may be made anew
        found = model(x)
    assert warm[0] > 2 and torch.equal(found, in_python(model, x)) and not torch.equal(found, y)


class Doubling(TorchFunctionMode):
    """A mode that sees functions of torch."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        y = function(*args, **(kwargs or {}))
        return y * 2 if function is nn.functional.relu else y


class Seeing(TorchDispatchMode):
    """A mode that sees operators."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


def under_a_function_mode(model: nn.Sequential, x: Tensor) -> Tensor:
    with Doubling():
        return model(x)


def under_a_dispatch_mode(model: nn.Sequential, x: Tensor) -> Tensor:
    with Seeing():
        return model(x)


def under_autocast(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model(x)


def under_a_transform(model: nn.Sequential, x: Tensor) -> Tensor:
    return torch.func.vmap(model)(x.view(1, *x.shape))


def traced(model: nn.Sequential, x: Tensor) -> Tensor:
    return torch.jit.trace(model, x, check_trace=False)(x)


def in_forward_mode(model: nn.Sequential, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        return model(x)


def under_a_global_hook(model: nn.Sequential, x: Tensor) -> Tensor:
    hook = nn.modules.module.register_module_forward_hook(lambda _, __, y: y * 2)
    try:
        return model(x)
    finally:
        hook.remove()


def of_a_parameter(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(nn.Parameter(x, requires_grad=False))


def with_gradients(model: nn.Sequential, x: Tensor) -> Tensor:
    with torch.enable_grad():
        y = model(x)
        assert y.requires_grad
    return y.detach()


def with_a_gradient_of_x(model: nn.Sequential, x: Tensor) -> Tensor:
    model.requires_grad_(False)
    with torch.enable_grad():
        y = model(x.clone().requires_grad_())
        assert y.requires_grad
    return y.detach()


def with_gradients_of_an_unread_weight(model: nn.Sequential, x: Tensor) -> Tensor:
    model.requires_grad_(False)
    model[0].weight.requires_grad_()
    return with_gradients(model, x)


def of_float64(model: nn.Sequential, x: Tensor) -> Tensor:
    return copy.deepcopy(model).double()(x.double())


@pytest.mark.parametrize(
    "run",
    [
        under_a_function_mode, under_a_dispatch_mode, under_autocast, under_a_transform, traced,
        in_forward_mode, under_a_global_hook, of_a_parameter, with_gradients,
        with_a_gradient_of_x, with_gradients_of_an_unread_weight, of_float64,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_unusual_calls_stay_in_python(
    run: Callable[[nn.Sequential, Tensor], Tensor], calls: list[Any], warm: list[int]
) -> None:
    model, x = sequence(), rows()
    warmed(model, x, calls=calls)
    count = warm[0]
    found = run(model, x)
    assert warm[0] == count
    assert torch.equal(found, in_python(lambda x: run(model, x), x))
    model.requires_grad_(False)
    with torch.enable_grad():  # nothing needs a gradient
        assert torch.equal(model(x), in_python(model, x)) and warm[0] == count + 1


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_of_any_layout_and_size(
    dtype: torch.dtype, calls: list[Any], warm: list[int]
) -> None:
    model, rows = sequence(dtype=dtype), lambda *m, **k: routed_layers.rows(*m, **k).to(dtype)
    whole = rows()
    layouts = (whole.view(3, 16, K), rows(k=2 * K)[:, ::2], whole.t().contiguous().t())
    for x in (whole, rows(17), *layouts, rows(64), rows(80)):
        warmed(model, x, calls=calls)
        before = warm[0]
        assert torch.equal(model(x), in_python(model, x))
        assert warm[0] == before + 1
    for x in (rows(5), rows()[0], rows(0)):  # no launches
        before = list(warm)
        assert torch.equal(model(x), in_python(model, x))
        assert warm == before
    assert len(model._chain_recipes) == 1
    with pytest.raises(RuntimeError):
        model(rows(k=32))


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_chain_takes_the_other_dtype(
    dtype: torch.dtype, calls: list[Any], warm: list[int]
) -> None:
    model, x = sequence(dtype=dtype), rows().to(dtype)
    (other,) = {*DTYPES} - {dtype}
    warmed(model, x, calls=calls)
    (recipe,) = model._chain_recipes.values()
    assert warm[0] == 1 and recipe.is_half is (dtype is torch.float16)
    assert NATIVE.call_chain is not None
    assert NATIVE.call_chain(x, recipe, model, ()) is not None
    assert NATIVE.call_chain(x.to(other), recipe, model, ()) is None
    count = warm[0]
    with pytest.raises(RuntimeError, match="dtype"):
        model(x.to(other))
    weight = model[0].weight.data
    model[0].weight.data = weight.to(other)  # which no launch reads
    with pytest.raises(RuntimeError, match="dtype"):
        model(x)
    model[0].weight.data = weight
    assert model(x).dtype is dtype and warm[0] == count + 1
    count += 1
    model.to(other)
    _, operands, plan = calls[0]
    operands = [x.to(other) if x is not None and x.dtype is dtype else x for x in operands]
    for _ in range(3):  # by a call of the op, which anybody may make
        NATIVE.module.replay_chain(x.to(other), operands, plan)
    for _ in range(3):
        assert torch.equal(model(x.to(other)), nn.Sequential(*model)(x.to(other)))
    assert NATIVE.call_chain(x.to(other), recipe, model, ()) is None
    assert warm[0] == count


def test_a_chain_of_rows_that_a_hook_adds(calls: list[Any]) -> None:
    model = nn.Sequential(nn.Identity(), *sequence())
    set_handoff(model, [""] * 9, [""] * 9, "", ["", PLAN, *[""] * 7])
    model(rows(4))
    assert not calls
    model[0].register_forward_hook(lambda _, __, y: y.repeat(12, 1))
    assert torch.equal(model(rows(4)), model(rows(4).repeat(12, 1))[:48])
    assert [len(x) for x, *_ in calls] == [48, 576]


def test_rows_at_which_nothing_holds_are_forgotten_with_the_choice(calls: list[Any]) -> None:
    model = chained(sequence())
    for m in (4, 48, 4, 48):
        model(rows(m))
    assert [len(x) for x, *_ in calls] == [48, 48] and list(vars(model)["_by_rows"]) == [4, 48]
    at_four = PLAN.replace("16=", "4=")
    assert at_four != PLAN
    set_handoff(model, [""] * 8, [""] * 8, "", [at_four, *[""] * 7])
    model(rows(4))
    assert [len(x) for x, *_ in calls] == [48, 48, 4]
    assert list(vars(model)["_by_rows"]) == [4]
    set_handoff(model, [""] * 8, [""] * 8, "", [at_four, *[""] * 7])
    assert "_by_rows" not in vars(model)
    model(rows(3))
    assert list(vars(model)["_by_rows"]) == [3] and "_by_rows" not in vars(copy.deepcopy(model))
    undone = copy.deepcopy(model)
    undone(rows(3))
    remove_handoff(undone)
    assert not {"_by_rows", "_chain_recipes", "_handoffs"} & vars(undone).keys()
    model._modules["1"] = nn.Flatten(0)  # without our __setattr__
    with pytest.raises(RuntimeError):
        model(rows(3))


def test_a_newer_choice_of_the_same_routes_is_seen(calls: list[Any], warm: list[int]) -> None:
    """The chain reads the frozen weight, which stays."""
    model, x = sequence(), rows()
    for key in ("first", "second"):
        apply_choice(model[0], Chosen(key, (BY_ROW, "", ""), True))
        if key == "first":
            chained(model, key="first")
            warmed(model, x, calls=calls)
            y, count, plan = model(x), warm[0], model[0]._plan
            assert count == 2
    assert model[0]._plan == plan and warm[0] == count
    found = model(x)
    assert torch.equal(found, in_python(model, x)) and not torch.equal(found, y)
    assert warm[0] == count


def test_what_may_change_in_place_is_not_kept(calls: list[Any], warm: list[int]) -> None:
    model, x = sequence(), rows()
    model[1].normalized_shape = [48]
    warmed(model, x, calls=calls)
    assert model._chain_recipes is None and torch.equal(model(x), in_python(model, x))


def test_few_recipes_are_kept(calls: list[Any], warm: list[int]) -> None:
    model, x = sequence(), rows()
    layers = chain_call.layers_at(x, PLAN)
    parts = [(model[0], model[1], "relu"), (model[5], None, "hardswish")]
    for place in range(100):
        chain_call._keep(chain_call.Keeper(model, place=place), x, PLAN, layers, parts)
        assert 0 < len(model._chain_recipes) <= 64


def test_copies_and_pickles_have_none(calls: list[Any], warm: list[int]) -> None:
    model, x = sequence(), rows()
    warmed(model, x, calls=calls)
    assert model._chain_recipes and b"_chain_recipes" not in pickle.dumps(model)
    made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), copy.copy(model)]
    for other in made:
        assert other._chain_recipes is None
        count = warm[0]
        assert torch.equal(other(x), model(x)) and warm[0] == count + 1
        assert other._chain_recipes is not model._chain_recipes
    with_another_bias(made[0])
    assert torch.equal(model(x), made[1](x)) and not torch.equal(model(x), made[0](x))


def test_two_sequences_share_a_layer(calls: list[Any], warm: list[int]) -> None:
    one, x = sequence(), rows()
    other = chained(nn.Sequential(one[0], *list(sequence())[1:]), key="other")
    other[5].bias.data *= 2
    for model in (one, other, one, other):
        warmed(model, x, calls=calls)
    for model in (one, other, one):
        count = warm[0]
        assert torch.equal(model(x), in_python(model, x)) and warm[0] == count + 1
    assert not torch.equal(one(x), other(x))


def test_a_recipe_goes_with_its_conversion_and_holds_no_module(
    calls: list[Any], warm: list[int]
) -> None:
    model, x = sequence(), rows()
    warmed(model, x, calls=calls)
    assert model._chain_recipes
    chained(model, plan_of(BY_ROWS), key="second")
    assert model._chain_recipes is None
    assert torch.equal(model(x), in_python(model, x))
    remove_handoff(model, "second")
    remove_handoff(model)
    assert "_chain_recipes" not in vars(model)
    layer = layer_of()
    apply_choice(layer, Chosen("a", ("", "", ""), True, plan_of_one("bias+layer+affine+relu")))
    warmed(layer, x, calls=calls)
    assert layer._chain_recipes
    calls.clear()
    gc.collect()
    gc.disable()
    try:
        seen = weakref.ref(layer)
        del layer
        assert seen() is None
    finally:
        gc.enable()


# --- layers with a norm, and crosses


def with_another_norm(layer: LinearNormAct) -> None:
    layer.norm = nn.LayerNorm(48, eps=0.5, dtype=layer.weight.dtype)


def with_another_activation(layer: LinearNormAct) -> None:
    layer.activation = "silu"


def with_a_hooked_norm(layer: LinearNormAct) -> None:
    layer.norm.register_forward_hook(lambda _, __, y: y * 2)


def without_a_choice(layer: LinearNormAct) -> None:
    remove_choice(layer, "a")


def of_another_plan(layer: LinearNormAct) -> None:
    layer.take_chain("")


@pytest.mark.parametrize(
    "change",
    [
        with_another_norm, with_another_activation, with_a_hooked_norm, without_a_choice,
        of_another_plan,
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_with_a_norm(
    dtype: torch.dtype, change: Callable[[LinearNormAct], None], calls: list[Any],
    warm: list[int],
) -> None:  # fmt: skip
    layer, x = layer_of().to(dtype), rows().to(dtype)
    nn.init.uniform_(layer.norm.bias)
    plan = in_dtype(plan_of_one("bias+layer+affine+relu"), dtype)
    apply_choice(layer, Chosen("a", ("", "", ""), True, plan))
    warmed(layer, x, calls=calls)
    y, count = layer(x), warm[0]
    assert count == 2 and torch.equal(y, in_python(layer, x))
    made = pickle.loads(pickle.dumps(layer))
    assert made._chain_recipes is None and torch.equal(made(x), y)
    change(layer)
    found = layer(x)
    assert torch.equal(found, in_python(layer, x)) and not torch.equal(found, y)
    assert warm[0] == count


def hooked_layer(model: nn.Module) -> None:
    next(x for x in model.modules() if isinstance(x, Linear)).register_forward_hook(
        lambda _, __, y: y * 2
    )


def another_layer(model: nn.Module) -> None:
    """Another last layer, of the same plan."""
    owner, name = (model.layers, "0") if isinstance(model, Full) else (model, "up")
    other = copy.deepcopy(owner._modules[name])
    other.bias.data *= 2
    owner._modules[name] = other


def undone_layer(model: nn.Module) -> None:
    layer = [x for x in model.modules() if isinstance(x, Linear)][-1]
    layer.drop_chain_weights()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("change", [hooked_layer, another_layer, undone_layer])
@pytest.mark.parametrize(("is_adopted", "dtype"), [
    (True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float16),
])  # fmt: skip
def test_crosses(
    kind: str, change: Callable[[nn.Module], None], is_adopted: bool, dtype: torch.dtype,
    calls: list[Any], warm: list[int],
) -> None:  # fmt: skip
    model, x = crossed(kind, dtype=dtype), cross_rows().to(dtype)
    count = KINDS[kind][2]
    for layer in [each for each in model.modules() if isinstance(each, Linear)]:
        layer._is_adopted = is_adopted  # without routes of its own, a `PlainLinear`
        layer.changed()
    warmed(model, x, calls=calls)
    y = model(x)
    assert warm[0] >= 2 * count and torch.equal(y, in_python(model, x))
    change(model)
    found = model(x)
    assert torch.equal(found, in_python(model, x)) and not torch.equal(found, y)


def test_two_crosses_share_their_first_layer(calls: list[Any], warm: list[int]) -> None:
    """The layers after it are a part of what is kept."""
    from lokakern.nn.crossed_forward import cross

    one, other = crossed("low rank"), crossed("low rank")
    other.up.bias.data *= 2
    plan, x = KINDS["low rank"][1][0].plan, cross_rows()

    def call(up: nn.Module) -> Tensor:
        return cross(plan, x, x, x, one.down, up)

    for up in (one.up, other.up):
        warmed(call, up, calls=calls)
    count = warm[0]
    for up in (other.up, one.up, one.up, other.up):
        assert torch.equal(call(up), in_python(call, up))
    assert warm[0] == count + 2  # the newest one is kept
    assert not torch.equal(call(one.up), call(other.up))


def test_what_stands_beside_a_cross_has_to_fit(calls: list[Any], warm: list[int]) -> None:
    from lokakern.nn.crossed_forward import cross

    model, x = crossed(), cross_rows()
    plan, layer = FULL[0].plan, model.layers[0]
    x0 = cross_rows(seed=5)
    for given in ((x0, x, x), (x0.view(2, 16, N), x.view(2, 16, N), x.view(2, 16, N))):
        warmed(lambda a, b, c: cross(plan, a, b, c, layer), *given, calls=calls)
        count = warm[0]
        found = cross(plan, *given, layer)
        assert warm[0] == count + 1
        assert torch.equal(found, in_python(lambda a, b, c: cross(plan, a, b, c, layer), *given))
    for beside in ((x0[0], x), (x0.float(), x), (x0.view(4, 8, N)[:1, :1], x), (x0[:1], x[:1])):
        count = warm[0]
        found = cross(plan, *beside, x, layer)
        expected = in_python(lambda a, b: cross(plan, a, b, x, layer), *beside)
        assert torch.equal(found, expected) and warm[0] == count
    layer.requires_grad_(False)
    with torch.enable_grad():
        assert cross(plan, x0.clone().requires_grad_(), x, x, layer).requires_grad


def test_a_cross_of_an_undone_layer(calls: list[Any], warm: list[int]) -> None:
    model, x = LowRank().bfloat16(), cross_rows()
    set_crosses(model, KINDS["low rank"][1])
    warmed(model, x, calls=calls)
    assert model.down._chain_recipes
    assert all("_chain_recipes" not in vars(m) for m in copy.deepcopy(model).modules())
    model.down.drop_chain_weights()
    assert model.down._chain_recipes is None


# --- residuals and gates


class Wide(nn.Module):
    """Two layers: a residual behind the first one, and before and behind the gate of the second."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.second = Linear(K, K), nn.LayerNorm(K), Linear(K, K)

    def forward(self, x: Tensor, r: Tensor, gate: Tensor) -> Tensor:
        y = r + torch.relu(self.norm(self.first(x)))
        return torch.sigmoid(self.second(y) + x) * gate


WIDE = Tail(
    ("first", "norm", "relu()", "add()", "second", "add()", "sigmoid()", "mul()"), "", "",
    plan_text(
        [ChainLayer(K, K, "bias+layer+affine+relu+residual_last", 1e-5, Granularity.ROW),
         ChainLayer(K, K, "bias+residual+gate", 1e-5, Granularity.ROW)],
        [(0, ()), (16, BY_ROWS)], [(0, ()), (16, BY_ROWS)],
    ),
)  # fmt: skip


def wide() -> Wide:
    model = Wide().bfloat16().eval().requires_grad_(False)
    set_crosses(model, (), tails=[WIDE])
    return model


def test_warm_calls_with_residuals_and_gates(calls: list[Any], warm: list[int]) -> None:
    model, (x, r, gate) = wide(), (rows(seed=seed) for seed in range(3))
    exact = Wide.forward(copy.deepcopy(model).double(), *(y.double() for y in (x, r, gate)))
    for given in ((x, r, gate), (x, x, x), (x, r, r), (x.view(2, -1, K),) * 3):
        expected = in_python(model, *given)
        if given[1] is r and given[2] is gate:
            assert numerics.measure_errors(expected, exact).row_err < 0.06
        warmed(model, *given, calls=calls)
        count = warm[0]
        assert torch.equal(model(*given), expected) and warm[0] == count + 1
        assert torch.equal(
            model(*(y + 1 for y in given)), in_python(model, *(y + 1 for y in given))
        )


def test_other_residuals_run_the_modules(calls: list[Any], warm: list[int]) -> None:
    model, (x, r, gate) = wide(), (rows(seed=seed) for seed in range(3))
    warmed(model, x, r, gate, calls=calls)
    del calls[:]
    own = functools.partial(Wide.forward, model)
    for given in (
        (x, r[:1], gate), (x, r, gate[:, :1]), (x, r, gate.float()), (x, r, gate.double()),
        (x, r.view(1, *r.shape), gate), (x, r, gate.half()),
    ):  # fmt: skip
        assert torch.equal(model(*given), own(*given)) and not calls
    with torch.enable_grad():
        assert model(x, r.clone().requires_grad_(), gate).requires_grad and not calls
    strided = torch.cat([r, r], 1)[:, 1 : K + 1]
    assert torch.equal(model(x, strided, gate), model(x, strided.clone(), gate)) and len(calls) > 0


def test_a_plan_with_a_residual_is_refused_elsewhere(calls: list[Any]) -> None:
    model = Wide().bfloat16()
    for names in (WIDE.names[:-2], (*WIDE.names[:-1], "add()"), WIDE.names[:3] + WIDE.names[4:]):
        with pytest.raises(UnsupportedError, match="cannot run"):
            set_crosses(model, (), tails=[WIDE._replace(names=names)])
    swapped = (*WIDE.names[:4], "second", "add()", "mul()", "sigmoid()")
    with pytest.raises(UnsupportedError, match="cannot run"):
        set_crosses(model, (), tails=[WIDE._replace(names=swapped)])
    modules = nn.Sequential(Linear(K, K), nn.LayerNorm(K), nn.ReLU())
    with pytest.raises(UnsupportedError, match="cannot begin"):
        chained(modules, WIDE.chain)


# --- compilers


def test_a_compiled_model_is_not_compiled_again(
    calls: list[Any], warm: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = sequence(), rows()
    model(x)
    monkeypatch.setattr(chain_call, "run_chain", routed_chain.run_chain)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
        y = compiled(x)
        warmed(model, x, calls=calls)
        assert model._chain_recipes and torch.equal(compiled(x), y)
