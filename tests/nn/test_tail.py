"""Layers with tails in forwards: which are found, values, where the modules run, and changes."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lokakern.conversion.tail_sites import found_tails
from lokakern.functional import norm_gradient
from lokakern.nn import crossed_forward, joined, rectified
from lokakern.nn.crossed_forward import crossed_of, remove_crosses, set_crosses
from lokakern.nn.joined import joined_between
from lokakern.nn.linear import Linear
from lokakern.nn.rectified import KERNEL, rectified_between
from lokakern.nn.static_handoff import set_handoff
from lokakern.nn.tail import Tail, planned_tails, run_tail
from tests.support import compiled_steps
from tests.support.compiled_steps import Behind, compiled, step
from tests.support.routed_layers import BY_ROW, K, layer_of, rows

N = 2 * K
calls_of = functools.partial(compiled_steps.calls_of, "lokakern::norm_gradient")


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has the kernel; its emulation runs."""
    for module in (joined, rectified):
        monkeypatch.setattr(module, "is_fast", lambda columns, device: columns <= 8192)
    torch._dynamo.reset()


class Block(nn.Module):
    """Modules of several kinds in a forward that a test gives."""

    flag = False

    def __init__(self, run: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.run, self.rate = run, 0.5
        self.fc, self.back = Linear(K, N), Linear(N, K)
        self.norm, self.norm_back = nn.LayerNorm(N), nn.LayerNorm(K)
        self.relu, self.silu, self.elu = nn.ReLU(), nn.SiLU(), nn.ELU()
        self.gelu = nn.GELU()
        self.dropout = nn.Dropout(0.5)
        self.layers = nn.ModuleList(Linear(K, K) for _ in range(2))
        self.deep = nn.Sequential(nn.LayerNorm(N), nn.SiLU(), Linear(N, K), nn.ReLU())
        self.plain = nn.Sequential(nn.ReLU(), Linear(N, K))
        for norm in (self.norm, self.norm_back, self.deep[0]):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * x


class One(nn.Module):
    """A forward with nothing but a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x))


def block(run: Callable[[Any, Tensor], Any], *, relus: bool = False, joins: bool = True) -> Any:
    """A block whose tails run by plans."""
    model = Block(run).bfloat16()
    none = [""] * len(model.deep)
    set_handoff(model.deep, none, none, joined=joined_between(model.deep) if joins else ())
    set_tails(model, relus=relus, joins=joins)
    return model


def set_tails(model: nn.Module, *, relus: bool = False, joins: bool = True, key: str = "") -> None:
    tails = planned_tails(found_tails(model), model, has_relus=relus, is_joined=joins)
    set_crosses(model, [], key, tails)


def twin_of(model: nn.Module) -> nn.Module:
    """The module as it was written."""
    found = copy.deepcopy(model)
    for module in found.modules():
        remove_crosses(module)
        if isinstance(module, nn.Sequential):
            module.__class__ = nn.Sequential
    return found


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    found = [x.grad, *(p.grad for p in model.parameters())]
    return [torch.zeros(1) if grad is None else grad.double() for grad in found]


def trained(model: nn.Module, x: Tensor, **options: Any) -> list[Tensor]:
    """The output and all gradients of a compiled step."""
    torch._dynamo.reset()
    return trained_by(compiled(model, fullgraph=True, **options), model, x)


def trained_by(run: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> list[Tensor]:
    """The output and all gradients of a step of a model, compiled or itself."""
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = step(run, x)
    return [y.detach().double(), *gradients(model, x)]


def names_in(run: Callable[[Any, Tensor], Any]) -> list[tuple[str, ...]]:
    tails = found_tails(Block(run).bfloat16())
    return [tail.names for tail in tails if not (tail.is_wide or tail.passed)]


def of_modules(s: Any, x: Tensor) -> Any:
    return s.back(s.relu(s.norm(s.fc(x))))


def of_functions(s: Any, x: Tensor) -> Any:
    return F.relu(s.back(F.silu(s.norm(s.fc(x)))))


def of_torch(s: Any, x: Tensor) -> Any:
    return torch.relu(s.back(F.hardswish(s.norm(s.fc(x)))))


def of_methods(s: Any, x: Tensor) -> Any:
    return s.norm(s.fc(x)).relu() + s.fc(x).relu_()


def in_place(s: Any, x: Tensor) -> Any:
    y = F.relu(s.fc(x), inplace=True)
    return F.silu(s.norm_back(s.back(y)), inplace=True)


def of_gelus(s: Any, x: Tensor) -> Any:
    return F.gelu(s.norm(s.fc(x)), approximate="tanh") + F.gelu(s.fc(x)) + s.gelu(s.fc(2 * x))


def in_a_loop(s: Any, x: Tensor) -> Any:
    for layer in s.layers:
        x = x + s.relu(layer(x))
    return s.norm_back(s.layers[0](x))


def side_by_side(s: Any, x: Tensor) -> Any:
    a, b, c = s.fc(x), s.layers[0](x), s.layers[1](x)
    gate = torch.sigmoid(b)
    a = s.silu(s.norm(a))
    return s.back(a) * gate + s.relu(c)


def of_sequences(s: Any, x: Tensor) -> Any:
    return s.deep(s.fc(x)) + s.plain(s.fc(2 * x))


STYLES: list[tuple[Callable[[Any, Tensor], Any], list[tuple[str, ...]]]] = [
    (of_modules, [("fc", "norm", "relu")]),
    (of_functions, [("fc", "norm", "silu()"), ("back", "relu()")]),
    (of_torch, [("fc", "norm", "hardswish()"), ("back", "relu()")]),
    (of_methods, [("fc", "norm", "relu()"), ("fc", "relu_()")]),
    (in_place, [("fc", "relu_()"), ("back", "norm_back", "silu_()")]),
    (of_gelus, [("fc", "norm", "gelu_tanh()"), ("fc", "gelu()"), ("fc", "gelu")]),
    (in_a_loop, [("layers.0", "relu"), ("layers.1", "relu"), ("layers.0", "norm_back")]),
    (side_by_side, [("fc", "norm", "silu"), ("layers.1", "relu")]),
    (of_sequences, [("fc", "deep"), ("fc", "plain")]),
]


@pytest.mark.parametrize(("run", "names"), STYLES)
def test_tails_are_found(run: Callable[[Any, Tensor], Any], names: list[tuple[str, ...]]) -> None:
    assert names_in(run) == names


def writes_before_the_tail(s: Any, x: Tensor) -> Any:
    y = s.fc(x)
    x.add_(1.0)
    return F.relu(y) + x.sum()


def writes_by_an_operator(s: Any, x: Tensor) -> Any:
    y = s.fc(x)
    x += 1.0
    return F.relu(y) + x.sum()


def returns_what_it_writes_to(s: Any, x: Tensor) -> Any:
    y = s.fc(x)
    y.relu_()
    return y


@pytest.mark.parametrize(
    "run",
    [
        lambda s, x: F.elu(s.fc(x)),
        lambda s, x: s.elu(s.back(F.elu(s.fc(x)))),
        lambda s, x: s.relu(s.dropout(s.fc(x))),
        lambda s, x: F.relu(s.fc(x) + 1),
        lambda s, x: F.relu(s.fc(x).view(-1, K)),
        lambda s, x: (lambda y: F.relu(y) + y)(s.fc(x)),
        lambda s, x: (lambda y: s.norm(y) + y)(s.fc(x)),
        lambda s, x: (lambda y: (F.relu(y), y))(s.fc(x)),
        lambda s, x: F.relu6(s.fc(x)) + F.leaky_relu(s.fc(x)),
        lambda s, x: F.layer_norm(s.fc(x), (N,), s.norm.weight, s.norm.bias),
        lambda s, x: s.norm(input=s.fc(x)),
        lambda s, x: s.norm(s.fc(input=x)),
        lambda s, x: torch.relu(F.linear(x, s.fc.weight, s.fc.bias)),
        lambda s, x: s.deep[1](s.deep[2](s.deep[1](s.deep[0](s.back(x))))),  # no children
        writes_before_the_tail,
        writes_by_an_operator,
        returns_what_it_writes_to,
    ],
)
def test_other_calls_are_left_alone(run: Callable[[Any, Tensor], Any]) -> None:
    assert not names_in(run)


def test_a_module_of_a_user_in_between_may_write() -> None:
    def run(s: Any, x: Tensor) -> Any:
        y = s.fc(x)
        x = s.elu(x) if s.flag else s.extra(x)
        return F.relu(y), x

    model = Block(run).bfloat16()
    model.extra = Breaking()
    assert not found_tails(model)
    model.flag = True
    assert [tail.names for tail in found_tails(model)] == [("fc", "relu()")]


@torch.no_grad()
def test_an_eager_call_of_a_traced_forward_runs_the_modules() -> None:
    """Of a module whose products with parameters are quantized, too."""
    layer, x = Linear(K, N).bfloat16(), rows(32)
    call = functools.partial(run_tail, Tail((), rectified.ALWAYS, "none relu").plan)
    for last in ("relu()", nn.ReLU()):
        assert torch.equal(call(x, layer, last), F.relu(layer(x)))
        assert products_with_relus(lambda x, last=last: call(x, layer, last), x) == 0


@pytest.mark.parametrize(("kind", "name"), [(nn.ReLU, "relu"), (nn.LayerNorm, "norm")])
def test_subclasses_are_left_alone(kind: type, name: str) -> None:
    model = Block(lambda s, x: s.relu(s.norm(s.fc(x)))).bfloat16()
    getattr(model, name).__class__ = type("Other", (kind,), {})
    assert [tail.names for tail in found_tails(model)] == ([("fc", "norm")] * (kind is nn.ReLU))
    model.fc.__class__ = type("Other", (Linear,), {})
    assert not found_tails(model)


class Cast(Block):
    """A forward with arguments that may be left out or be None."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 2.0) -> Any:
        y = self.norm(self.fc(x)).relu() * scale
        return y if mask is None else y * mask


def asks_for_a_shape(s: Any, x: Tensor) -> Any:
    return F.relu(s.fc(x)) if x.shape[0] > 3 else x


def asks_for_a_value(s: Any, x: Tensor) -> Any:
    return F.relu(s.fc(x)) if x.sum() > 0 else x


def keeps_its_output(s: Any, x: Tensor) -> Any:
    s.last = F.relu(s.fc(x))
    return s.last


def is_without_gradients(s: Any, x: Tensor) -> Any:
    with torch.no_grad():
        x = F.relu(s.fc(x))
    return x * 2


def draws(s: Any, x: Tensor) -> Any:
    return F.relu(s.fc(x)) * float(torch.rand(()))


@pytest.mark.parametrize(
    "run",
    [asks_for_a_shape, asks_for_a_value, keeps_its_output, is_without_gradients, draws],
)
def test_forwards_that_cannot_be_traced_are_left_alone(
    run: Callable[[Any, Tensor], Any], recwarn: pytest.WarningsRecorder
) -> None:
    assert not names_in(run) and not recwarn.list


def test_a_forward_that_is_kept_from_compilers_is_left_alone() -> None:
    class Disabled(Block):
        forward = torch.compiler.disable(Block.forward)  # type: ignore[assignment]

    assert not found_tails(Disabled(of_modules).bfloat16())


def test_plans_are_those_of_modules_in_a_sequence() -> None:
    model = Block(lambda s, x: s.norm(s.fc(F.relu(s.layers[0](x))))).bfloat16()
    model.fc = layer_of((BY_ROW, "", ""), n=N, bias=True)
    sequence = nn.Sequential(model.layers[0], nn.ReLU(), model.fc, model.norm)
    tails = planned_tails(found_tails(model), model, has_relus=True, is_joined=True)
    assert tails == [
        Tail(("layers.0", "relu()"), rectified_between(sequence)[0], "none relu"),
        Tail(("fc", "norm"), "", "layer none"),
    ]
    assert tails[0].rectified not in ("", rectified.ALWAYS)  # the reader quantizes at some m
    for options in ((False, True), (True, False)):
        relus, joins = options
        found = planned_tails(found_tails(model), model, has_relus=relus, is_joined=joins)
        assert [(bool(x.rectified), bool(x.joined)) for x in found] == [
            (relus, joins), (False, joins)
        ]  # fmt: skip
    model.fc = nn.Linear(K, N).bfloat16()  # of no conversion
    assert not planned_tails(found_tails(model), model, has_relus=True, is_joined=True)[1].plan
    assert found_tails(model.float())  # for autocast
    assert not found_tails(model.double())


@pytest.mark.parametrize(("kind", "count"), [(nn.Tanh, 1), (One, 0)])
def test_a_tail_does_not_pass_a_module_that_may_write(kind: type[nn.Module], count: int) -> None:
    def run(s: Any, x: Tensor) -> Any:
        y, z = s.fc(x), s.between(x)
        return s.norm(y).sum() + z.sum()

    model = Block(run)
    model.between = kind()
    assert len(found_tails(model.bfloat16())) == count


def test_layers_without_a_bias() -> None:
    model = Block(of_modules).bfloat16()
    for layer in (model.fc, model.back, *model.layers, model.deep[2], model.plain[1]):
        layer.bias = None
    assert [tail.names for tail in found_tails(model)] == [("fc", "norm", "relu")]


def reads_twice(s: Any, x: Tensor) -> Any:
    y = F.relu(s.layers[0](x))
    return s.layers[1](y) + s.back(s.elu(s.fc(y)))


def calls_twice(s: Any, x: Tensor) -> Any:
    return s.layers[1](F.relu(s.layers[0](x))) + s.back(s.elu(s.fc(F.relu(s.layers[0](2 * x)))))


def reads_in_a_sequence(s: Any, x: Tensor) -> Any:
    return s.wide(s.layers[0](x)) + s.back(s.elu(s.fc(x)))


@pytest.mark.parametrize("run", [reads_twice, calls_twice, reads_in_a_sequence])
def test_a_relu_in_a_product_looks_at_all_that_reads_it(run: Callable[[Any, Tensor], Any]) -> None:
    model = Block(run)
    model.wide = nn.Sequential(nn.ReLU(), model.fc, nn.ELU(), model.back)
    model.bfloat16()

    def route() -> str:
        (tail,) = planned_tails(found_tails(model), model, has_relus=True, is_joined=False)
        return tail.rectified

    assert route() == rectified.ALWAYS
    model.fc = model.wide[1] = layer_of((BY_ROW, "", ""), n=N, bias=True)
    assert route() == f"none;16:0={KERNEL},16=;1:0={KERNEL},17="


# --- values


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("relus", [False, True])
@pytest.mark.parametrize(("run", "names"), STYLES)
def test_gradients_are_as_exact_as_those_of_the_modules(
    run: Callable[[Any, Tensor], Any], names: list[tuple[str, ...]], relus: bool
) -> None:
    model = block(run, relus=relus)
    plain, exact = twin_of(model), twin_of(model).double()
    count = len(names) + (run is of_sequences)  # a layer with a relu in the sequence
    compiled_model = compiled(model, fullgraph=True)
    assert calls_of(compiled_model, rows(48).requires_grad_()) == count
    mine, theirs = trained_by(compiled_model, model, rows(48)), trained_by(plain, plain, rows(48))
    true = trained_by(exact, exact, rows(48).double())
    assert torch.equal(mine[0], theirs[0])
    for one, other, right in zip(mine, theirs, true, strict=True):
        size = right.norm() + 1e-30
        assert (one - right).norm() / size <= 1.3 * (other - right).norm() / size + 2e-3


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("relus", [False, True])
def test_the_bits_are_those_of_a_sequence(relus: bool) -> None:
    def run(s: Any, x: Tensor) -> Any:
        y = s.relu(s.layers[1](F.relu(s.layers[0](x))))
        return s.norm_back(s.back(s.silu(s.norm(s.fc(y)))))

    model = block(run, relus=relus)
    s = twin_of(model)
    other = nn.Sequential(
        s.layers[0], nn.ReLU(), s.layers[1], nn.ReLU(), s.fc, s.norm, nn.SiLU(), s.back, s.norm_back
    )
    none = [""] * len(other)
    relus_at = rectified_between(other) if relus else ()
    set_handoff(other, none, none, rectified=relus_at, joined=joined_between(other))
    used = {name: p for name, p in model.named_parameters() if "deep" not in name
            and "plain" not in name}  # fmt: skip
    mine = trained(model, rows(48))
    theirs = trained(other, rows(48))
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])
    for name, parameter in used.items():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, s.get_parameter(name).grad)


def products_with_relus(model: Callable[[Tensor], Any], x: Tensor) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        model(x)
    return sum(event.name == "aten::_addmm_activation" for event in found.events())


@torch.no_grad()
def test_compiled_inference_has_relus_in_products() -> None:
    model, x = block(of_functions, relus=True, joins=False), rows(32)
    run = compiled(model, fullgraph=True)
    assert torch.equal(run(x), twin_of(model)(x)) and products_with_relus(run, x) == 1
    model = block(of_sequences, relus=True, joins=False)
    torch._dynamo.reset()
    run = compiled(model, fullgraph=True)
    assert torch.equal(run(x), twin_of(model)(x)) and products_with_relus(run, x) == 1
    x = rows(32).view(2, 16, K)
    assert torch.equal(run(x), twin_of(model)(x)) and products_with_relus(run, x) == 1


def test_gradients_by_routes_of_a_quantized_layer() -> None:
    model = block(of_functions)
    model.back = layer_of((BY_ROW, BY_ROW, BY_ROW), n=K, k=N, bias=True)
    set_tails(model)
    plain = twin_of(model)
    assert calls_of(compiled(model, fullgraph=True), rows(48).requires_grad_()) == 2
    for one, other in zip(trained(model, rows(48)), trained(plain, rows(48)), strict=True):
        assert (one - other).norm() <= 0.05 * other.norm()  # an FP8 step moves by a rounding


@pytest.mark.parametrize("shape", [(1, K), (2, 3, K), (0, K)])
def test_inputs_of_other_shapes(shape: tuple[int, ...]) -> None:
    model = block(of_functions, relus=True)
    x = torch.randn(shape).bfloat16()
    mine, theirs = trained(model, x), trained(twin_of(model), x)
    assert torch.equal(mine[0], theirs[0]) and mine[1].shape == x.shape


def test_dynamic_rows() -> None:
    model = block(of_functions, relus=True)
    run = compiled(model, fullgraph=True, dynamic=True)
    for m in (80, 33, 48):
        assert calls_of(run, rows(m).requires_grad_()) == 2


# --- where the modules run


@pytest.mark.parametrize("relus", [False, True])
def test_eager_calls_run_the_own_forward(relus: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = block(of_functions, relus=relus), rows(32)
    plain = twin_of(model)

    def no_tail(*_: Any) -> Any:
        raise AssertionError

    scope = vars(crossed_forward)
    monkeypatch.setitem(scope, "_are_tensors", no_tail)
    for seen in (x, x.clone().requires_grad_()):
        assert torch.equal(model(seen), plain(seen))
    with torch.no_grad():
        assert torch.equal(model(x), plain(x)) and products_with_relus(model, x) == 0
    assert calls_of(model, x.clone().requires_grad_()) == 0


def _hook(*_given: object) -> None:
    return None


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("change", "count"),
    [
        (lambda m: None, 4),
        (lambda m: m.norm.register_forward_hook(_hook), 3),
        (lambda m: m.fc.register_forward_pre_hook(_hook), 2),  # which is called twice
        (lambda m: m.relu.register_forward_hook(_hook), 3),
        (lambda m: m.deep.register_forward_hook(_hook), 3),
        (lambda m: m.layers[0].register_forward_hook(_hook), 3),
        (lambda m: m.deep[0].register_forward_hook(_hook), 3),
        (lambda m: setattr(m.norm, "forward", lambda x: nn.LayerNorm.forward(m.norm, x)), 3),
        (lambda m: m.fc.bias.requires_grad_(False), 2),
        (lambda m: m.norm.weight.requires_grad_(False), 3),
        (lambda m: m.fc.weight.requires_grad_(False), 4),
        (lambda m: setattr(m.norm, "weight", m.norm.bias), 3),
        (lambda m: m.requires_grad_(False), 0),
        (lambda m: m.float(), 0),
        (lambda m: setattr(m, "relu", nn.ELU()), 1),  # other children than known
        (lambda m: setattr(m, "norm", copy.deepcopy(m.norm)), 1),
        (lambda m: m.layers.append(nn.Identity()), 1),
        (lambda m: setattr(m, "rate", 0.25), 4),  # which the forward does not read
        (lambda m: setattr(m, "flag", True), 1),
        (lambda m: m.deep.__setitem__(0, nn.RMSNorm(N).bfloat16()), 2),
        (lambda m: m.deep.__setitem__(1, nn.ELU()), 2),  # the sequence is not as known, either
        (lambda m: vars(m).__setitem__("forward", lambda x: of_all(m, x)), 1),
    ],
)
def test_the_modules_run_where_anything_is_unusual(
    change: Callable[[Any], object], count: int
) -> None:
    model = block(of_all)
    plain = twin_of(model)
    for each in (model, plain):
        change(each)
    x = rows(32).to(model.fc.weight.dtype).requires_grad_()
    run = compiled(model)
    assert calls_of(run, x) == count
    mine, theirs = trained_by(run, model, x), trained_by(plain, plain, x)
    assert torch.equal(mine[0], theirs[0])
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).norm() <= 0.05 * other.norm() + 1e-6


def of_all(s: Any, x: Tensor) -> Any:
    y = F.relu(s.layers[0](s.back(s.relu(s.norm(s.fc(x))))))
    return y + s.deep(s.fc(y))


def negated(module: nn.Module) -> None:
    """Give a module a forward of its own."""
    run = type(module).forward
    module.forward = lambda x: -run(module, x)  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "has_gradients"),
    [
        (lambda m: negated(m.fc), True), (lambda m: negated(m.norm), True),
        (lambda m: negated(m.relu), True), (lambda m: negated(m.plain), True),
        (lambda m: negated(m.plain[0]), True), (lambda m: negated(m.plain[0]), False),
        (lambda m: setattr(m, "flag", 1), False), (lambda m: setattr(type(m), "flag", 1), False),
        (lambda m: setattr(m, "doubled", torch.neg), False),
    ],
)  # fmt: skip
def test_compiled_code_notices_what_changes_later(
    change: Callable[[Any], object], has_gradients: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(s: Any, x: Tensor) -> Any:
        y = s.doubled(s.relu(s.norm(s.fc(x)))) + s.plain(s.fc(x)).repeat(1, N // K)
        return y + 1 if s.flag else y

    monkeypatch.setattr(Block, "flag", False)
    model, x = block(run, relus=True), rows(32)
    with torch.set_grad_enabled(has_gradients):
        call = compiled(model, fullgraph=True)
        y = call(x)
        assert torch.equal(y, Block.forward(model, x))
        change(model)
        expected = Block.forward(model, x)
        assert torch.equal(call(x), expected) and not torch.equal(y, expected)


def trained_freely(model: nn.Module, x: Tensor) -> list[Tensor]:
    torch._dynamo.reset()
    x = x.detach().clone().requires_grad_()
    model.zero_grad()
    y = step(compiled(model), x)
    return [y.detach().double(), *gradients(model, x)]


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", ["register_full_backward_hook", "register_full_backward_pre_hook"])
@pytest.mark.parametrize("child", ["fc", "norm", "relu", "deep"])
def test_hooks_of_a_compiled_backward_pass_run(name: str, child: str) -> None:
    model, seen = block(of_all, relus=True), []
    getattr(model.get_submodule(child), name)(lambda *given: seen.append(given[0]))
    x = rows(32).requires_grad_()
    step(compiled(model), x)
    assert seen and set(seen) == {model.get_submodule(child)}


def test_tails_under_autocast_and_without_gradients() -> None:
    model, x = block(of_functions), rows(32).requires_grad_()
    wide = copy.deepcopy(model).float()
    for half in (torch.float16, torch.bfloat16):
        with torch.autocast("cpu", dtype=half):
            assert calls_of(compiled(wide), x.float()) == 2
        torch._dynamo.reset()
    run, plain = compiled(model), twin_of(model)
    with torch.no_grad():
        assert torch.equal(run(x), plain(x))


def test_a_replaced_method_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    before = nn.LayerNorm.forward
    monkeypatch.setattr(nn.LayerNorm, "forward", lambda self, x: before(self, x))
    assert calls_of(compiled(block(of_modules)), rows(32).requires_grad_()) == 0


@pytest.mark.parametrize("is_warm", [False, True])
def test_a_replaced_forward_of_its_class_is_called(
    is_warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = block(of_modules), rows(32)
    run = compiled(model, fullgraph=True)
    if is_warm:
        run(x)
    monkeypatch.setattr(Block, "forward", lambda self, x: self.fc(x))
    assert torch.equal(run(x), model.fc(x)) and torch.equal(model(x), model.fc(x))


class Asking(One):
    """Asks for attributes in ways of a few models."""

    name = "fc"

    @property
    def scale(self) -> float:
        return self.scale_of["a"] if getattr(self, "is_scaled", False) else 2.0

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(getattr(self, self.name)(x)) * self.scale
        return -y if hasattr(self, "is_negative") else y


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    "given",
    [
        {"is_negative": True},
        {"scale_of": {"a": 3.0}, "is_scaled": True},
        {"other": Linear(K, K).bfloat16(), "name": "other"},
    ],
)
def test_attributes_that_come_later(given: dict[str, Any], is_warm: bool) -> None:
    model, x = Asking().bfloat16(), rows(32).requires_grad_()
    set_tails(model)
    run = compiled(model, fullgraph=True)
    if is_warm:
        assert calls_of(run, x) == 1
    for name, value in given.items():
        setattr(model, name, value)
    assert torch.equal(run(x), Asking.forward(model, x))
    model.never_read = 1  # which changes nothing
    assert torch.equal(run(x), Asking.forward(model, x))


class Alike:
    """An object that cannot say whether it equals another one."""

    def __eq__(self, _: object) -> bool:
        raise ValueError("which of my elements?")

    __hash__ = None  # type: ignore[assignment]


class Helper(nn.Module):
    """A child whose method is called, and which may have a bias."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.alike = Alike()
        self.register_buffer("mask", None)
        self.again = Linear(K, K)
        self.bias = nn.Parameter(torch.randn(K)) if bias else None
        self.inner = Linear(K, K, bias=bias)

    def scaled(self, x: Tensor) -> Tensor:
        return x * 2.0

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.again(x)) + 1.0


class Helped(One):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.helper = Helper(bias)
        self.register_parameter("own", None)

    def forward(self, x: Tensor) -> Tensor:
        y = self.helper.forward(self.helper.scaled(F.relu(self.fc(x))))
        y = y if self.helper.alike and self.helper.mask is None else y * self.helper.mask
        y = y if self.own is None else y - self.own
        y = y if self.helper.bias is None else y + self.helper.bias
        return y if self.helper.inner.bias is None else -y


class OtherHelper(Helper):
    def scaled(self, x: Tensor) -> Tensor:
        return x * 3.0


@pytest.mark.sample(every=2)
@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize(
    ("bias", "change"),
    [
        (True, lambda patch, x: patch.setattr(Helper, "scaled", lambda s, x: x * 4.0)),
        (True, lambda patch, x: patch.setattr(Helper, "forward", lambda s, x: x - 1.0)),
        (True, lambda patch, x: patch.setattr(x, "scaled", lambda x: x * 5.0)),
        (True, lambda patch, x: setattr(x, "__class__", OtherHelper)),
        (True, lambda patch, x: setattr(x, "bias", None)),
        (True, lambda patch, x: setattr(x.inner, "bias", None)),
        (False, lambda patch, x: setattr(x, "bias", nn.Parameter(torch.ones(K).bfloat16()))),
        (False, lambda patch, x: setattr(x.inner, "bias", nn.Parameter(torch.ones(K)))),
        (True, lambda patch, x: setattr(x, "mask", torch.zeros(K).bfloat16())),
    ],
    ids=["method", "forward", "own", "class", "bias", "inner", "new bias", "new inner", "mask"],
)
def test_methods_and_parameters_of_children(
    bias: bool,
    change: Callable[[pytest.MonkeyPatch, nn.Module], None],
    is_warm: bool,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    """A trace has what they were; where they are others, the own forward runs."""
    model, x = Helped(bias).bfloat16(), rows(32).requires_grad_()
    set_tails(model)
    twin = copy.deepcopy(model)
    crossed = crossed_of(twin)
    assert crossed is not None and crossed.is_as_traced
    run = compiled(model, fullgraph=True)
    if is_warm:
        assert calls_of(run, x) == 1
    change(monkeypatch, model.helper)
    found = crossed_of(model)
    assert found is not None and not found.is_as_traced
    assert torch.equal(model(x), Helped.forward(model, x))
    # Of no model does compiled code check for methods that a class gets later.
    if not (is_warm and request.node.callspec.id.startswith(("method", "forward"))):
        assert torch.equal(run(x), Helped.forward(model, x))


def test_a_parameter_of_its_own_that_comes_later() -> None:
    model, x = Helped(bias=True).bfloat16(), rows(32).requires_grad_()
    set_tails(model)
    run = compiled(model, fullgraph=True)
    assert calls_of(run, x) == 1
    model.own = nn.Parameter(torch.ones(K).bfloat16())
    assert torch.equal(run(x), Helped.forward(model, x))


def test_a_child_whose_forward_is_called_may_have_tails() -> None:
    model, x = Helped(bias=True).bfloat16(), rows(32).requires_grad_()
    set_tails(model)
    set_tails(model.helper)
    twin = pickle.loads(pickle.dumps(model))
    for each in (model, copy.deepcopy(model), twin):
        crossed = crossed_of(each)
        assert crossed is not None and crossed.is_as_traced
        torch._dynamo.reset()
        assert torch.equal(compiled(each, fullgraph=True)(x), Helped.forward(each, x))


class Whole(One):
    """Asks for all that it has."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.fc(x)) * vars(self)["rate"] * self.__dict__["rate"]


def test_attributes_that_are_not_read_by_name() -> None:
    model = Whole().bfloat16()
    model.rate = 2.0
    set_tails(model)
    crossed = crossed_of(model)
    assert crossed is not None and crossed.is_as_traced
    model.rate = 3.0
    assert not crossed.is_as_traced


@pytest.mark.parametrize("name", ["__getattr__", "__getattribute__"])
def test_classes_that_look_attributes_up_themselves_are_left_alone(name: str) -> None:
    def look(self: nn.Module, key: str) -> Any:
        return 2.0 if key == "scale" else getattr(nn.Module, name)(self, key)

    assert not found_tails(type("Other", (One,), {name: look})().bfloat16())


def test_attributes_that_compilers_cannot_read() -> None:
    """A forward that does not read them is compiled whole."""
    model, x = One().bfloat16(), rows(32).requires_grad_()
    model.owner, model.options = weakref.ref(model.fc), (1, [2])
    model.memory, model.again = nn.LSTM(2, 2), torch.compile(nn.Linear(2, 2))
    set_tails(model)
    assert calls_of(compiled(model, fullgraph=True), x) == 1
    model.memory, model.more = None, nn.Identity()
    assert calls_of(compiled(model, fullgraph=True), x) == 1


class All(One):
    """Calls all of its children."""

    def forward(self, x: Tensor) -> Tensor:
        for child in self.children():
            x = F.relu(child(x)) if isinstance(child, nn.Linear) else child(x)
        return x


def test_a_forward_that_calls_all_children_is_left_alone() -> None:
    assert not found_tails(All().bfloat16())


@pytest.mark.parametrize("name", ["fc", "norm", "relu"])
def test_a_child_that_is_compiled_later(name: str) -> None:
    model, x = block(of_modules), rows(32)
    expected = twin_of(model)(x)
    setattr(model, name, torch.compile(model.get_submodule(name), backend="eager"))
    assert torch.equal(compiled(model, fullgraph=True)(x), expected)


class Breaking(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return 2 * x


def test_graphs_that_break() -> None:
    model = Block(lambda s, x: s.deep(s.fc(s.extra(F.relu(s.layers[0](x))))))
    model.extra = Breaking()
    model.deep.append(Breaking())
    model.bfloat16()
    set_tails(model)
    plain, x = twin_of(model), rows(48)
    mine, theirs = trained_freely(model, x), trained_freely(plain, x)
    assert torch.equal(mine[0], theirs[0])
    for one, other in zip(mine, theirs, strict=True):
        assert (one - other).norm() <= 0.05 * other.norm() + 1e-6


class Negated(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(-x)  # type: ignore[no-any-return]


def test_a_sequence_of_another_class() -> None:
    model = block(lambda s, x: s.plain(s.fc(x)), relus=True)
    x = rows(32).requires_grad_()
    assert calls_of(compiled(model), x) == 1
    model.plain.__class__ = Negated
    if torch.__version__ < (2, 13):  # whose guards do not notice another class of any module
        torch._dynamo.reset()
    assert torch.equal(compiled(model)(x), Block.forward(model, x)) and calls_of(model, x) == 0
    model = block(lambda s, x: s.plain(s.fc(x)), relus=True, joins=False)
    while len(model.plain):
        del model.plain[0]
    torch._dynamo.reset()
    assert torch.equal(compiled(model)(x), Block.forward(model, x))


def test_optional_arguments_that_are_given() -> None:
    model = Cast(of_modules).bfloat16()
    set_tails(model)
    plain, x, mask = twin_of(model), rows(32).requires_grad_(), torch.ones(N).bfloat16()
    run = compiled(model, fullgraph=True)
    assert calls_of(run, x) == 1
    for given in ({}, {"mask": mask}, {"scale": 3.0}, {"mask": None, "scale": 2.0}):
        assert torch.equal(run(x, **given), plain(x, **given))
        assert torch.equal(model(x, **given), plain(x, **given))
        counted = calls_of(lambda x, given=given: run(x, **given), x)
        assert counted == (not given or given.get("scale") == 2.0)


def with_dropout(s: Any, x: Tensor) -> Any:
    y = F.dropout(F.relu(s.fc(x)), 0.5, s.training)
    return s.norm_back(s.back(y)) if s.training else F.relu(s.back(y))


def test_a_forward_that_depends_on_whether_it_trains() -> None:
    model = block(with_dropout, relus=True)
    names = [tail.names for tail in crossed_of(model).tails]
    assert names == [("fc", "relu()"), ("back", "norm_back"), ("back", "relu()")]
    plain, x = twin_of(model), rows(48)
    for is_training in (True, False, True):
        results = []
        for each in (model.train(is_training), plain.train(is_training)):
            torch.manual_seed(1)
            results.append(compiled(each, fullgraph=True)(x))
        assert torch.equal(*results)
    assert calls_of(compiled(model.train(), fullgraph=True), x.requires_grad_()) == 2
    model.eval()
    assert calls_of(compiled(model, fullgraph=True), x) == 2
    model.train().back.eval()  # a child in another mode
    assert calls_of(compiled(model, fullgraph=True), x) == 0


def test_a_module_that_was_compiled_follows_its_plans() -> None:
    model, x = block(of_functions), rows(48).requires_grad_()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True, dynamic=False)
    tails = crossed_of(model).tails
    for _ in range(3):
        set_crosses(model, [], "", tails)
        assert calls_of(run, x) == 2
        set_crosses(model, [], "", [tail._replace(joined="") for tail in tails])
        assert calls_of(run, x) == 0
        remove_crosses(model)
        assert calls_of(run, x) == 0
    # Each once; what is traced after a compilation has attributes that torch added, twice more.
    assert counter.frame_count <= 5


def test_equal_modules_that_are_compiled_one_by_one_share_a_graph() -> None:
    counter = CompileCounterWithBackend("eager")
    for kind in (of_functions, of_modules, None):
        made = [One().bfloat16() if kind is None else block(kind) for _ in range(12)]
        for each in made:
            set_tails(each)
            each.compile(backend=counter, fullgraph=True, dynamic=False)
        nn.Sequential(*made)(rows(32).requires_grad_())
    assert counter.frame_count == 3


@pytest.mark.rest
def test_many_classes_that_are_compiled_one_by_one() -> None:
    """Dynamo compiles one code 8 times at most."""
    x, counter = rows(32), CompileCounterWithBackend("eager")
    for place in range(12):
        model = type(f"Block{place}", (Block,), {"flag": place})(of_modules).bfloat16()
        set_tails(model)
        model.compile(backend=counter, fullgraph=True, dynamic=False)
        model(x)
    assert counter.frame_count == 12


@pytest.mark.parametrize("is_strict", [False, True])
def test_an_exported_model_may_be_trained(is_strict: bool) -> None:
    model = block(of_all, relus=True)
    exported = torch.export.export(model, (rows(32),), strict=is_strict).module()
    assert torch.equal(exported(rows(32)), model(rows(32)))
    step(exported, rows(32))
    assert exported.get_parameter("fc.bias").grad is not None


@pytest.mark.rest
def test_copies_and_pickles_and_states() -> None:
    model, x = block(of_all), rows(32).requires_grad_()
    keys = list(Block(of_all).state_dict())
    assert list(model.state_dict()) == keys
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert crossed_of(other).module is other
        assert inspect.signature(other.forward) == inspect.signature(model.forward)
        assert other.forward.__code__ is model.forward.__code__  # that of its class
        torch._dynamo.reset()
        assert calls_of(compiled(other, fullgraph=True), x) == 4
        for one, its in zip(trained(model, x), trained(other, x), strict=True):
            assert torch.equal(one, its)
        nn.init.zeros_(other.fc.weight)
        assert torch.equal(model(x), trained(model, x)[0].bfloat16())
        other.load_state_dict(model.state_dict())
        assert torch.equal(other(x), model(x))
        remove_crosses(other)
        assert "forward" not in vars(other)


def test_a_tail_that_is_not_there_is_refused() -> None:
    from lokakern.errors import UnsupportedError

    model = Block(of_modules).bfloat16()
    with pytest.raises(UnsupportedError, match="does not call fc and relu"):
        set_crosses(model, [], "", [Tail(("fc", "relu"), rectified.ALWAYS, "")])
    assert "forward" not in vars(model)


@pytest.mark.parametrize("relus", [False, True])
def test_a_module_may_write_to_the_output_of_a_relu(relus: bool) -> None:
    model, found = block(lambda s, x: F.relu(s.fc(x)), relus=relus), []
    for writes in (True, False):
        crossed = crossed_of(model)
        assert crossed is not None and crossed.tails
        x = rows(48).requires_grad_()
        model.zero_grad()
        torch._dynamo.reset()
        step(compiled(Behind(model, writes=writes), fullgraph=True), x)
        found.append([grad.clone() for grad in gradients(model, x)])
    assert all(map(torch.equal, *found))


@pytest.mark.gpu
def test_compiled_training_steps_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (joined, rectified):
        monkeypatch.setattr(module, "is_fast", norm_gradient.is_fast)
    for run, _ in STYLES:
        model = block(run, relus=True).cuda()
        plain = twin_of(model)
        x = rows(256).cuda().requires_grad_()
        for dynamic in (False, True):
            torch._dynamo.reset()
            found = []
            for each in (model, plain):
                compiled_step = torch.compile(each, fullgraph=True, dynamic=dynamic)
                for _ in range(3):
                    x.grad = None
                    each.zero_grad()
                    step(compiled_step, x)
                found.append(gradients(each, x))
            for one, other in zip(*found, strict=True):
                assert (one - other).norm() <= 0.02 * other.norm()


def test_replicas_of_data_parallel_run_their_own_parameters() -> None:
    model, x = block(of_modules), rows(4)
    expected = twin_of(model)(x)
    replica = pickle.loads(pickle.dumps(copy.deepcopy(model)))._replicate_for_data_parallel()
    for module in (model, replica):
        assert torch.equal(module(x), expected)
    assert "forward" not in vars(replica) and crossed_of(model) is not None
    replica.fc = nn.Linear(K, N).bfloat16()
    assert not torch.equal(replica(x), expected) and torch.equal(model(x), expected)
