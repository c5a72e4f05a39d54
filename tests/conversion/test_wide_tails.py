"""Chains with residuals and gates of a forward: found, chosen by rows, run, left and told."""

from __future__ import annotations

import copy
import io
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import lokakern
from lokakern import numerics
from lokakern.chain.candidates import Layer
from lokakern.conversion.convert import Conversion
from lokakern.device import current_device
from lokakern.nn.crossed_forward import crossed_of
from lokakern.selection import dispatcher
from lokakern.types import Format
from lokakern.workloads.suite_files import suite_from_file
from tests.conversion.test_tuned_chains import kept, tuned
from tests.support.chain_rows import NARROW, WIDE, fp8_rows, layer_rows, plain_rows
from tests.support.chained_models import Apart, Given, Run, convert, is_chained, rows
from tests.support.measurements import BF16, H200, Book, gemm, time

pytestmark = pytest.mark.usefixtures("fresh_dynamo")

PLAIN, FP8 = {512: 20.0, 2048: 60.0}, {512: 5.0, 2048: 15.0}


class Net(Given):
    """A layer with a norm, and two of an MLP, in a forward that a test gives."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.fc, self.norm, self.relu = nn.Linear(512, 512), nn.LayerNorm(512), nn.ReLU()
        self.wide, self.narrow = nn.Linear(512, 1024), nn.Linear(1024, 512)
        self.sigmoid, self.shift = nn.Sigmoid(), nn.Parameter(torch.ones(512))
        self.inner = nn.Sequential(nn.Sequential(nn.ReLU(), nn.GELU()), nn.Dropout(0.5))
        self.lists = nn.ModuleList([nn.ModuleList([nn.Tanh()])])
        self.other = nn.Sequential(nn.Linear(512, 512), nn.Identity())


def behind(net: Any, x: Tensor) -> Tensor:
    return x + net.relu(net.norm(net.fc(x)))  # type: ignore[no-any-return]


def as_method(net: Any, x: Tensor) -> Tensor:
    return net.norm(net.fc(x)).relu().add(x)  # type: ignore[no-any-return]


def before(net: Any, x: Tensor) -> Tensor:
    return F.silu(net.norm(torch.add(net.fc(x), x)))


def before_alone(net: Any, x: Tensor) -> Tensor:
    return net.norm(x + net.fc(x))  # type: ignore[no-any-return]


def gated(net: Any, x: Tensor) -> Tensor:
    return (2 * x) * torch.sigmoid(net.norm(net.fc(x)))


def by_module(net: Any, x: Tensor) -> Tensor:
    return net.sigmoid(net.fc(x)).mul(x)  # type: ignore[no-any-return]


def in_a_highway(net: Any, x: Tensor) -> Tensor:
    return x + x * net.fc(x).sigmoid()  # type: ignore[no-any-return]


def gated_sum(net: Any, x: Tensor) -> Tensor:
    return x * torch.sigmoid(net.norm(net.fc(x) + 2 * x))


def product(net: Any, x: Tensor) -> Tensor:
    return net.fc(x) + x  # type: ignore[no-any-return]


def computed_later(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.fc(x))
    return y + F.elu(x)  # type: ignore[no-any-return]


def no_norm(net: Any, x: Tensor) -> Tensor:
    return F.relu(net.fc(x)) + x


def behind_in_place(net: Any, x: Tensor) -> Tensor:
    y = net.relu(net.norm(net.fc(x)))
    y += x
    return y  # type: ignore[no-any-return]


def before_in_place(net: Any, x: Tensor) -> Tensor:
    y = net.fc(x)
    y.add_(x)
    return F.silu(net.norm(y))


def by_an_operator(net: Any, x: Tensor) -> Tensor:
    return operator.iadd(net.fc(x), x)  # type: ignore[no-any-return]


PATTERNS: dict[Run, str] = {
    behind: "bias+layer+affine+relu+residual_last",
    as_method: "bias+layer+affine+relu+residual_last",
    before: "bias+residual+layer+affine+silu",
    before_alone: "bias+residual+layer+affine",
    gated: "bias+layer+affine+gate",
    by_module: "bias+gate",
    in_a_highway: "bias+gate+residual_last",
    gated_sum: "bias+residual+layer+affine+gate",
    product: "bias+residual",
    computed_later: "bias+layer+affine+residual_last",
    no_norm: "bias+relu+residual_last",
    behind_in_place: "bias+layer+affine+relu+residual_last",
    before_in_place: "bias+residual+layer+affine+silu",
    by_an_operator: "bias+residual",
}


def measure(book: Book, *epilogues: str, fp8: dict[int, float] = FP8) -> None:
    """Rows of layers of 512 x 512, and of their product unquantized."""
    layers = [Layer(512, 512, epilogue) for epilogue in epilogues]
    found = [row for x in layers for row in layer_rows(x, PLAIN, fp8)]
    book.write(*found, *(time(BF16, gemm(m, 512, 512), us - 2) for m, us in PLAIN.items()))


def made(run: Run) -> Net:
    return Net(run).bfloat16().eval().requires_grad_(False)


def epilogues_of(handle: Conversion) -> list[str]:
    return [x.epilogue for span in handle.spans for chain in span.plan.chains for x in chain.layers]


@pytest.mark.parametrize("run", PATTERNS, ids=lambda run: run.__name__)
@pytest.mark.sample(every=5)
def test_layers_of_other_forwards_have_wide_tails(run: Run, book: Book) -> None:
    measure(book, PATTERNS[run])
    model, x = made(run), rows()
    model.fc = Apart(model.fc)  # type: ignore[assignment]
    exact = copy.deepcopy(model).double()(x.double())
    handle = convert(model, 0.06)
    assert epilogues_of(handle) == [PATTERNS[run]] and is_chained(model)
    assert numerics.measure_errors(model(x), exact).row_err < 0.06
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert is_chained(compiled) and torch.equal(compiled(x), model(x))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("run", PATTERNS)
def test_a_residual_or_a_gate_is_a_part_of_a_chain(run: Run, book: Book) -> None:
    measure(book, PATTERNS[run])
    model, x = made(run), rows()
    plain, exact = model(x), copy.deepcopy(model).double()(x.double())
    handle = convert(model, 0.06)
    assert epilogues_of(handle) == [PATTERNS[run]]
    assert f"chain of 1 layer (512 x 512 {PATTERNS[run]}): " in handle.explain("fc")
    assert is_chained(model)
    eager = model(x)
    assert numerics.measure_errors(eager, exact).row_err < 0.06
    assert not torch.equal(eager, plain) and torch.equal(model(x), eager)
    three = model(x.view(2, 256, 512))
    assert torch.equal(three, eager.view(2, 256, 512))
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    assert is_chained(compiled) and torch.equal(compiled(x), eager)
    assert not is_chained(model, 100) and not is_chained(compiled, 100)
    handle.undo()
    assert torch.equal(model(x), plain) and "forward" not in vars(model)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("run", PATTERNS)
def test_the_op_computes_a_dynamic_m_as_the_modules(run: Run, book: Book) -> None:
    measure(book, PATTERNS[run])
    model = made(run)
    plain = model(rows(100))
    convert(model, 0.06)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    assert torch.equal(compiled(rows(512)), model(rows(512)))
    assert torch.equal(compiled(rows(100)), plain)


def with_row(net: Any, x: Tensor) -> Tensor:
    return net.relu(net.norm(net.fc(x))) + x[:1]  # type: ignore[no-any-return]


def with_column(net: Any, x: Tensor) -> Tensor:
    return net.relu(net.norm(net.fc(x))) + x[:, :1]  # type: ignore[no-any-return]


def in_float32(net: Any, x: Tensor) -> Tensor:
    return net.relu(net.norm(net.fc(x))) + x.float()  # type: ignore[no-any-return]


def by_a_number(net: Any, x: Tensor) -> Tensor:
    return net.relu(net.norm(net.fc(x))) + x.shape[0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("run", [with_row, with_column, in_float32, by_a_number])
def test_what_is_not_like_the_output_runs_the_modules(run: Run, book: Book) -> None:
    measure(book, PATTERNS[behind])
    model, x = made(run), rows()
    plain = model(x)
    handle = convert(model, 0.06)
    assert epilogues_of(handle) == [PATTERNS[behind]]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for call in (model, compiled):
        y = call(x)
        assert torch.equal(y, plain) and y.dtype is plain.dtype and not is_chained(call)


def moved_past(net: Any, x: Tensor) -> Tensor:
    h = x * 1
    y, g = net.fc(h), net.relu(h)
    return net.norm(y + g)  # type: ignore[no-any-return]


@pytest.mark.parametrize("what", ["inplace", "hook", "class", "hook of all modules"])
@pytest.mark.parametrize("m", [512, 16])
def test_a_module_between_may_write_since(what: str, m: int, book: Book) -> None:
    """The layer moves behind it, and would read what it wrote."""
    measure(book, "bias+residual+layer+affine")
    model, x = made(moved_past), rows()[:m]
    plain = copy.deepcopy(model)
    convert(model, 0.06)
    assert is_chained(model)
    compiled = torch.compile(model, backend="aot_eager", dynamic=False)

    def writes(module: nn.Module, given: tuple[Tensor, ...], y: Tensor) -> Tensor | None:
        return y.copy_(given[0].mul_(3)) if isinstance(module, nn.ReLU) else None

    handle = None
    for net in (model, plain):
        if what == "inplace":
            net.relu.inplace = True
        elif what == "hook":
            net.relu.register_forward_hook(writes)
        elif what == "class":
            net.relu.__class__ = Tripled
        elif handle is None:
            handle = nn.modules.module.register_module_forward_hook(writes)
    try:
        expected = plain(x)
        for _ in range(2):
            assert torch.equal(model(x), expected)
        if handle is None:  # compiled code has no hooks of all modules, unless made with them
            assert torch.equal(compiled(x), expected)
    finally:
        if handle is not None:
            handle.remove()


class Tripled(nn.Module):
    """Writes to its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(3).clone()


def moved_past_sequence(net: Any, x: Tensor) -> Tensor:
    h = x * 1
    y, g = net.fc(h), net.inner(h)
    return net.norm(y + g)  # type: ignore[no-any-return]


def moved_past_layer(net: Any, x: Tensor) -> Tensor:
    h = x * 1
    y, g = net.fc(h), net.other(h)
    return net.norm(y + g)  # type: ignore[no-any-return]


def by_a_kind(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.fc(x) + x)
    return torch.tanh(y) if isinstance(net.inner[0][1], nn.GELU) else torch.sin(y)


def by_a_setting(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.fc(x) + x)
    return torch.tanh(y) if net.inner[0][1].approximate == "none" else torch.sin(y)


def by_a_forward(net: Any, x: Tensor) -> Tensor:
    return net.inner.forward(net.norm(net.fc(x) + x))  # type: ignore[no-any-return]


def by_a_rate(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.fc(x) + x)
    return torch.tanh(y) if net.inner.get_submodule("1").p > 0.25 else torch.sin(y)


def by_a_function(net: Any, x: Tensor) -> Tensor:
    return net.inner.apply_last(net.norm(net.fc(x) + x))  # type: ignore[no-any-return]


def by_a_mode(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.fc(x) + x)
    return torch.tanh(y) if net.inner[1].training else torch.sin(y)


def in_a_loop(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.fc(x) + x)
    for some in net.lists:
        for module in some:
            y = module(y)
    return y  # type: ignore[no-any-return]


def in_an_empty_loop(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.fc(x) + x)
    for module in net.inner[0].extra:
        y = module(y)
    return y  # type: ignore[no-any-return]


def by_what_is_missing(net: Any, x: Tensor) -> Tensor:
    y = net.norm(net.fc(x) + x)
    if hasattr(net.inner[1], "post"):
        y = net.inner[1].post(y)
    return y * getattr(net.inner[1], "factor", 1.0)  # type: ignore[no-any-return]


def written_by(module: nn.Module) -> Any:
    return module.register_forward_hook(lambda _, given, y: y.copy_(given[0].mul_(3)))


@pytest.mark.sample(every=3)
@pytest.mark.parametrize(
    ("run", "change"),
    [
        (moved_past_sequence, lambda net: net.inner[0].__setitem__(0, nn.ReLU(inplace=True))),
        (moved_past_sequence, lambda net: net.inner[0].insert(0, Tripled())),
        (moved_past_sequence, lambda net: net.inner.__setitem__(0, nn.ReLU(inplace=True))),
        (moved_past_sequence, lambda net: setattr(net.inner[0][0], "inplace", True)),
        (moved_past_sequence, lambda net: written_by(net.inner[0][0])),
        (moved_past_layer, lambda net: net.other.__setitem__(1, Tripled())),
        (moved_past_layer, lambda net: written_by(net.other[0])),
        (by_a_kind, lambda net: net.inner[0].__setitem__(1, nn.Identity())),
        (by_a_setting, lambda net: net.inner[0].__setitem__(1, nn.GELU("tanh"))),
        (by_a_setting, lambda net: setattr(net.inner[0][1], "approximate", "tanh")),
        (by_a_forward, lambda net: net.inner.append(nn.Tanh())),
        (by_a_rate, lambda net: net.inner.__setitem__(1, nn.Dropout(0.1).eval())),
        (by_a_rate, lambda net: setattr(net.inner[1], "p", 0.1)),
        (by_a_function, lambda net: setattr(net.inner, "apply_last", torch.sin)),
        (by_a_mode, lambda net: net.inner[1].train()),
        (in_a_loop, lambda net: net.lists[0].append(nn.Softsign())),
        (in_an_empty_loop, lambda net: net.inner[0].extra.append(nn.Tanh())),
        (by_what_is_missing, lambda net: net.inner[1].add_module("post", nn.Tanh())),
        (by_what_is_missing, lambda net: setattr(net.inner[1], "post", torch.tanh)),
        (by_what_is_missing, lambda net: setattr(net.inner[1], "factor", 3.0)),
    ],
)
@pytest.mark.parametrize("is_compiled", [False, True])
def test_children_of_children_may_change(
    run: Run, change: Callable[[Any], object], is_compiled: bool, book: Book
) -> None:
    measure(book, "bias+residual+layer+affine")
    model, x = made(run), rows()
    model.inner.apply_last = torch.tanh  # type: ignore[assignment]
    if run is in_an_empty_loop:
        model.inner[0].extra = nn.ModuleList()  # type: ignore[index,assignment]
    plain = copy.deepcopy(model)
    convert(model, 0.06)
    assert is_chained(model)
    call: Any = model
    if is_compiled:  # torch.compile looks for hooks that come later only where it is asked to
        with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
            call = torch.compile(model, backend="aot_eager", dynamic=False)
            call(x)
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):
        for net in (model, plain):
            change(net)
        assert torch.equal(call(x), plain(x)) and torch.equal(call(x), plain(x))


def test_other_calls_are_no_residuals(book: Book) -> None:
    def parameter(net: Any, x: Tensor) -> Tensor:
        return net.norm(net.fc(x)) + net.shift  # type: ignore[no-any-return]

    def scaled(net: Any, x: Tensor) -> Tensor:
        return torch.add(net.norm(net.fc(x)), x, alpha=2)

    def number(net: Any, x: Tensor) -> Tensor:
        return net.norm(net.fc(x)) + 1.0  # type: ignore[no-any-return]

    def twice(net: Any, x: Tensor) -> Tensor:
        y = net.norm(net.fc(x))
        return y + y  # type: ignore[no-any-return]

    def read(net: Any, x: Tensor) -> Tensor:
        y = net.norm(net.fc(x))
        return (y + x) * y  # type: ignore[no-any-return]

    def written(net: Any, x: Tensor) -> Tensor:
        seen = x * 1.0
        y = net.norm(net.fc(x))
        seen.add_(1.0)
        return y + seen  # type: ignore[no-any-return]

    def at_two_places(net: Any, x: Tensor) -> Tensor:
        return net.norm(net.fc(net.norm(net.fc(x)) + x)) * 2  # type: ignore[no-any-return]

    measure(book, PATTERNS[computed_later])
    for run in (
        parameter, scaled, number, twice, read, written, at_two_places
    ):  # fmt: skip
        handle = convert(made(run), 0.06)
        assert not epilogues_of(handle), run.__name__
        handle.undo()


def test_writes_to_what_is_read_elsewhere_stay(book: Book) -> None:
    def given(net: Any, x: Tensor) -> Tensor:
        x += net.norm(net.fc(x))
        return x

    def given_by_method(net: Any, x: Tensor) -> Tensor:
        return x.add_(net.norm(net.fc(x)))

    def read_before(net: Any, x: Tensor) -> Any:
        y = net.norm(net.fc(x))
        seen = y * 2.0
        y += x
        return y, seen

    def viewed(net: Any, x: Tensor) -> Any:
        y = net.norm(net.fc(x))
        part = y[:, :8]
        y += x
        return y, part

    def read_twice(net: Any, x: Tensor) -> Any:
        y = net.norm(net.fc(x))
        z = y.add_(x)
        return y * z

    def scaled(net: Any, x: Tensor) -> Tensor:
        return net.norm(net.fc(x)).add_(x, alpha=2)  # type: ignore[no-any-return]

    def of_another(net: Any, x: Tensor) -> Any:
        kept = x * 1.0
        y = kept
        y += net.norm(net.fc(x))
        return y, kept

    def parameter(net: Any, x: Tensor) -> Tensor:
        return net.norm(net.fc(x)).add_(net.shift)  # type: ignore[no-any-return]

    def written_between(net: Any, x: Tensor) -> Any:
        y = net.norm(net.fc(x))
        seen = x * 1.0
        x += 1.0
        y += seen
        return y, x

    measure(book, PATTERNS[computed_later])
    every = (
        given, given_by_method, read_before, viewed, scaled, of_another, parameter, written_between
    )  # fmt: skip
    for run in every:
        model = made(run)
        plain = copy.deepcopy(model)
        assert not epilogues_of(convert(model, 0.06)), run.__name__
        mine, theirs = rows(), rows()
        y, expected = model(mine), plain(theirs)
        assert torch.equal(mine, theirs), run.__name__
        one, other = (list(x) if isinstance(x, tuple) else [x] for x in (y, expected))
        assert all(map(torch.equal, one, other)), run.__name__


def test_what_is_read_behind_a_write_is_the_sum(book: Book) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        y = net.norm(net.fc(x))
        z = y.add_(x)
        return y + 0.5 * z  # type: ignore[no-any-return]

    measure(book, PATTERNS[computed_later])
    model, x = made(run), rows()
    plain = model(x)
    assert epilogues_of(convert(model, 0.06)) == [PATTERNS[computed_later]] and is_chained(model)
    assert numerics.measure_errors(model(x), plain.double()).row_err < 0.06


def test_a_sum_in_place_keeps_shape_and_dtype(book: Book) -> None:
    """Where the chain does not hold, the modules run and write as they did."""

    def run(net: Any, x: Tensor) -> Tensor:
        y = net.relu(net.norm(net.fc(x)))
        y += x.float()
        return y  # type: ignore[no-any-return]

    measure(book, PATTERNS[behind])
    model, x = made(run), rows()
    plain = model(x)
    assert epilogues_of(convert(model, 0.06)) == [PATTERNS[behind]]
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=False)
    for call in (model, compiled):
        y = call(x)
        assert torch.equal(y, plain) and y.dtype is torch.bfloat16 and not is_chained(call)
    seen: list[Tensor] = []
    model.relu.register_forward_hook(lambda *given: seen.append(given[-1]))
    y = model(x)
    assert seen[0] is y  # what a hook kept is written to


class OfAUser(nn.Module):
    """A module that may do anything."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu_()


@torch.fx.wrap
def of_a_user(x: Tensor) -> Tensor:
    return x.relu_()


BRANCHES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "a module that is kept as one call": lambda net, x: net.branch(x),
    "a module of a user in one of torch": lambda net, x: net.user(x),
    "a module with a hook": lambda net, x: net.hooked(x),
    "an op of torch": lambda net, x: torch.ops.aten.relu_.default(x),
    "a packet of ops": lambda net, x: torch.ops.aten.relu_(x),
    "a function of a user": lambda net, x: of_a_user(x),
}


def write_first(_: nn.Module, args: tuple[Tensor]) -> None:
    args[0].relu_()


@pytest.mark.parametrize("name", BRANCHES)
@pytest.mark.parametrize("is_before", [False, True])
def test_a_residual_of_what_may_write_keeps_its_place(
    name: str, is_before: bool, book: Book
) -> None:
    """The layer would move behind the write, or the residual be read before it."""

    def run(net: Any, x: Tensor) -> Tensor:
        if is_before:
            y = net.fc(x)
            BRANCHES[name](net, x)
            return net.norm(y) + x  # type: ignore[no-any-return]
        y = net.norm(net.fc(x))
        return y + BRANCHES[name](net, x)  # type: ignore[no-any-return]

    measure(book, PATTERNS[computed_later])
    model = Net(run)
    model.branch = nn.Sequential(nn.ReLU(inplace=True), nn.Identity())
    model.user, model.hooked = nn.Sequential(OfAUser()), nn.Sequential(nn.ReLU())
    model.hooked[0].register_forward_pre_hook(write_first)
    model = model.bfloat16().eval().requires_grad_(False)
    plain = model(rows())
    assert not epilogues_of(convert(model, 0.06))
    assert torch.equal(model(rows(100)), model(rows())[:100])
    assert numerics.measure_errors(model(rows()), plain.double()).row_err < 0.06


def test_two_layers_that_one_sum_adds(book: Book) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        return net.narrow(torch.cat([x, x], 1)) + net.norm(net.fc(x))  # type: ignore[no-any-return]

    measure(book, PATTERNS[computed_later])
    model, x = made(run), rows()
    plain = model(x)
    assert epilogues_of(convert(model, 0.06)) == [PATTERNS[computed_later]]
    assert is_chained(model)
    assert numerics.measure_errors(model(x), plain.double()).row_err < 0.06


def mlp(net: Any, x: Tensor) -> Tensor:
    return x + net.relu(net.norm(net.narrow(net.relu(net.wide(x)))))  # type: ignore[no-any-return]


LAST = NARROW._replace(epilogue=f"{NARROW.epilogue}+residual_last")


def times_of_last(fp8: dict[int, float]) -> list[Any]:
    """Times, without errors, which are those without the residual."""
    plain = [row for m, us in PLAIN.items() for row in plain_rows(LAST, m, us)]
    return plain + [row for m, us in fp8.items() for row in fp8_rows(LAST, m, us, is_judged=False)]


@pytest.mark.parametrize("is_measured", [False, True])
def test_a_residual_that_was_not_measured_stays_behind_the_chain(
    is_measured: bool, book: Book, tmp_path: Path
) -> None:
    book.write(*(row for x in (WIDE, NARROW) for row in layer_rows(x, PLAIN, FP8)))
    if is_measured:
        book.write(*times_of_last(FP8))
    model, x = made(mlp), rows()
    exact = copy.deepcopy(model).double()(x.double())
    handle = convert(model, 0.06)
    last = LAST if is_measured else NARROW
    assert epilogues_of(handle) == [WIDE.epilogue, last.epilogue]
    assert is_chained(model) and numerics.measure_errors(model(x), exact).row_err < 0.09
    words = f"narrow: no chain: with {LAST.epilogue}: not measured at these sizes"
    assert (words in handle.explain("narrow")) != is_measured
    text = handle.suite([512])
    assert (f'epilogue = "{LAST.epilogue}"' in text) != is_measured
    if not is_measured:
        (tmp_path / "s.toml").write_text(text)
        cases = suite_from_file(tmp_path / "s.toml").build(Format.E4M3FN)
        found = {case.problem.epilogue for case in cases if case.problem.op == "gemm_norm"}
        assert LAST.epilogue in found


def test_a_residual_that_is_not_faster_stays_behind_the_chain(book: Book) -> None:
    found = [row for x in (WIDE, NARROW) for row in layer_rows(x, PLAIN, FP8)]
    book.write(*found, *times_of_last({512: 60.0, 2048: 99.0}))
    handle = convert(made(mlp), 0.06)
    assert epilogues_of(handle) == [WIDE.epilogue, NARROW.epilogue]
    assert f"narrow: no chain: with {LAST.epilogue}: not faster" in handle.explain("narrow")


def test_residuals_between_the_layers_of_a_chain(book: Book) -> None:
    def run(net: Any, x: Tensor) -> Tensor:
        y = torch.cat([x, x], 1)
        y = net.relu(net.wide(x)) + y
        return net.relu(net.norm(net.narrow(y))) + x  # type: ignore[no-any-return]

    first = WIDE._replace(epilogue="bias+relu+residual_last")
    book.write(*(row for x in (first, LAST) for row in layer_rows(x, PLAIN, FP8)))
    book.write(*(time(BF16, gemm(m, 1024, 512), us) for m, us in PLAIN.items()))
    model, x = made(run), rows()
    exact = copy.deepcopy(model).double()(x.double())
    handle = convert(model, 0.06)
    ((chain,),) = (span.plan.chains for span in handle.spans)
    assert [layer.epilogue for layer in chain.layers] == [first.epilogue, LAST.epilogue]
    assert is_chained(model)
    y = model(x)
    assert numerics.measure_errors(y, exact).row_err < 0.09
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), y)


def test_gradients_hooks_and_other_modules_run_the_modules(book: Book) -> None:
    measure(book, PATTERNS[gated])
    model, x = made(gated), rows()
    plain = model(x)
    handle = convert(model, 0.06)
    for each in (model.fc, model.norm):
        hook = each.register_forward_hook(lambda *_: None)
        assert torch.equal(model(x), plain)
        hook.remove()
    asked = x.clone().requires_grad_(True)
    assert model(asked).requires_grad
    assert not torch.equal(model(x), plain)
    handle.refresh(0.01)
    assert torch.equal(model(x), plain) and crossed_of(model) is None
    assert handle.refresh(0.06) == ["fc/chain"]
    assert not torch.equal(model(x), plain)
    model.norm = nn.LayerNorm(512, dtype=torch.bfloat16, eps=1.0)
    assert not is_chained(model)


def test_copies_and_files_keep_residuals(book: Book) -> None:
    measure(book, PATTERNS[behind])
    model, x = made(behind), rows()
    convert(model, 0.06)
    y, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert is_chained(other) and torch.equal(other(x), y)


def test_tuning_turns_a_chain_with_a_residual_off(book: Book) -> None:
    measure(book, PATTERNS[behind])
    model = made(behind)
    found, _, _ = tuned(model, {("fc", "chain"): -30.0})
    assert kept(found) == {("chain", "fc"): False} and not is_chained(model)


@pytest.mark.parametrize(("bias", "us", "is_faster"), [
    (False, 30.0, True), (False, 60.0, False), (True, 30.0, True), (True, 60.0, False),
])  # fmt: skip
def test_a_residual_without_a_norm_has_to_beat_what_its_bytes_take(
    bias: bool, us: float, is_faster: bool, book: Book
) -> None:
    """The product takes 50 us, and a kernel that adds and is never timed does not."""
    layer, m = Layer(512, 8192, "bias+residual" if bias else "residual"), 2048
    alone = time(BF16, gemm(m, 512, 8192), 50.0)
    book.write(*plain_rows(layer, m, 90.0), *fp8_rows(layer, m, us), alone)
    model = made(product)
    model.fc = nn.Linear(8192, 512, bias=bias)
    assert bool(epilogues_of(convert(model.bfloat16(), 0.06))) == is_faster


@pytest.fixture
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = frozenset({H200, current_device("cpu")})
    for module in ("dispatcher", "frozen.lookup", "frozen.file_format", "frozen.write"):
        monkeypatch.setattr(f"lokakern.selection.{module}.devices_here", lambda: here)


@pytest.mark.parametrize("run", [gated, behind, mlp])
@pytest.mark.usefixtures("_here")
def test_frozen_choices_hold_residuals_and_gates(run: Run, book: Book, tmp_path: Path) -> None:
    """Also that the residual behind a chain was not measured."""
    if run is mlp:
        book.write(*(row for x in (WIDE, NARROW) for row in layer_rows(x, PLAIN, FP8)))
    else:
        measure(book, PATTERNS[run])
    before = epilogues_of(convert(made(run), 0.06))
    assert before == ([WIDE.epilogue, NARROW.epilogue] if run is mlp else [PATTERNS[run]])
    lokakern.freeze(tmp_path / "choices.json")
    dispatcher.use_choices(tmp_path / "choices.json")
    model = made(run)
    assert epilogues_of(convert(model, 0.06)) == before and is_chained(model)
