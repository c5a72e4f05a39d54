"""Crosses of DCN in modules: which are found, what runs, and what undoing restores."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lokakern import mods, numerics
from lokakern.errors import UnsupportedError
from lokakern.nn.chain_plan import ChainLayer, ChainStep, plan_text
from lokakern.nn.cross_pattern import crosses_in
from lokakern.nn.crossed_forward import (
    Cross,
    CrossedForward,
    crossed_of,
    remove_crosses,
    set_crosses,
)
from lokakern.nn.linear import Linear
from lokakern.nn.rectified import ALWAYS
from lokakern.nn.routed_matmul import in_dtype
from lokakern.nn.tail import Tail
from lokakern.nn.traced_forward import traced
from lokakern.types import Granularity
from tests.support import native

NONE, ROW = Granularity.NONE, Granularity.ROW
N, RANK = 48, 16
STEPS = (ChainStep(0, "cuda.quantize_row+cuda.gemm_norm_row", NONE, ROW, NONE),)
LOW_RANK_STEPS = (
    ChainStep(0, "cuda.quantize_row+cuda.gemm_norm_row", NONE, ROW, ROW),
    ChainStep(1, "cuda.gemm_norm_row", ROW, ROW, NONE),
)


class Full(nn.Module):
    """Three full crosses; only the first one's x is x0."""

    def __init__(self, scale: bool = False) -> None:
        super().__init__()
        self.scale = scale
        self.layers = nn.ModuleList(Linear(N, N) for _ in range(3))

    def forward(self, x0: Tensor) -> Tensor:
        x = x0
        for layer in self.layers:
            x = x0 * layer(x) + x
        return x * 2 if self.scale else x


class LowRank(nn.Module):
    """A cross of low rank between other operators."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = Linear(N, RANK, bias=False), Linear(RANK, N)

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(1)
        return torch.relu(flat + self.up(self.down(flat)) * flat)


def plan_of(steps: tuple[ChainStep, ...] = STEPS, first: int = 16, n: int = N) -> str:
    layers = [ChainLayer(n, N, "bias+cross", 1e-5, ROW)]
    if len(steps) == 2:
        layers = [
            ChainLayer(RANK, N, "none", 1e-5, ROW),
            ChainLayer(n, RANK, "bias+cross", 1e-5, ROW),
        ]
    return plan_text(layers, [(0, ()), (first, steps)], [(0, ()), (first, steps)])


PLAN = plan_of()
FULL = [Cross((f"layers.{i}",), PLAN) for i in range(3)]
LOW_RANK = [Cross(("down", "up"), plan_of(LOW_RANK_STEPS))]
KINDS = {"full": (Full, FULL, 3), "low rank": (LowRank, LOW_RANK, 1)}


def crossed(kind: str = "full", key: str = "", dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    make, crosses, _ = KINDS[kind]
    model = make().to(dtype)
    set_crosses(model, [x._replace(plan=in_dtype(x.plan, dtype)) for x in crosses], key)
    return model


def rows(m: int = 32, seed: int = 1) -> Tensor:
    return torch.randn(m, N, generator=torch.Generator().manual_seed(seed)).bfloat16()


def original(model: nn.Module, *inputs: Tensor) -> Tensor:
    found: Tensor = type(model).forward(model, *inputs)
    return found


# --- what is found


class Of(nn.Module):
    """A forward around three layers."""

    def __init__(self, run: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.run = run
        self.a, self.b, self.c = (nn.Linear(N, N) for _ in range(3))

    def forward(self, x0: Tensor, x: Tensor) -> Any:
        return self.run(self, x0, x)


def found_in(run: Callable[[Any, Tensor, Tensor], Any]) -> list[tuple[tuple[str, ...], str]]:
    model = Of(run)
    return [(x.names, x.why) for x in crosses_in(traced(model), model)]


@pytest.mark.parametrize(
    "run",
    [
        lambda s, x0, x: x0 * s.a(x) + x,
        lambda s, x0, x: x + s.a(x) * x0,
        lambda s, x0, x: torch.add(x, torch.mul(s.a(x), x0)),
        lambda s, x0, x: s.a(x).mul(x0).add(x),
        lambda s, x0, x: x * s.a(x) + x,
    ],
)
def test_crosses_are_found(run: Callable[..., Any]) -> None:
    assert found_in(run) == [(("a",), "")]


def test_crosses_of_low_rank_are_found() -> None:
    assert found_in(lambda s, x0, x: x0 * s.b(s.a(x)) + x) == [(("a", "b"), "")]
    assert found_in(lambda s, x0, x: (s.a(x), x0 * s.c(s.b(s.a(x))) + x)[1]) == [(("b", "c"), "")]


def test_a_first_layer_with_another_reader_is_left_out() -> None:
    def run(s: Any, x0: Tensor, x: Tensor) -> Tensor:
        h = s.a(x)
        return (x0 * s.b(h) + x) + h

    assert found_in(run) == [(("b",), "")]


@pytest.mark.parametrize(
    "run",
    [
        lambda s, x0, x: x0 * s.a(x),
        lambda s, x0, x: x0 * s.a(x) + 1,
        lambda s, x0, x: 2 * s.a(x) + x,
        lambda s, x0, x: x0 * s.a(x) - x,
        lambda s, x0, x: torch.add(x0 * s.a(x), x, alpha=2),
        lambda s, x0, x: x0 * torch.relu(s.a(x)) + x,
        lambda s, x0, x: (lambda y: x0 * y + y)(s.a(x)),
        lambda s, x0, x: (lambda y: y * y + x)(s.a(x)),
        lambda s, x0, x: (lambda t: t + t)(x0 * s.a(x)),
        lambda s, x0, x: (lambda t: (t + x, t))(x0 * s.a(x)),
    ],
)
def test_other_forwards_have_no_cross(run: Callable[..., Any]) -> None:
    assert not found_in(run)


def test_what_comes_between_is_told() -> None:
    def run(s: Any, x0: Tensor, x: Tensor) -> Tensor:
        y = s.a(x)
        x.mul_(2)
        return x0 * y + x

    ((names, why),) = found_in(run)
    assert names == ("a",) and "mul_ is computed between" in why
    # The other factor is computed first.
    assert found_in(lambda s, x0, x: s.b(x0) * s.a(x) + x) == [(("a",), "")]


# --- what runs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("m", [16, 17, 32])
def test_crosses_run_as_chains(kind: str, m: int, calls: list[Any]) -> None:
    model, x = crossed(kind), rows(m)
    y = model(x)
    exact = original(copy.deepcopy(model).double(), x.double())
    assert numerics.measure_errors(y.double(), exact).row_err < 0.05
    assert not torch.equal(y, original(model, x))
    assert len(calls) == KINDS[kind][2]


def run_hooked(model: Any) -> None:
    model.layers[1].register_forward_hook(lambda *_: None)


def replace_layer(model: Any) -> None:
    torch.manual_seed(7)
    model.layers[1] = nn.Linear(N, N).bfloat16()


def append_layer(model: Any) -> None:
    torch.manual_seed(7)
    model.layers.append(Linear(N, N).bfloat16())


def change_setting(model: Any) -> None:
    model.scale = True


CHANGES = {run_hooked: 2, replace_layer: 0, append_layer: 0, change_setting: 0}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_changed_modules_run_as_they_are(
    change: Callable[[Any], None], is_compiled: bool, calls: list[Any]
) -> None:
    """A hook concerns one cross; other changes the forward, which is not that of the trace."""
    model, x = crossed(), rows()
    change(model)
    torch._dynamo.reset()
    call = torch.compile(model, backend="eager") if is_compiled else model
    y, count = call(x), len(calls)
    assert count == CHANGES[change]
    if not count:
        assert torch.equal(y, original(model, x))


@pytest.mark.parametrize("kind", KINDS)
def test_other_calls_run_the_expression(kind: str, calls: list[Any]) -> None:
    model, x = crossed(kind), rows()
    assert torch.equal(model(rows(15)), original(model, rows(15)))  # no steps at this m
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(model(x), original(model, x))
    with torch.enable_grad():
        assert torch.equal(model(x), original(model, x))
        model(x).float().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        model.requires_grad_(False)
        model(x.clone().requires_grad_())
    wide = copy.deepcopy(model).float()
    assert torch.equal(wide(x.float()), original(wide, x.float()))
    with pytest.raises(RuntimeError):
        model(x[:, :32])
    assert not calls


class Between(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Linear(N, N)

    def forward(self, x0: Tensor, x: Tensor, input: Tensor) -> Tensor:
        return x0 * self.layer(input) + x


def test_operands_that_do_not_fit_run_the_expression(calls: list[Any]) -> None:
    model = Between().bfloat16()
    set_crosses(model, [Cross(("layer",), PLAN)])
    x, other = rows(), rows(seed=2)
    fitting = [(other, x), (other.t().contiguous().t(), x), (other, torch.cat([x, x], 1)[:, :N])]
    for x0, last in fitting:
        y = model(x0, last, x)
        assert torch.allclose(y, original(model, x0, last, x), rtol=0.05, atol=0.2)
    assert len(calls) == len(fitting)
    for x0, last in ((other[:1], x), (other, x[0]), (other.float(), x), (other, x[:, :1]),
                     (other[None], x)):  # fmt: skip
        assert torch.equal(model(x0, last, x), original(model, x0, last, x))
    with torch.enable_grad():
        model.requires_grad_(False)
        model(other.clone().requires_grad_(), x, x)
    assert len(calls) == len(fitting)


def test_more_dimensions(calls: list[Any]) -> None:
    model, x = crossed(), rows()
    assert torch.equal(model(x.view(2, 16, N)), model(x).view(2, 16, N)) and len(calls) == 6


@pytest.mark.parametrize("kind", KINDS)
def test_a_dynamic_m_without_steps_has_the_bits_of_the_expression(kind: str) -> None:
    model, x = crossed(kind), rows(15)
    names, plan = KINDS[kind][1][0]
    operands: list[Tensor | None] = []
    for name in names:
        layer = model.get_submodule(name)
        operands += [layer.weight, *layer.chain_weight("row"), layer.bias, None, None, None]
    x0 = rows(15, seed=3)
    with torch.no_grad():
        y = x
        for name in names:
            y = model.get_submodule(name)(y)
        found = torch.ops.lokakern.routed_chain(x, [*operands, x0, x], plan)
        assert torch.equal(found, x0 * y + x)


# --- compilers


@pytest.mark.parametrize(
    ("backend", "wraps"), [("eager", (False, True)), ("inductor", (True,))], ids=str
)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_modules_have_one_op_for_each_cross(
    kind: str, backend: str, wraps: tuple[bool, ...]
) -> None:
    count = KINDS[kind][2]
    for wrap in wraps:
        model, x = crossed(kind), rows()
        whole = nn.Sequential(model, nn.Identity()) if wrap else model
        with torch.no_grad():
            torch._dynamo.reset()
            counter = CompileCounterWithBackend(backend)
            compiled = torch.compile(whole, backend=counter, fullgraph=True, dynamic=False)
            assert torch.equal(compiled(x), model(x))
        assert counter.graphs[0].code.count("ops.lokakern.routed_chain") == count


class WithRelu(nn.Module):
    """A cross, and a layer with a relu."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Linear(N, N), Linear(N, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(x * self.a(x) + x).relu()  # type: ignore[no-any-return]


@torch.no_grad()
def test_crosses_and_tails_share_a_forward(calls: list[Any]) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = WithRelu().bfloat16(), rows()
    tail = Tail(("b", "relu()"), ALWAYS, "")
    set_crosses(model, [Cross(("a",), PLAN)], "", [tail])
    y = model(x)
    assert len(calls) == 1 and not torch.equal(y, original(model, x))
    counter = CompileCounterWithBackend("eager")
    run = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    for crosses, tails, counts in (
        ([PLAN], [tail], (1, 1)), ([PLAN], [tail._replace(rectified="")], (1, 0)),
        ([""], [tail], (0, 1)), ([PLAN], [], (1, 0)), ([], [tail], (0, 1)),
    ):  # fmt: skip
        set_crosses(model, [Cross(("a",), plan) for plan in crosses], "", tails)
        assert torch.equal(run(x), model(x)) and torch.equal(model(x), y) == counts[0]
        code = counter.graphs[-1].code
        found = (code.count("ops.lokakern.routed_chain"), code.count("_addmm_activation"))
        assert found == counts
    remove_crosses(model)
    assert torch.equal(run(x), model(x)) and "forward" not in vars(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_graph_of_dynamic_m(kind: str) -> None:
    model = crossed(kind)
    with torch.no_grad():
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=True)
        for m in (32, 17, 16, 15, 5, 2):
            assert torch.equal(compiled(rows(m)), model(rows(m)))
    assert counter.frame_count == 1
    assert counter.graphs[0].code.count("ops.lokakern.routed_chain") == KINDS[kind][2]


class WithActivation(nn.Module):
    """A cross, and a child that decides what else the forward computes."""

    def __init__(self, activation: nn.Module | None) -> None:
        super().__init__()
        self.a, self.activation = Linear(N, N), activation

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.a(x) + x
        if self.activation is not None and not isinstance(self.activation, nn.Identity):
            y = self.activation(y)
        return y


@pytest.mark.parametrize("is_warm", [False, True])
def test_compiled_calls_see_changed_children(is_warm: bool) -> None:
    x = rows()
    pairs = [(nn.Identity(), nn.Tanh()), (None, nn.Tanh()), (nn.Tanh(), None)]
    for first, then in pairs:
        torch._dynamo.reset()
        model = WithActivation(first).bfloat16()
        set_crosses(model, [Cross(("a",), PLAN)])
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        with torch.no_grad():
            if is_warm:
                compiled(x)
            model.activation = then
            assert torch.equal(compiled(x), original(model, x))
    torch._dynamo.reset()
    model, other = crossed("low rank"), crossed("low rank", "other")
    nn.init.ones_(other.down.weight)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        if is_warm:
            compiled(x)
        model.down = other.down
        assert torch.equal(compiled(x), model(x)) and torch.equal(model(x), original(model, x))


def test_compiled_copies_run_their_crosses(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy's layers have other identities."""
    x, runs = rows(), []
    run = CrossedForward._run_own
    monkeypatch.setattr(
        CrossedForward, "_run_own", lambda self, *given: runs.append(1) or run(self, *given)
    )
    model = crossed("low rank")
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch._dynamo.reset()
        assert crossed_of(each)._known
        with torch.no_grad():
            compiled = torch.compile(each, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x), each(x)) and not runs


@torch.no_grad()
@pytest.mark.parametrize("is_copied_first", [True, False])
def test_compiled_code_runs_the_forward_that_a_class_has_by_now(
    is_copied_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, model = rows(), crossed("low rank")
    file = pickle.dumps(model) if is_copied_first else b""
    monkeypatch.setattr(LowRank, "forward", lambda self, x: 2 * self.up(self.down(x)))
    for each in (model, copy.deepcopy(model), pickle.loads(file or pickle.dumps(model))):
        torch._dynamo.reset()
        assert torch.equal(each(x), original(each, x))
        assert torch.equal(torch.compile(each, backend="eager")(x), original(each, x))


@torch.no_grad()
def test_a_compiled_module_follows_plans() -> None:
    model, x = crossed(), rows()
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(nn.Sequential(model), backend=counter, fullgraph=True, dynamic=False)
    with_chains = compiled(x)
    kept = {layer: dict(layer._buffers) for layer in model.layers}
    for _ in range(3):  # each is compiled once
        set_crosses(model, [Cross(names, "") for names, _ in FULL])
        assert torch.equal(compiled(x), original(model, x)) and not chain_buffers(model)
        set_crosses(model, FULL)
        for layer, buffers in kept.items():  # where compiled graphs read them, as in tuning
            layer._buffers.update(buffers)
        assert torch.equal(compiled(x), with_chains)
    assert counter.frame_count == 2


def test_exported_modules() -> None:
    model, x = crossed(), rows()
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        assert torch.equal(exported.module()(x), model(x))
    targets = [str(node.target) for node in exported.graph.nodes]
    assert targets.count("lokakern.routed_chain.default") == 3


# --- copies and undoing


def chain_buffers(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_buffers() if "chain_" in name]


@pytest.mark.parametrize("kind", KINDS)
def test_copies_and_pickles(kind: str, calls: list[Any]) -> None:
    model, x = crossed(kind), rows()
    y, count = model(x), KINDS[kind][2]
    for made in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)),
                 pickle.loads(pickle.dumps(nn.Sequential(model)))[0]):  # fmt: skip
        assert crossed_of(made).module is made and made is not model
        calls.clear()
        assert torch.equal(made(x), y) and len(calls) == count
        torch._dynamo.reset()
        compiled = torch.compile(made, backend="eager", fullgraph=True, dynamic=False)
        assert torch.equal(compiled(x), y)
        for parameter in made.parameters():
            nn.init.zeros_(parameter)
        remove_crosses(made)
        assert not chain_buffers(made) and "forward" not in vars(made)
        assert not torch.equal(made(x), y)
    assert torch.equal(model(x), y)


def test_names_stay(calls: list[Any]) -> None:
    model = crossed()
    plain = Full()
    assert list(model.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
    other = Full().bfloat16()
    model.load_state_dict(other.state_dict())
    set_crosses(other, FULL)
    assert torch.equal(model(rows()), other(rows())) and len(calls) == 6


def test_undoing(calls: list[Any]) -> None:
    model, x = crossed(key="a"), rows()
    before = set(vars(Full()))
    set_crosses(model, FULL[1:], "b")
    model(x)
    assert len(calls) == 2
    remove_crosses(model, "c")
    remove_crosses(model, "b")
    model(x)
    assert len(calls) == 5 and len(chain_buffers(model)) == 6
    set_crosses(model, FULL, "b")
    remove_crosses(model, "a")
    model(x)
    assert len(calls) == 8
    remove_crosses(model, "b")
    assert not chain_buffers(model) and set(vars(model)) == before
    assert torch.equal(model(x), original(model, x)) and len(calls) == 8


def test_undoing_after_a_layer_was_removed(calls: list[Any]) -> None:
    model, other = crossed(key="first"), crossed(key="first")
    del model.layers[2]
    remove_crosses(model, "first")
    assert "forward" not in vars(model)
    set_crosses(other, [], "second")
    other.layers[1] = nn.Identity()
    with pytest.warns(UserWarning, match=r"no cross of layers.1: its own forward runs"):
        remove_crosses(other, "second")
    assert "forward" not in vars(other) and not other.layers[0]._chain_weights
    assert torch.equal(other(rows()), original(other, rows())) and not calls


def test_crosses_that_are_not_there_are_refused() -> None:
    model = Full().bfloat16()
    for crosses, words in (
        ([Cross(("layers.0",), plan_of(n=32))], "these layers are others"),
        ([Cross(("layers.0", "layers.1"), LOW_RANK[0].plan)], "these layers are others"),
        ([Cross(("layers.0", "layers.1"), "")], "has no cross"),
    ):
        with pytest.raises(UnsupportedError, match=words):
            set_crosses(model, crosses)
    assert "forward" not in vars(model) and not chain_buffers(model)


class Optional(Full):
    def forward(self, x0: Tensor, mask: Tensor | None = None) -> Tensor:
        return super().forward(x0 if mask is None else x0 * mask)


class Branching(Full):
    def forward(self, x0: Tensor) -> Tensor:
        return super().forward(x0) if x0.sum() > 0 else x0


class Training(Full):
    def forward(self, x0: Tensor) -> Tensor:
        return super().forward(x0) if self.training else x0


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Optional, "argument mask of its forward is optional"),
        (Branching, "torch.fx cannot trace it"),
        (Training, "depends on whether it trains"),
    ],
)
def test_forwards_that_a_trace_does_not_show_are_refused(kind: type[Full], words: str) -> None:
    model = kind().bfloat16()
    names = set(vars(model))
    with pytest.raises(UnsupportedError, match=words):
        set_crosses(model, FULL)
    assert set(vars(model)) == names and model.training


def test_a_forward_of_its_own_stays() -> None:
    model = Full().bfloat16()
    own = model.forward = lambda x: x  # type: ignore[method-assign,assignment]
    with pytest.raises(UnsupportedError, match="a forward of its own"):
        set_crosses(model, FULL)
    assert vars(model)["forward"] is own


class Around(nn.Module):
    """A cross in a forward that a test gives, with attributes of several kinds."""

    flag = False

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.a, self.run, self.act, self.sizes = Linear(N, N), run, torch.relu, (1, 2)
        self.acts = (torch.tanh,)
        self.register_buffer("count", torch.zeros(()))

    def scaled(self, x: Tensor) -> Tensor:
        return self.acts[0](self.act(x * 3 if self.flag else x * self.sizes[0]))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


A_CROSS = [Cross(("a",), PLAN)]


def plain(s: Any, x: Tensor) -> Tensor:
    return s.scaled(x * s.a(x) + x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("act", torch.sigmoid),
        ("acts", (torch.sigmoid,)),
        ("sizes", (5, 2)),
        ("flag", True),
        ("scaled", lambda x: -x),
    ],
)
def test_a_forward_follows_attributes(name: str, value: Any, calls: list[Any]) -> None:
    model, x = Around(plain).bfloat16(), rows()
    set_crosses(model, A_CROSS)
    model(x)
    assert len(calls) == 1
    twin = pickle.loads(pickle.dumps(model))
    twin(x)
    assert len(calls) == 2
    torch._dynamo.reset()
    compiled = torch.compile(twin, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), model(x)) and len(calls) == 4
    for module in (model, twin):
        setattr(module, name, value)
        assert torch.equal(module(x), original(module, x))
    if name != "scaled":  # compiled code does not check for methods that a module gets later
        assert torch.equal(compiled(x), original(twin, x))
    assert len(calls) == 4


def test_a_forward_follows_its_class(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = Around(plain).bfloat16(), rows()
    set_crosses(model, A_CROSS)
    monkeypatch.setattr(Around, "flag", True)
    assert torch.equal(model(x), original(model, x)) and not calls


def test_a_traced_forward_writes_to_buffers(calls: list[Any]) -> None:
    def run(s: Any, x: Tensor) -> Tensor:
        s.count.add_(1)
        return x * s.a(x) + x

    model = Around(run)
    set_crosses(model.bfloat16(), A_CROSS)
    assert int(model.count) == 0
    for times in range(1, 4):
        model(rows())
        assert len(calls) == int(model.count) == times


def sets_an_attribute(s: Any, x: Tensor) -> Tensor:
    s.last = x * s.a(x) + x
    return s.last  # type: ignore[no-any-return]


def asks_for_a_type(s: Any, x: Tensor) -> Tensor:
    return s.a(x) * x + x if isinstance(x, Tensor) else x


def asks_for_a_tensor(s: Any, x: Tensor) -> Tensor:
    return s.a(x) * x + x if torch.is_tensor(x) else x


def changes_gradients(s: Any, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return s.a(x) * x + x  # type: ignore[no-any-return]


def changes_autocast(s: Any, x: Tensor) -> Tensor:
    y = s.a(x) * x + x
    with torch.autocast("cpu", torch.bfloat16):
        return y * 2  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (sets_an_attribute, "sets the attribute last"),
        (asks_for_a_type, "the type of a tensor"),
        (asks_for_a_tensor, "the type of a tensor"),
        (changes_gradients, "the mode of gradients or autocast"),
        (changes_autocast, "the mode of gradients or autocast"),
    ],
)
def test_forwards_that_do_more_than_a_graph_are_refused(
    run: Callable[[Any, Tensor], Any], words: str, calls: list[Any]
) -> None:
    model = Around(run).bfloat16()
    before = set(vars(model))
    with pytest.raises(UnsupportedError, match=words):
        set_crosses(model, A_CROSS)
    assert set(vars(model)) == before


def test_an_argument_of_none_runs_the_own_forward(calls: list[Any]) -> None:
    class Masked(Around):
        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:  # type: ignore[override]
            y = x * self.a(x) + x
            return y if mask is None else torch.stack([y, y])

    model, x = Masked(plain).bfloat16(), rows()
    set_crosses(model, A_CROSS)
    assert model(x, x).shape == (2, 32, N) and len(calls) == 1
    assert torch.equal(model(x, None), original(model, x, None))


def test_a_factor_that_is_a_number(calls: list[Any]) -> None:
    model, x = Around(lambda s, x: x.size(0) * s.a(x) + x).bfloat16(), rows()
    set_crosses(model, A_CROSS)
    expected = original(model, x)
    assert torch.equal(model(x), expected)
    torch._dynamo.reset()  # graphs of other tests count towards the limit
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(x), expected)
    assert not calls


# --- replay in C++


def test_warm_calls_are_replayed(calls: list[Any]) -> None:
    """A call where x0 is x is another call than one where they differ."""
    model = crossed()
    model(rows())
    (x, operands, plan), (_, later, _), _ = calls
    assert operands[-2] is operands[-1] is x and later[-2] is x and later[-1] is not x
    op = torch.ops.lokakern.routed_chain
    with native.in_use() as library:
        for seed in range(3):
            x0, x = rows(seed=seed), rows(seed=seed + 10)
            for beside in ((x, x), (x0, x), (x0, x0)):
                given = [*operands[:-2], *beside]
                assert torch.equal(library.replay_chain(x, given, plan), op(x, given, plan))
        assert library.size() == 3
        given = [*operands[:-2], x0, x]
        assert torch.equal(
            library.call_op("lokakern::routed_chain", x, given, plan), op(x, given, plan)
        )


class Fused(Full):
    """A cross after two layers on one tensor, which a mod fuses."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Linear(N, N), Linear(N, N)

    def forward(self, x0: Tensor) -> Tensor:
        x = self.one(x0) + self.two(x0)
        return x0 * self.layers[0](x) + x


def test_a_forward_of_a_mod_is_kept(calls: list[Any]) -> None:
    model, x = Fused().bfloat16(), rows()
    report = mods.apply(model, [mods.FuseShared()])
    assert len(report.changed) == 1
    fused, y = vars(model)["forward"], model(x)
    set_crosses(model, FULL[:1])
    assert len(calls) == 0 and not torch.equal(model(x), y) and len(calls) == 1
    assert torch.equal(model(rows(15)), fused(rows(15)))
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x))
    with pytest.raises(UnsupportedError, match="forward"):
        report.undo()
    model.scale = True
    assert torch.equal(model(x), y)
    for module in (model, twin):
        remove_crosses(module)
        assert torch.equal(module(x), y)
    assert vars(model)["forward"] is fused
    report.undo()
    assert "forward" not in vars(model)


def test_the_own_forward_runs_at_shapes_at_which_no_plan_holds() -> None:
    model, like = crossed("low rank"), crossed("low rank")
    run_own, calls = CrossedForward._run_own, list[int]()

    def counted(self: CrossedForward, args: tuple[Tensor], options: dict[str, Any]) -> Any:
        calls.append(len(args[0]))
        return run_own(self, args, options)

    def crosses_from(first: int) -> None:
        set_crosses(model, [Cross(("down", "up"), plan_of(LOW_RANK_STEPS, first=first))])

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(CrossedForward, "_run_own", counted)
        crosses_from(32)
        for m in (16, 16, 48, 48, 16, 16, 8, 8):
            x = torch.randn(m, N).bfloat16()
            found = model(x)
            assert m == 48 or torch.equal(found, LowRank.forward(like, x))
        assert calls == [16, 16, 16, 8]  # the first call of a shape is traced
        crosses_from(8)
        x, calls[:] = torch.randn(8, N).bfloat16(), []
        assert not torch.equal(model(x), LowRank.forward(like, x)) and not calls
        model.down = copy.deepcopy(model.down)
        assert torch.equal(model(x), LowRank.forward(like, x)) and calls == [8]
