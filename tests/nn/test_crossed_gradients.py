"""Gradients behind a cross: values of the op, where graphs have it, and where they do not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from lokakern import numerics
from lokakern.nn import compiled_form, graph_passes, wide_gradients
from lokakern.nn.compiled_form import (
    SUMS,
    behind_cross,
    crossed_plan,
    kernels_behind_cross,
)
from lokakern.nn.crossed_gradients import crossed_gradient, quantize_behind_crosses
from lokakern.nn.graph_edit import add
from lokakern.nn.linear import Linear, described
from lokakern.nn.routed_matmul import (
    OPS,
    PLAIN,
    SHARED,
    crossed,
    crossed_kernel,
    delayed,
    in_dtype,
    kernel_at,
    route_text,
    switched,
    uncrossed,
    with_eager,
)
from lokakern.sums import column_sums
from lokakern.types import Format, Granularity
from tests.support.routed_layers import (
    BLOCK_KERNEL,
    BY_GROUP,
    BY_ROW,
    GROUP_KERNEL,
    ROUTES,
    ROW_KERNEL,
    layer_of,
)
from tests.support.traced_graphs import graphs_of

M, N, RANK = 128, 256, 32
BF16, GROUP = torch.bfloat16, Granularity.GROUP
KERNELS = BLOCK_KERNEL, GROUP_KERNEL
FORM = behind_cross("", [(M, KERNELS), (4 * M, ("", ""))])
PLAIN_ROUTES = (PLAIN, PLAIN, PLAIN)
OP, WEIGHT_OP = "lokakern.crossed_gradient.", "lokakern.quantized_weight_gradient."
MARK = ";crossed="
E4M3_ERROR = 0.05  # of a product whose operands have 1x128 scales
Read = Callable[["Crosses", Tensor], Tensor]


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU on which sums apart are faster."""
    monkeypatch.setattr(compiled_form, "is_fast", lambda columns, device: columns <= 8192)
    torch._dynamo.reset()


class Crosses(nn.Module):
    """DCN's crosses of low rank, whose last layers have a form."""

    def __init__(
        self, count: int = 1, read: Read | None = None, form: str = FORM,
        routes: tuple[str, str, str] = PLAIN_ROUTES, bias: bool = True, dtype: torch.dtype = BF16,
        rank: int = RANK,
    ) -> None:  # fmt: skip
        super().__init__()
        torch.manual_seed(3)
        self.downs = nn.ModuleList(nn.Linear(N, rank, bias=False, dtype=dtype)
                                   for _ in range(count))  # fmt: skip
        self.ups = nn.ModuleList(layer_of(routes, N, rank, bias, dtype) for _ in range(count))
        for up in self.ups:
            up.take_form(form)  # type: ignore[operator]
            torch.manual_seed(4)
            nn.init.normal_(up.weight, std=0.2)  # type: ignore[arg-type]
        self.read = read or crossed_all

    def z(self, x: Tensor, place: int = 0) -> Tensor:
        return self.ups[place](self.downs[place](x))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)


def crossed_all(model: Crosses, x0: Tensor) -> Tensor:
    x = x0
    for place in range(len(model.ups)):
        x = x0 * model.z(x, place) + x
    return x


def input_of(m: int = M, dtype: torch.dtype = BF16, n: int = N) -> Tensor:
    x = torch.randn(m, n, generator=torch.Generator().manual_seed(1)).to(dtype)
    return x.requires_grad_()


def gradients(y: Tensor, model: nn.Module, x: Tensor) -> list[Tensor]:
    given = torch.randn(y.shape, generator=torch.Generator().manual_seed(2)).to(y.dtype)
    wanted = [x, *(p for p in model.parameters() if p.requires_grad)]
    return list(torch.autograd.grad(y, wanted, given.to(y.device), allow_unused=True))


def run(
    model: nn.Module, x: Tensor, *, autocast: bool = False
) -> tuple[list[Tensor], str, list[str]]:
    """Output and gradients by graphs after our passes, their text, and the ops that they call."""

    def call(x: Tensor) -> Any:
        with torch.autocast("cpu", dtype=BF16, enabled=autocast):
            return model(x)

    y, graphs = graphs_of(
        call, x, change=lambda graph: None, trains=True,
        change_both=graph_passes.JointPasses(None),
    )  # fmt: skip
    found = [y.detach(), *gradients(y, model, x)]
    text = "\n".join(graph.python_code("self").src for graph in graphs)
    assert MARK not in text
    called = [str(x.target) for graph in graphs for x in graph.nodes if x.op == "call_function"]
    return found, text, sorted(called)


def exact(model: nn.Module, x: Tensor) -> list[Tensor]:
    """The same in float64."""
    model, x = copy.deepcopy(model), x.detach().double().requires_grad_()
    for module in model.modules():
        if isinstance(module, Linear):
            module.take_routes(PLAIN_ROUTES, module.weight)
            module.take_form("")
    model.double()
    y = model(x)
    return [y.detach(), *gradients(y, model, x)]


def distance(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def terms_in(text: str) -> list[int]:
    """How many terms each op adds."""
    return [x.partition("]")[0].count(",") + 1 for x in text.split(f"{OP}default([")[1:]]


# ---- the op


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sums", ["", "float32", "bfloat16"])
def test_the_op_quantizes_the_product_both_ways(count: int, sums: str) -> None:
    m, n = 136, 200
    terms = [torch.randn(m, n).bfloat16() for _ in range(count)]
    wide = torch.randn(m, 2 * n).bfloat16()
    x0 = wide[:, :n]  # with gaps between rows
    terms[0][3, 5], terms[0][:, 7] = torch.nan, 0.0
    data, scale, turned, turned_scale, total = OPS.crossed_gradient(terms, x0, sums)
    values = sum(x.float() for x in terms) * x0.float()
    for (made, scales), of in (((data, scale), values), ((turned, turned_scale), values.t())):
        right = numerics.quantize(of, Format.E4M3FN, GROUP)
        assert right.scale is not None
        assert torch.equal(made.view(torch.uint8), right.data.view(torch.uint8))
        assert torch.equal(scales, right.scale)
    if not sums:
        assert total.shape == (1,)
        return
    assert total.dtype is getattr(torch, sums)
    expected = column_sums(values).to(total.dtype)
    assert torch.equal(total.view(torch.uint8), expected.view(torch.uint8))


def test_fake_results_are_like_real_ones() -> None:
    terms = [torch.randn(136, 200).bfloat16()]
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        fake = OPS.crossed_gradient(terms, terms[0], "float32")
    real = crossed_gradient(terms, terms[0], "float32")
    for one, other in zip(fake, real, strict=True):
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def test_the_op_takes_no_rows() -> None:
    empty = torch.empty(0, 16, dtype=BF16)
    data, _, turned, _, total = OPS.crossed_gradient([empty], empty, "bfloat16")
    assert data.shape == (0, 16) and turned.shape == (16, 0)
    assert torch.equal(total, torch.zeros(16, dtype=BF16))


# ---- routes and forms


@pytest.mark.parametrize("route", [PLAIN, BY_ROW, BY_GROUP])
def test_a_mark_changes_no_kernel_of_a_route(route: str) -> None:
    marked = crossed(route, GROUP_KERNEL)
    assert uncrossed(marked) == route == uncrossed(route)
    assert crossed_kernel(marked) == GROUP_KERNEL and not crossed_kernel(route)
    assert [kernel_at(marked, m) for m in (0, 16, 17)] == [kernel_at(route, m) for m in (0, 16, 17)]


@pytest.mark.parametrize("route", [PLAIN, BY_ROW])
def test_ops_ignore_a_mark(route: str) -> None:
    """As in graphs without our passes."""
    grad, weight, x = (torch.randn(48, 48).bfloat16() for _ in range(3))
    found = OPS.routed_gemm(grad, weight, None, None, None, crossed(route, BLOCK_KERNEL))
    expected = grad @ weight
    if route:
        expected = OPS.routed_gemm(grad, weight, None, None, None, route)
    assert torch.equal(found, expected)
    found = OPS.weight_gradient(grad, x, crossed(PLAIN, GROUP_KERNEL))
    assert torch.equal(found, grad.t() @ x)


def test_a_form_has_both_kernels_at_whole_groups_of_rows() -> None:
    assert behind_cross(SUMS, [(M, ("", KERNELS[1]))]) == SUMS
    assert behind_cross(SUMS, [(M, KERNELS)]) != FORM
    sizes = (0, M, M + 16, 3 * M, 4 * M)
    assert [kernels_behind_cross(FORM, m) for m in sizes] == [(), KERNELS, (), KERNELS, ()]
    assert kernels_behind_cross(SUMS, M) == kernels_behind_cross("", M) == ()


def plan_of(*routes: str, flags: str = "") -> str:
    return "\0".join((flags, "", *routes))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({}, plan_of("", crossed("", BLOCK_KERNEL), crossed("", GROUP_KERNEL))),
        (
            {1: plan_of(*ROUTES)},
            plan_of(BY_ROW, crossed(BY_ROW, BLOCK_KERNEL), crossed(BY_GROUP, GROUP_KERNEL)),
        ),
        (
            {1: plan_of("", with_eager(PLAIN, BY_ROW), "")},
            plan_of("", crossed("", BLOCK_KERNEL), crossed("", GROUP_KERNEL)),
        ),
        ({0: SUMS}, ""), ({2: -1}, ""), ({2: M + 16}, ""), ({2: 4 * M}, ""),
        ({3: torch.float32}, ""), ({3: torch.float16, 4: torch.float16}, ""),
        ({1: plan_of("", in_dtype(BY_ROW, torch.float16), "")}, ""),
        ({1: plan_of("", switched(BY_ROW, "one"), "")}, ""),
        ({1: plan_of(BY_ROW + ";check=1:64:0.06:1:x", "", "")}, ""),
        ({1: plan_of(delayed(route_text(Granularity.TENSOR, [(0, "torch.quantize_tensor+torch."
            "emulated_tensor")], [(0, "")]), "key"), "", "")}, ""),
        ({1: plan_of("", "", "", flags="adding")}, ""),
        ({1: plan_of("", "", "", flags="frozen")}, ""),
    ],
)  # fmt: skip
def test_plans_have_marks_where_nothing_else_knows_the_products(
    change: dict[int, Any], found: str
) -> None:
    given: list[Any] = [FORM, "", M, BF16, BF16, "cpu"]
    for place, value in change.items():
        given[place] = value
    assert crossed_plan(*given) == found
    if found and not change:
        with torch.autocast("cpu", dtype=BF16):
            assert crossed_plan(FORM, "", M, torch.float32, torch.float32, "cpu") == found
        with torch.autocast("cpu", dtype=torch.float16):
            assert not crossed_plan(FORM, "", M, torch.float32, torch.float32, "cpu")


# ---- graphs that have the op


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("form", [FORM, behind_cross(SUMS, [(M, KERNELS)])])
@pytest.mark.parametrize(("count", "terms"), [(5, [1, 2, 3, 3, 3]), (2, [1, 2]), (1, [1])])
def test_gradients_behind_crosses_are_quantized_by_one_op(
    count: int, terms: list[int], form: str
) -> None:
    model, x = Crosses(count, form=form), input_of()
    found, text, called = run(model, x)
    assert terms_in(text) == terms
    assert text.count(WEIGHT_OP) == count and "lokakern.bias_gradient" not in text
    assert not any("sum.dim_IntList" in name for name in called)
    for one, right in zip(found, exact(model, x), strict=True):
        assert one.dtype is BF16 and distance(one, right) < E4M3_ERROR * count**0.5


SHARING = behind_cross("", [(M, (SHARED + BLOCK_KERNEL, SHARED + GROUP_KERNEL))])


def two_layers(model: Crosses, x: Tensor) -> Tensor:
    """Both have one gradient, which something else reads, too."""
    return model.z(x) + model.z(x, 1) + x


def one_layer_of_a_cross(model: Crosses, x: Tensor) -> Tensor:
    return x.sin() * model.z(x)


@pytest.mark.parametrize("form", [SHARING, SUMS + SHARING])
@pytest.mark.parametrize(("read", "layers"), [(two_layers, 2), (one_layer_of_a_cross, 1)])
def test_a_gradient_that_products_share_is_quantized_once(
    read: Read, layers: int, form: str
) -> None:
    model, x = Crosses(layers, read, form), input_of()
    found, text, called = run(model, x)
    assert terms_in(text) == [1] and text.count(WEIGHT_OP) == layers
    assert not any("sum.dim_IntList" in name or "bias_gradient" in name for name in called)
    for one, right in zip(found, exact(model, x), strict=True):
        assert one.dtype is BF16 and distance(one, right) < E4M3_ERROR


@pytest.mark.parametrize("place", [0, 1])
def test_a_gradient_is_quantized_before_all_that_read_it(place: int) -> None:
    """A sum may read another view, which is there before that of the products."""
    graph = fx.Graph()
    operands = []
    for name, shape in (("tangents_1", (M, N)), ("x", (M, RANK)), ("w", (N, RANK))):
        operands.append(graph.placeholder(name))
        operands[-1].meta["val"] = torch.zeros(shape, dtype=BF16)
    grad, x, w = operands
    views = [add(graph, torch.ops.aten.view.default, grad, [M, N]) for _ in range(2)]
    sums = add(graph, torch.ops.aten.sum.dim_IntList, views[0], [0])
    views.append(add(graph, torch.ops.aten.view.default, grad, [M, N]))
    read = views[place + 1]
    routes = (crossed("", SHARED + name) for name in (GROUP_KERNEL, BLOCK_KERNEL))
    dw = add(graph, OPS.weight_gradient.default, read, x, next(routes))
    dx = add(graph, OPS.routed_gemm.default, read, w, None, None, None, next(routes))
    graph.output((sums, dw, dx))
    quantize_behind_crosses(graph)
    graph.lint()
    called = [str(node.target) for node in graph.nodes]
    assert any(OP in name for name in called) is (place == 0)
    assert any("aten.mm" in name for name in called) is (place == 1)


def test_compiled_gradients_are_those_of_the_ops() -> None:
    model, x = Crosses(), input_of()
    (_, _, to_down, to_up, to_bias), _, _ = run(model, x)
    up, down = model.ups[0], model.downs[0]
    h = down(x)
    given = torch.randn(M, N, generator=torch.Generator().manual_seed(2)).to(BF16)
    data, scale, turned, turned_scale, sums = OPS.crossed_gradient([given], x, "bfloat16")
    routes = (
        route_text(form, [(0, name)], [(0, name)])
        for form, name in zip((Granularity.BLOCK, GROUP), KERNELS, strict=True)
    )
    dh = OPS.routed_gemm(None, up.weight, None, None, None, next(routes), data, scale)
    expected = OPS.quantized_weight_gradient(turned, turned_scale, h, next(routes), False)
    assert torch.equal(to_bias, sums) and torch.equal(to_up, expected)
    assert torch.equal(to_down, dh.t() @ x)


def test_a_layer_without_a_bias_has_no_sums() -> None:
    model, x = Crosses(bias=False), input_of()
    found, text, _ = run(model, x)
    assert terms_in(text) == [1] and "''" in text
    assert all(distance(*pair) < E4M3_ERROR for pair in zip(found, exact(model, x), strict=True))


def test_the_kernels_of_a_form_come_before_those_of_routes() -> None:
    model, x = Crosses(routes=ROUTES), input_of()
    _, text, _ = run(model, x)
    assert terms_in(text) == [1] and text.count(ROW_KERNEL) == 2  # of the output's route


def in_three_dimensions(model: Crosses, x: Tensor) -> Tensor:
    x = x.view(4, M // 4, N)
    return x * model.z(x) + x


def through_a_part(model: Crosses, x: Tensor) -> Tensor:
    """The gradient of the cross is a part of that of a concatenation."""
    return torch.cat([crossed_all(model, x), x], 1) @ torch.ones(2 * N, 8, dtype=x.dtype)


def of_x0_first(model: Crosses, x: Tensor) -> Tensor:
    return x + model.z(x) * (x + 1)


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("read", [in_three_dimensions, through_a_part, of_x0_first])
def test_views_and_sums_around_a_cross_change_nothing(read: Read) -> None:
    model, x = Crosses(read=read), input_of()
    found, text, _ = run(model, x)
    assert terms_in(text) == [1]
    assert all(distance(*pair) < E4M3_ERROR for pair in zip(found, exact(model, x), strict=True))


@pytest.mark.parametrize("form", [FORM, behind_cross(SUMS, [(M, KERNELS)])])
def test_a_layer_that_is_called_twice_has_two_ops(form: str) -> None:
    """Autograd adds gradients of its bias before it computes those of its weight."""

    def twice(model: Crosses, x: Tensor) -> Tensor:
        y = x * model.z(x) + x
        return x * model.z(y) + y

    model, x = Crosses(read=twice, form=form), input_of()
    found, text, _ = run(model, x)
    assert terms_in(text) == [1, 2]
    assert all(
        distance(*pair) < 2 * E4M3_ERROR for pair in zip(found, exact(model, x), strict=True)
    )


def rounded(model: Crosses, x: Tensor) -> Tensor:
    """As in DHEN, x0 in float32, of a LayerNorm, and a gradient in bfloat16, turned twice."""
    wide = x if x.dtype is torch.float64 else x.float()
    y = (wide * model.z(wide) + wide).view(-1, 8, N // 8).mT
    return (y if x.dtype is torch.float64 else y.bfloat16()).mT


@pytest.fixture
def every_device_writes_float32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch has this product on CUDA devices only."""
    monkeypatch.setattr(wide_gradients, "_fits", lambda device: True)
    library = torch.library.Library("aten", "IMPL")
    library.impl("mm.dtype", lambda a, b, dtype: a.to(dtype) @ b.to(dtype), "CPU")
    yield
    library._destroy()


WIDE_KERNEL = "cuda.quantize_group+torch.scaled_mm_block"


@pytest.mark.sample(every=4)
@pytest.mark.parametrize("read", [rounded, crossed_all])
@pytest.mark.parametrize("kernel", [WIDE_KERNEL, GROUP_KERNEL])
def test_gradients_of_float32_weights_stay_in_float32(
    every_device_writes_float32: None, read: Read, kernel: str
) -> None:
    form = behind_cross("", [(M, (BLOCK_KERNEL, kernel))])
    model, x = Crosses(2 if read is crossed_all else 1, read, form, dtype=torch.float32), input_of()
    found, text, _ = run(model, x, autocast=True)
    assert len(terms_in(text)) == len(model.ups) == text.count("'float32')")
    assert (", True)" in text) is (kernel == WIDE_KERNEL)
    for one, right in zip(found[2:], exact(model, x)[2:], strict=True):
        assert one.dtype is torch.float32 and distance(one, right) < E4M3_ERROR
    is_rounded = torch.equal(found[-2], found[-2].bfloat16().float())
    assert is_rounded is (kernel != WIDE_KERNEL)
    assert not torch.equal(found[-1], found[-1].bfloat16().float())  # sums


# ---- graphs that do not


def read_by_a_kernel(model: Crosses, x: Tensor) -> Tensor:
    return x * (model.z(x) + x.sin()) + x


def broadcast(model: Crosses, x: Tensor) -> Tensor:
    return x[:1] * model.z(x) + x


def by_a_number(model: Crosses, x: Tensor) -> Tensor:
    return 3.0 * model.z(x) + x


def without_a_product(model: Crosses, x: Tensor) -> Tensor:
    return model.z(x).relu()


def behind_an_activation(model: Crosses, x: Tensor) -> Tensor:
    """What only a compiler's kernels read would be written for the op."""
    return crossed_all(model, x).sin()


def with_another_reader(model: Crosses, x: Tensor) -> Tensor:
    z = model.z(x)
    return x * (z + model.z(x + 1))  # both layers' products read one gradient


def turned(model: Crosses, x: Tensor) -> Tensor:
    """A gradient that does not lie row by row."""
    return crossed_all(model, x).t().contiguous()


def turned_by_negative_axes(model: Crosses, x: Tensor) -> Tensor:
    """Of x0 as it lies in memory, rows are its columns."""
    return x + x * 0.5 + x.t().contiguous().permute(-1, 0) * model.z(x)


class _OfHalfRows(torch.autograd.Function):
    """A vector that is added to each half of a row."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, vector: Tensor) -> Tensor:
        return (z.view(-1, N // 2) + vector).view(z.shape)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        return grad, grad.view(-1, N // 2).sum(0)


def with_a_sum_of_half_rows(model: Crosses, x: Tensor) -> Tensor:
    vector = model.downs[0].weight.flatten()[: N // 2]  # type: ignore[operator]
    z: Tensor = _OfHalfRows.apply(model.z(x), vector)  # type: ignore[no-untyped-call]
    return x * z + x


def read_as_it_is(model: Crosses, x: Tensor) -> Tensor:
    z = model.z(x)
    return torch.cat([x * (z + x.cos()), z], 1)


CASES = [
    read_by_a_kernel, broadcast, by_a_number, without_a_product, behind_an_activation,
    with_another_reader, turned, turned_by_negative_axes, read_as_it_is,
]  # fmt: skip


@pytest.mark.sample(every=8)
@pytest.mark.parametrize("read", CASES)
@pytest.mark.parametrize("routes", [PLAIN_ROUTES, ROUTES])
def test_other_graphs_are_as_without_the_form(read: Read, routes: tuple[str, str, str]) -> None:
    form = behind_cross(SUMS, [(M, KERNELS)])
    x, found = input_of(), []
    for given in (form, SUMS):
        found.append(run(Crosses(2, read, given, routes), x))
    (mine, text, _), (theirs, other, _) = found
    assert OP not in text and text.count("lokakern.") == other.count("lokakern.")
    assert text.count("aten.mm") + text.count("aten.addmm") == other.count("aten.mm") + other.count(
        "aten.addmm"
    )
    assert all(
        one is other if one is None else torch.equal(one, other)
        for one, other in zip(mine, theirs, strict=True)
    )


class _OfTwoLayers(Crosses):
    """One gradient, of which a layer reads rows, and another one halves of rows."""

    def __init__(self, form: str) -> None:
        super().__init__(2, form=form, bias=False)
        self.ups[1] = layer_of(PLAIN_ROUTES, N // 2, RANK, False, BF16)
        self.ups[1].take_form(form)  # type: ignore[operator]
        self.ups[0].weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        halves = self.downs[1](x).detach().repeat(2, 1)
        return x * (self.z(x) + self.ups[1](halves).view(M, N)) + x  # type: ignore[no-any-return]


def test_products_that_read_other_rows_of_a_gradient_are_left() -> None:
    found = [run(_OfTwoLayers(form), input_of()) for form in (FORM, "")]
    assert OP not in found[0][1]
    for one, other in zip(found[0][0], found[1][0], strict=True):
        assert one is other if one is None else torch.equal(one, other)


def test_sums_of_other_columns_are_left() -> None:
    found = [
        run(Crosses(1, with_a_sum_of_half_rows, form, bias=False), input_of())
        for form in (FORM, "")
    ]
    assert OP not in found[0][1]
    assert all(torch.equal(*pair) for pair in zip(found[0][0], found[1][0], strict=True))


@pytest.mark.parametrize("m", [M + 16, 4 * M])
def test_rows_without_kernels_have_no_op(m: int) -> None:
    assert OP not in run(Crosses(), input_of(m))[1]


def test_neither_have_float32_float16_and_frozen_weights() -> None:
    for dtype in (torch.float32, torch.float16):
        assert OP not in run(Crosses(dtype=dtype), input_of(dtype=dtype))[1]
    assert OP not in run(Crosses(dtype=torch.float32), input_of(dtype=torch.float32),
                         autocast=True)[1]  # fmt: skip
    model = Crosses()
    model.ups[0].weight.requires_grad_(False)
    assert OP not in run(model, input_of())[1]


def test_dynamic_rows_have_no_op() -> None:
    seen = []

    def backend(gm: Any, given: Any) -> Any:
        seen.append(gm.code)
        return gm

    torch.compile(Crosses(), backend=backend, dynamic=True)(input_of())
    torch._dynamo.reset()
    torch.compile(Crosses(), backend=backend, dynamic=False)(input_of())
    assert ["autograd_function_apply" in code for code in seen] == [False, True]


def test_main_gradients_stay() -> None:
    model = Crosses()
    model.ups[0].add_gradient(BF16)  # type: ignore[operator]
    assert model.ups[0]._plan and OP not in run(model, input_of())[1]


def test_eager_calls_are_as_without_a_form() -> None:
    model, plain, x = Crosses(routes=ROUTES), Crosses(routes=ROUTES, form=""), input_of()
    for one, other in zip(model.ups, plain.ups, strict=True):
        assert one._plan == other._plan
        assert described(one._plan) == described(other._plan)  # type: ignore[arg-type]
    pairs = zip(gradients(model(x), model, x), gradients(plain(x), plain, x), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


def test_prediction_has_no_op() -> None:
    model, x = Crosses(), input_of().detach()
    with torch.no_grad():
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
        assert torch.equal(compiled(x), model(x))


def test_without_the_pass_gradients_are_the_usual_ones() -> None:
    model, x = Crosses(), input_of()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=False)
    pairs = zip(gradients(compiled(x), model, x), gradients(model(x), model, x), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)


@pytest.mark.rest
def test_inductor_calls_the_ops() -> None:
    model, x = Crosses(2), input_of()
    expected, _, _ = run(model, x)
    torch._dynamo.reset()
    with config.patch(force_disable_caches=True):

        def step() -> list[Tensor]:
            y = torch.compile(model, fullgraph=True, dynamic=False)(x)
            return [y.detach(), *gradients(y, model, x)]

        found, codes = run_and_get_code(step)
    text = "\n".join(codes)
    assert text.count("lokakern_crossed_gradient(") == 2
    assert text.count("lokakern_quantized_weight_gradient(") == 2
    for one, other in zip(found, expected, strict=True):
        assert distance(one, other) < E4M3_ERROR


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize("count", [1, 3])
def test_a_gpu_trains_with_the_op(dtype: torch.dtype, count: int) -> None:
    m = 2048
    form = behind_cross(SUMS, [(m, (WIDE_KERNEL, WIDE_KERNEL))])
    model = Crosses(count, form=form, dtype=dtype, rank=128).cuda()  # of which 128 is a divisor
    x = input_of(m).detach().cuda()
    x.requires_grad_()
    right = exact(model, x)
    torch._dynamo.reset()

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=BF16, enabled=dtype is not BF16):
            return model(x)  # type: ignore[no-any-return]

    def step() -> list[Tensor]:
        y = torch.compile(call, fullgraph=True, dynamic=False)(x)
        return [y.detach(), *gradients(y, model, x)]

    with config.patch(force_disable_caches=True):
        found, codes = run_and_get_code(step)
    assert sum(code.count("lokakern_crossed_gradient(") for code in codes) == count
    for _ in range(3):  # recorded, then replayed in C++
        found = step()
    for one, other in zip(found, right, strict=True):
        assert distance(one, other) < E4M3_ERROR * count**0.5


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("sums", ["", "float32", "bfloat16"])
@pytest.mark.parametrize("size", [(128, 256), (2048, 3456), (136, 200)])
@pytest.mark.parametrize("has_factor", [True, False])
def test_the_kernel_is_within_a_step_of_the_emulation(
    count: int, sums: str, size: tuple[int, int], has_factor: bool
) -> None:
    *given, x0 = (torch.randn(size, device="cuda").bfloat16() for _ in range(count + 1))
    found = OPS.crossed_gradient(given, x0 if has_factor else None, sums)
    on_cpu = [x.cpu() for x in given]
    expected = OPS.crossed_gradient(on_cpu, x0.cpu() if has_factor else None, sums)
    kept = 5 if sums else 4
    for one, other in zip(found[:kept], expected[:kept], strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        if one.dtype is not torch.float8_e4m3fn:
            assert torch.equal(one.cpu(), other)
            continue
        both = [x.contiguous().view(torch.uint8).int() for x in (one.cpu(), other)]
        steps = (both[0] - both[1]).abs()
        # A product with a reciprocal rounds a few quotients to the neighbor of the exact ones.
        assert int(steps.max()) <= 1 and float((steps > 0).float().mean()) < 1e-3
