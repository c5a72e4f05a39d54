"""Idle sequences in C++: bits and gradients of torch's modules, and what Python still calls."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.overrides import TorchFunctionMode

from lokakern.native import NATIVE
from lokakern.nn.linear import Linear
from lokakern.nn.rectified import ALWAYS
from lokakern.nn.routed_matmul import in_dtype
from lokakern.nn.static_handoff import BoundedSequential, set_handoff
from tests.support import native
from tests.support.routed_layers import BY_ROW, K, layer_of, rows

ROOT = Path(__file__).parents[2]
IDLE = 4  # rows at which BY_ROW does not hold
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
KINDS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(K, K),
    "Linear without bias": lambda: nn.Linear(K, K, bias=False),
    "converted": lambda: Linear(K, K),
    "converted, with a plan": lambda: layer_of((BY_ROW, "", ""), n=K),
    "LayerNorm": lambda: nn.LayerNorm(K, eps=1e-3),
    "LayerNorm without weight": lambda: nn.LayerNorm((K,), elementwise_affine=False),
    "LayerNorm without bias": lambda: nn.LayerNorm(K, bias=False),
    "BatchNorm1d": lambda: nn.BatchNorm1d(K),
    "BatchNorm1d without weight": lambda: nn.BatchNorm1d(K, affine=False),
    "Dropout": lambda: nn.Dropout(0.4),
    "Identity": nn.Identity,
    "ReLU": nn.ReLU,
    "GELU": nn.GELU,
    "GELU by tanh": lambda: nn.GELU("tanh"),
    "SiLU": nn.SiLU,
    "Sigmoid": nn.Sigmoid,
    "Tanh": nn.Tanh,
}
BY_PYTHON: dict[str, Callable[[], nn.Module]] = {
    "Hardswish": nn.Hardswish,
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "SiLU in place": lambda: nn.SiLU(inplace=True),
    "RMSNorm": lambda: nn.RMSNorm(K),
    "BatchNorm1d by batches": lambda: nn.BatchNorm1d(K, track_running_stats=False),
    "BatchNorm1d with a cumulative average": lambda: nn.BatchNorm1d(K, momentum=None),
}


@pytest.fixture
def made() -> Iterator[list[bool]]:
    """Whether C++ ran each sequence."""
    with native.in_use() as library, pytest.MonkeyPatch.context() as patch:
        calls: list[bool] = []

        def counted(*given: Any) -> Any:
            y = library.call_sequence(*given)
            calls.append(y is not None)
            return y

        patch.setattr(NATIVE, "call_sequence", counted)
        yield calls


def sequence(*modules: nn.Module, dtype: torch.dtype = torch.bfloat16) -> nn.Sequential:
    """Modules of which the second is fused with the third, but not at `IDLE` rows."""
    torch.manual_seed(0)
    model = nn.Sequential(Linear(K, K), nn.ReLU(), *modules).to(dtype).eval()
    for module in model:
        if isinstance(module, Linear):
            module.take_routes([in_dtype(x, dtype) for x in module._routes], module.weight)
    for name, tensor in model.state_dict().items():
        if tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.1 if "var" in name else -0.5, 1.0)
    none = [""] * len(model)
    set_handoff(model, none, ["", BY_ROW, *none[2:]])
    assert type(model) is BoundedSequential
    return model


def idle(model: nn.Sequential) -> nn.Sequential:
    """A sequence that was called with `IDLE` rows."""
    with torch.no_grad():
        model(rows(IDLE).to(model[0].weight.dtype))
    assert IDLE in vars(model)["_by_rows"]
    return model


def forwards(run: Callable[[], object]) -> list[str]:
    """Classes whose forward Python ran."""
    seen: list[str] = []

    def look(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_name == "forward":
            seen.append(type(frame.f_locals.get("self")).__name__)

    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [name for name in seen if name != "BoundedSequential"]


def results(model: nn.Module, x: Tensor) -> list[Tensor | None]:
    model.zero_grad()
    x = x.clone().requires_grad_()
    y = model(x)
    y.float().square().sum().backward()
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def same(found: list[Tensor | None], expected: list[Tensor | None]) -> bool:
    return all(
        b is None if a is None else b is not None and torch.equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )


def plain(model: nn.Sequential) -> nn.Sequential:
    """The same modules, called by torch's own sequence."""
    return nn.Sequential(*model)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("kind", [*KINDS, *BY_PYTHON])
def test_outputs_and_gradients_have_the_bits_of_python(
    kind: str, dtype: torch.dtype, made: list[bool]
) -> None:
    modules = nn.Linear(K, K), (KINDS | BY_PYTHON)[kind](), nn.Linear(K, 8)
    model, x = idle(sequence(*modules, dtype=dtype)), rows(IDLE).to(dtype)
    made.clear()
    assert same(results(model, x), results(plain(model), x)) and made == [True]
    with torch.no_grad():
        names = forwards(lambda: model(x))
    assert len(names) == (kind in BY_PYTHON)


@pytest.mark.parametrize("kind", ["Dropout", "BatchNorm1d"])
def test_modules_in_training(kind: str, made: list[bool]) -> None:
    model = idle(sequence(KINDS[kind](), nn.Linear(K, 8))).train()
    other, x = copy.deepcopy(plain(model)), rows(IDLE)
    made.clear()
    torch.manual_seed(1)
    found = results(model, x)
    torch.manual_seed(1)
    assert same(found, results(other, x)) and made == [True]
    assert all(map(torch.equal, plain(model).state_dict().values(), other.state_dict().values()))


@pytest.mark.parametrize(("dtype", "half"), [
    (FLOAT32, BFLOAT16), (BFLOAT16, BFLOAT16), (FLOAT32, FLOAT16), (FLOAT16, FLOAT16),
])  # fmt: skip
def test_autocast(dtype: torch.dtype, half: torch.dtype, made: list[bool]) -> None:
    modules = [nn.LayerNorm(K), nn.ReLU(), nn.Linear(K, K), nn.GELU(), nn.Linear(K, 8)]
    model, x = idle(sequence(*modules, dtype=dtype)), rows(IDLE).to(dtype)
    made.clear()
    with torch.autocast("cpu", half):
        assert same(results(model, x), results(plain(model), x))
    assert made == [True]


def forward_hook(model: nn.Sequential) -> None:
    model[2].register_forward_hook(lambda _module, _given, y: 2 * y)


def pre_hook(model: nn.Sequential) -> None:
    model[2].register_forward_pre_hook(lambda _module, given: (2 * given[0],))


def backward_hook(model: nn.Sequential) -> None:
    model[2].register_full_backward_hook(lambda _module, given, _: (3 * given[0],))


def backward_pre_hook(model: nn.Sequential) -> None:
    model[2].register_full_backward_pre_hook(lambda _module, given: (3 * given[0],))


def own_forward(model: nn.Sequential) -> None:
    model[2].forward = lambda x: 2 * x


def own_compiled_call(model: nn.Sequential) -> None:
    model[2]._compiled_call_impl = lambda x: 2 * x


def another_class(model: nn.Sequential) -> None:
    class Doubling(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model[2].__class__ = Doubling


def parametrized(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[2])


def a_parameter_as_an_attribute(model: nn.Sequential) -> None:
    weight = model[2].weight.detach() * 2
    del model[2].weight
    model[2].weight = weight


def another_weight(model: nn.Sequential) -> None:
    model[2].weight = nn.Parameter(model[2].weight.detach() * 2)


def an_attribute_that_hides_a_parameter(model: nn.Sequential) -> None:
    vars(model[2])["weight"] = model[2].weight.detach() * 2  # as FSDP1 may


def another_module(model: nn.Sequential) -> None:
    model._modules["2"] = nn.Tanh()  # without our __setattr__


@pytest.mark.parametrize(
    "change",
    [
        forward_hook, pre_hook, backward_hook, backward_pre_hook, own_forward, own_compiled_call,
        another_class, parametrized, a_parameter_as_an_attribute, another_weight, another_module,
        an_attribute_that_hides_a_parameter,
    ],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_changes_after_the_first_call_are_seen(
    change: Callable[[nn.Sequential], None], made: list[bool]
) -> None:
    model, x = idle(sequence(nn.Linear(K, K), nn.Tanh())), rows(IDLE)
    before = results(model, x)
    change(model)
    found = results(model, x)
    assert same(found, results(plain(model), x)) and not same(found[:2], before[:2])


def test_global_hooks_and_patched_classes_are_seen(
    made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = idle(sequence(nn.Linear(K, K))), rows(IDLE)
    made.clear()
    y = model(x)
    seen: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _given, _y: seen.append(type(module).__name__)
    )
    model(x)
    hook.remove()
    assert seen == ["Linear", "ReLU", "Linear", "BoundedSequential"] and made == [True, False]
    seen.clear()
    hook = nn.modules.module.register_module_full_backward_hook(
        lambda module, _given, _gradients: seen.append(type(module).__name__)
    )
    model(x).sum().backward()
    hook.remove()
    assert sorted(seen) == ["BoundedSequential", "Linear", "Linear", "ReLU"]
    monkeypatch.setattr(nn.ReLU, "forward", lambda _self, x: x * 2)
    found = model(x)
    assert torch.equal(found, plain(model)(x)) and not torch.equal(found, y)
    monkeypatch.undo()
    calls: list[str] = []
    call = nn.Module.__call__

    def counted(self: nn.Module, *given: Any) -> Any:
        calls.append(type(self).__name__)
        return call(self, *given)

    monkeypatch.setattr(nn.Module, "__call__", counted)
    assert torch.equal(model(x), y)
    assert calls == ["BoundedSequential", "Linear", "ReLU", "Linear"]


PATCHED_BEFORE = """
import functools
from torch import nn
def patched(forward):
    @functools.wraps(forward)  # which copies the name of torch's module
    def replaced(*given):
        return forward(*given) * 2
    return replaced
nn.GELU.forward = patched(nn.GELU.forward)
import torch
from tests.native.test_sequence import IDLE, idle, plain, rows, sequence
from tests.support import native
with native.in_use(), torch.no_grad():
    model, x = idle(sequence(nn.GELU())), rows(IDLE)
    assert torch.equal(model(x), plain(model)(x))
"""


@pytest.mark.rest
def test_classes_that_were_patched_before_are_left_to_python() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    script = [sys.executable, "-c", PATCHED_BEFORE]
    done = subprocess.run(script, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_settings_that_hold_run_among_other_modules(
    dtype: torch.dtype, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = sequence(Linear(K, K), nn.Tanh(), nn.Linear(K, 8), dtype=dtype)
    for layer in (model[0], model[2]):
        layer.take_routes((in_dtype(BY_ROW, dtype), "", ""), layer.weight)
        layer.freeze()
    x, runs = rows(48).to(dtype), []
    run = BoundedSequential._handed

    def counted(*given: Any) -> Any:
        runs.append(given[2:4])
        return run(*given)

    monkeypatch.setattr(BoundedSequential, "_handed", counted)
    with torch.no_grad():
        y = model(x)
        for _ in range(2):
            assert torch.equal(model(x), y)
        assert made == [False, True, True] and runs == [(1, 48)] * 3
        assert forwards(lambda: model(x)) == []
        model._modules["3"] = nn.ReLU()
        assert torch.equal(model(x), plain(model)(x)) and made[-1] is False


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_gradients_of_relus_in_products_need_no_python(
    dtype: torch.dtype, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager layers with gradients run one by one, as nn.Sequential calls them."""
    model = sequence(nn.Linear(K, K), nn.Tanh(), dtype=dtype)
    set_handoff(model, [""] * 4, [""] * 4, rectified=[ALWAYS, "", "", ""])
    x, asked = rows(IDLE).to(dtype), []
    run = BoundedSequential._handed
    monkeypatch.setattr(BoundedSequential, "_handed", lambda *g: asked.append(g[2]) or run(*g))
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is FLOAT32):
        expected = results(plain(model), x)
        assert same(results(idle(model), x), expected) and not asked[1:]
        asked.clear()
        made.clear()
        assert same(results(model, x), expected) and made == [True] and not asked
        monkeypatch.setattr(NATIVE, "call_sequence", None)
        assert same(results(model, x), expected) and not asked


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16, FLOAT32])
def test_relus_in_products_need_no_python_without_gradients(
    dtype: torch.dtype, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of operands of one dtype, bfloat16 or float16; an infinite sum stays one, or is zero."""
    model = sequence(nn.Linear(K, K), nn.Tanh(), dtype=dtype)
    set_handoff(model, [""] * 4, [""] * 4, rectified=[ALWAYS, "", "", ""])
    x, asked = rows(IDLE).to(dtype), []
    x[0], model[0].weight.data[0] = 60000.0, 10.0
    idle(model)
    monkeypatch.setattr(BoundedSequential, "_handed", lambda *given: asked.append(given))
    made.clear()
    with torch.no_grad(), torch.profiler.profile() as profile:
        assert torch.equal(model(x).view(torch.int16), plain(model)(x).view(torch.int16))
        assert dtype is not FLOAT16 or model[0](x)[0, 0] == torch.inf
    names = [event.name for event in profile.events()]
    assert names.count("aten::_addmm_activation") == (dtype is not FLOAT32)
    assert made == [True] and not asked


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
@pytest.mark.parametrize("of_plan", [BFLOAT16, FLOAT16])
def test_relus_of_a_layer_with_kernels_for_the_other_dtype_are_left_to_python(
    dtype: torch.dtype, of_plan: torch.dtype, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a model that was cast after its conversion, of which Python warns."""
    model, asked = sequence(nn.Tanh(), dtype=dtype), []
    model[0].take_routes(("", in_dtype(BY_ROW, of_plan), ""), model[0].weight)
    set_handoff(model, [""] * 3, [""] * 3, rectified=[ALWAYS, "", ""])
    x, run = rows(IDLE).to(dtype), BoundedSequential._handed
    idle(model)
    monkeypatch.setattr(BoundedSequential, "_handed", lambda *g: asked.append(g[2]) or run(*g))
    with torch.no_grad():
        assert torch.equal(model(x), plain(model)(x)) and bool(asked) is (dtype is not of_plan)


@pytest.mark.parametrize("dtype", [BFLOAT16, FLOAT16])
def test_relus_behind_mixed_dtypes_are_left_to_torch(dtype: torch.dtype, made: list[bool]) -> None:
    model = sequence(nn.Linear(K, K), dtype=dtype)
    set_handoff(model, [""] * 3, [""] * 3, rectified=[ALWAYS, "", ""])
    other, x = BFLOAT16 if dtype is FLOAT16 else FLOAT16, rows(IDLE)
    idle(model)
    made.clear()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            model(x.to(other))
        model[0].bias.data = model[0].bias.data.to(other)
        with pytest.raises(RuntimeError, match="dtype"):
            model(x.to(dtype))
        model[0].to(other)
        with pytest.raises(RuntimeError, match="dtype"):
            model(x.to(other))  # of the next layer
    assert not made  # torch raised


@pytest.mark.parametrize("has_gradient", [True, False])
def test_global_hooks_that_a_module_adds_are_called_for_those_behind_it(
    has_gradient: bool, made: list[bool]
) -> None:
    seen: list[str] = []
    hooks: list[Any] = []

    def hooking(module: nn.Module, _given: object, _y: object) -> None:
        while len(hooks) > 1:
            hooks.pop().remove()
        add = nn.modules.module.register_module_forward_hook
        hooks.append(add(lambda module, _given, _y: seen.append(type(module).__name__)))

    model = sequence(nn.Tanh(), Linear(K, K), nn.ReLU())
    none = [""] * len(model)
    set_handoff(model, none, none, rectified=["", "", "", ALWAYS, ""])
    x = rows(IDLE)
    idle(model)
    hooks.append(model[0].register_forward_hook(hooking))
    made.clear()
    try:
        with torch.set_grad_enabled(has_gradient):
            model(x)
    finally:
        for hook in hooks:
            hook.remove()
    assert seen == ["ReLU", "Tanh", "Linear", "ReLU"] and made == [True]


def test_several_sizes_in_turn(made: list[bool]) -> None:
    model, sizes = sequence(nn.Linear(K, 8)), [(4,), (2, 4), (2, 3)]
    given = [torch.randn(*size, K, dtype=torch.bfloat16) for size in sizes]
    for x in given[0], given[1], given[2], *given * 2:
        assert torch.equal(model(x), plain(model)(x))
    assert made == [False, False, False, *[True] * 6]
    for m in range(1, 60):
        model(rows(m))
    assert len(vars(model)["_by_rows"]) <= 16


def test_settings_of_an_older_handoff_are_left_to_python(made: list[bool]) -> None:
    """Another thread may change them between a call's read of a handoff and its note of rows."""
    model, x = idle(sequence(nn.Linear(K, K))), rows(IDLE)
    older = vars(model)["_by_rows"]
    set_handoff(model, [""] * 3, ["", BY_ROW, ""])
    vars(model)["_by_rows"] = older
    made.clear()
    for _ in range(2):
        assert torch.equal(model(x), plain(model)(x))
    assert made == [False, True]


@pytest.mark.parametrize("kind", ["hook", "subclass"])
def test_rows_that_change_on_the_way(
    kind: str, made: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Settings are those of the rows at their place."""

    class Repeating(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).repeat(12, 1)

    model = sequence(layer_of((BY_ROW, "", ""), n=K))
    if kind == "hook":
        model[0].register_forward_hook(lambda _module, _given, y: y.repeat(12, 1))
    else:
        model._modules["0"] = Repeating(K, K, dtype=torch.bfloat16)
        set_handoff(model, [""] * 3, ["", BY_ROW, ""])
    runs, run = [], BoundedSequential._handed

    def counted(*given: Any) -> Any:
        runs.append(given[2:4])
        return run(*given)

    monkeypatch.setattr(BoundedSequential, "_handed", counted)
    for m, rows_there in ((IDLE, 48), (1, 12), (IDLE, 48), (1, 12)):
        assert torch.equal(model(rows(m)), plain(model)(rows(m)))
        assert runs == ([(1, rows_there)] if rows_there == 48 else [])
        runs.clear()
    assert made == [False, False, True, True]


def test_a_default_device_is_no_mode_to_care_about(made: list[bool]) -> None:
    class Other(TorchFunctionMode):
        def __torch_function__(self, function: Any, _types: Any, args: Any = (),
                               kwargs: Any = None) -> Any:  # fmt: skip
            return function(*args, **(kwargs or {}))

    model, x = idle(sequence(nn.Linear(K, K))), rows(IDLE)
    made.clear()
    with torch.device("cpu"):
        y = model(x)
        with Other():
            assert torch.equal(model(x), y)
    with Other():
        assert torch.equal(model(x), y)
    assert torch.equal(plain(model)(x), y) and made == [True, False, False]


class Subclass(Tensor):
    pass


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.repeat(2, 1), lambda x: x[0],
        lambda x: x.as_subclass(Subclass),
    ],
)  # fmt: skip
def test_other_inputs_are_left_to_python(
    change: Callable[[Tensor], Tensor], made: list[bool]
) -> None:
    model = idle(sequence(nn.Linear(K, K)))
    x = change(rows(IDLE))
    made.clear()
    found = model(x)
    assert made == [False]
    assert type(found) is type(x) and torch.equal(found, plain(model)(x))


def test_errors_are_those_of_python(made: list[bool]) -> None:
    model = idle(sequence(nn.Linear(K, K), nn.Identity()))
    bad = rows(IDLE)[:, : K // 2]
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        model(bad)

    def fail(_module: nn.Module, _given: Any) -> None:
        raise LookupError("of a hook")

    model[2].register_forward_pre_hook(fail)
    with pytest.raises(LookupError, match="of a hook"):
        model(rows(IDLE))


def test_a_module_that_shrinks_the_sequence_while_it_runs(made: list[bool]) -> None:
    model = sequence(nn.Hardswish(), nn.Linear(K, 8))
    expected = idle(model)(rows(IDLE))
    made.clear()

    class Removing(nn.Hardswish):
        def forward(self, x: Tensor) -> Tensor:
            model._modules.pop("3", None)
            return super().forward(x)

    model[2].__class__ = Removing
    assert torch.equal(model(rows(IDLE)), expected) and made == [True]
