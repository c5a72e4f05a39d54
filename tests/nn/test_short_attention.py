"""Attentions over few tokens in graphs of converted models, by one kernel."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, fx, nn
from torch._inductor.fx_passes import pad_mm
from torch.nn import functional

from lokakern.nn import graph_passes, short_attention
from lokakern.nn.graph_edit import add
from lokakern.nn.routed_matmul import in_dtype
from tests.support.interpreted import run_interpreted
from tests.support.routed_layers import ROUTE, layer_of
from tests.support.traced_graphs import graphs_of, passed

BATCH, TOKENS, HEADS, D = 6, 39, 2, 16
aten = torch.ops.aten
OP = torch.ops.lokakern.short_attention.default
Attend = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def every_device_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_attention, "is_fast_on", lambda *_: True)


def plain(q: Tensor, k: Tensor, v: Tensor, _: Tensor) -> Tensor:
    return (q @ k.mT).softmax(dim=-1) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    score = q @ k.mT * q.shape[-1] ** -0.5
    return score.masked_fill(~present[:, None, None, :], -torch.inf).softmax(-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    bias = present.to(q.dtype)[:, None, None, :]
    return ((q @ k.mT) / 4.0 + bias).softmax(-1) @ v


def kept(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    """By a mask that tells what is read."""
    least = torch.full((), -torch.inf, dtype=q.dtype, device=q.device)
    return torch.where(present[:, None, None, :], q @ k.mT, least).softmax(-1) @ v


def early(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    """By a causal mask of two dimensions."""
    late = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.mT).masked_fill(late, -torch.inf).softmax(-1) @ v


def by_silu(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    """As in HSTU."""
    return functional.silu(q @ k.mT) / 128 @ v


def wide(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    """By a softmax in float32, and of heads as samples."""
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    p = torch.bmm(q, k.mT).float().softmax(-1).to(v.dtype)
    return torch.bmm(p, v).unflatten(0, (-1, HEADS))


def fused(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, attn_mask=present[:, None, None, :])


def few_queries(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    """A learned query for all samples, as in pooling by attention."""
    return masked(q[:1, :, :3].expand(len(k), -1, -1, -1), k, v, present)


@torch._dynamo.allow_in_graph
def padded_product(a: Tensor, b: Tensor) -> Tensor:
    """As Inductor multiplies where tokens are no multiple of 8, on GPUs."""
    product: Tensor = pad_mm.bmm_replace(a, b)
    return product


def padded(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    p = padded_product(q, k.mT).softmax(-1)
    return padded_product(p, v).unflatten(0, (-1, HEADS))


def padded_keys(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    """Of queries that are a multiple of 8, so that nothing is cut behind the last product."""
    return padded(q[:, :, :32], k, v, present)


class Model(nn.Module):
    """An attention behind a product that `convert` chose a kernel for."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.inputs = layer_of((ROUTE, "", ""), 3 * HEADS * D, 64, bias=False)
        self.attend = attend

    def forward(self, x: Tensor, present: Tensor) -> Any:
        made = self.inputs(x.flatten(0, 1)).view(len(x), -1, 3, HEADS, D)
        q, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)
        return self.attend(q, k, v, present).transpose(1, 2).flatten(2)


def given() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    present = torch.rand(BATCH, TOKENS) < 0.7
    present[:, 0] = True
    return torch.randn(BATCH, TOKENS, 64).bfloat16(), present


@pytest.mark.parametrize(
    "attend",
    [plain, masked, biased, kept, early, by_silu, wide, few_queries, padded, padded_keys],
)  # fmt: skip
def test_an_attention_of_products_is_one_op_without_copies(attend: Attend) -> None:
    model, inputs = Model(attend), given()
    found, code = passed(model, *inputs)
    assert code.count("short_attention.default") == 1
    assert "bmm" not in code
    # The product quantizes its input itself; the attention reads views of what it writes.
    assert "clone" not in code or attend in (wide, padded, padded_keys)
    with torch.no_grad():
        expected = model(*inputs)
    distance = (found.double() - expected.double()).norm() / expected.double().norm()
    assert found.shape == expected.shape and distance < 0.01


class Activated(Model):
    """With silu of queries, keys, values and a gate, as in HSTU."""

    def forward(self, x: Tensor, present: Tensor) -> Any:
        made = functional.silu(self.inputs(x.flatten(0, 1)).view(*x.shape[:2], -1))
        parts = made.chunk(3, -1)
        q, k, v = (y.reshape(*x.shape[:2], HEADS, D).transpose(1, 2) for y in parts)
        y = self.attend(q, k, v, present).transpose(1, 2).flatten(2)
        return y * parts[0][:, : y.shape[1]]


@pytest.mark.parametrize("attend", [by_silu, plain, few_queries])
def test_silu_of_the_operands_is_taken_in_the_kernel(attend: Attend) -> None:
    model, inputs = Activated(attend), given()
    found, code = passed(model, *inputs)
    (call,) = (line for line in code.splitlines() if "short_attention.default" in line)
    assert call.split(";")[0].endswith(", True)")
    with torch.no_grad():
        expected = model(*inputs)
    distance = (found.double() - expected.double()).norm() / expected.double().norm()
    assert distance < 0.01


class Unbound(Model):
    """With silu of queries, keys and values, in the form of a product of all three."""

    def forward(self, x: Tensor, present: Tensor) -> Any:
        made = functional.silu(self.inputs(x.flatten(0, 1))).view(len(x), -1, 3, HEADS, D)
        q, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)
        y = self.attend(q, k, v, present).transpose(1, 2).flatten(2)
        return y @ made.flatten(2)[:, :, : y.shape[2]].mT if self.reads else y

    reads = False


@pytest.mark.parametrize("reads", [False, True])
def test_a_silu_that_a_library_reads_is_taken_once(reads: bool) -> None:
    model, inputs = Unbound(plain), given()
    model.reads = reads
    found, code = passed(model, *inputs)
    (call,) = (line for line in code.splitlines() if "short_attention.default" in line)
    assert call.split(";")[0].endswith(", True)") is not reads
    with torch.no_grad():
        expected = model(*inputs)
    assert (found.double() - expected.double()).norm() < 0.01 * expected.double().norm()


def mixed(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
    """Values are no silu."""
    return by_silu(q, k, 2 * v, present)


def test_operands_of_which_one_is_no_silu_are_left() -> None:
    model, inputs = Activated(mixed), given()
    found, code = passed(model, *inputs)
    (call,) = (line for line in code.splitlines() if "short_attention.default" in line)
    assert not call.split(";")[0].endswith(", True)")
    with torch.no_grad():
        expected = model(*inputs)
    assert (found.double() - expected.double()).norm() < 0.01 * expected.double().norm()


def trained(model: nn.Module, *given: Tensor) -> tuple[list[Tensor], str]:
    """Output and gradients of a compiled step, and the text of both graphs."""
    found, graphs = graphs_of(
        model, *given, change=lambda graph: None, trains=True,
        change_both=graph_passes.JointPasses(None),
    )  # fmt: skip
    gradients = gradients_of(found, model)
    return [found, *gradients], "\n".join(graph.python_code("self").src for graph in graphs)


def gradients_of(y: Tensor, model: nn.Module) -> list[Tensor]:
    torch.manual_seed(3)
    weights = torch.randn(y.shape).to(y)
    return [*torch.autograd.grad((y * weights).sum(), list(model.parameters()))]


def compare_steps(model: nn.Module, found: list[Tensor], *given: Tensor) -> None:
    expected = model(*given)
    for one, other in zip(found, [expected, *gradients_of(expected, model)], strict=True):
        distance = (one.double() - other.double()).norm() / other.double().norm()
        assert one.shape == other.shape and one.dtype is other.dtype and distance < 0.02, distance


class Pooled(nn.Module):
    """Learned queries, one head for all."""

    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.model = Model(attend)
        self.queries = nn.Parameter(torch.randn(1, HEADS, 3, D, dtype=torch.bfloat16))

    def forward(self, x: Tensor, present: Tensor) -> Tensor:
        made = self.model.inputs(x.flatten(0, 1)).view(len(x), -1, 3, HEADS, D)
        _, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)
        q = self.queries.expand(len(x), -1, -1, -1)
        return self.model.attend(q, k, v, present).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("attend", [plain, masked, biased, kept, early, by_silu, wide])
@pytest.mark.parametrize("kind", [Model, Pooled])
def test_a_training_has_an_op_each_way(attend: Attend, kind: type[nn.Module]) -> None:
    if kind is Pooled and attend is early:
        attend = masked
    model, inputs = kind(attend), given()
    found, code = trained(model, *inputs)
    assert code.count("short_attention.default") == 1
    assert code.count("short_attention_gradients.default") == 1
    assert "bmm" not in code and "exp" not in code.replace("expand", "")
    compare_steps(model, found, *inputs)


@pytest.mark.parametrize("attend", [masked, by_silu])
def test_an_attention_behind_a_product_in_float16_has_ops_too(attend: Attend) -> None:
    model = Model(attend)
    model.inputs.half().take_routes((in_dtype(ROUTE, torch.float16), "", ""), model.inputs.weight)
    x, present = given()
    found, code = trained(model, x.half(), present)
    assert code.count("short_attention.default") == code.count("attention_gradients.default") == 1
    assert ";float16" in code and found[0].dtype is torch.float16
    compare_steps(model, found, x.half(), present)


def unmatched(name: str) -> Attend:
    """Attentions that are left to the compiler."""

    def weights_are_read(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        p = (q @ k.mT).softmax(-1)
        return p @ v + p.sum(-1, keepdim=True)

    def scores_are_read(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        score = q @ k.mT
        return score.softmax(-1) @ v + score.amax(-1, keepdim=True)

    def along_queries(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-2) @ v

    def scaled_behind_a_mask(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        score = (q @ k.mT).masked_fill(~present[:, None, None, :], -10.0)
        return (score * 2.0).softmax(-1) @ v

    def normalized_twice(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1).softmax(-1) @ v

    def silu_of_another(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        score = q @ k.mT
        return score / (1.0 + (-score.flip(-1)).exp()) @ v

    def softmax_times_two(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        return (q @ k.mT).softmax(-1) * 2 @ v

    def twice_silu(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        score = q @ k.mT
        return score * (2.0 / (1.0 + (-score).exp())) / 128 @ v

    def mask_is_added(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        return (q @ k.mT / 4.0 + present[:, None, None, :]).softmax(-1) @ v

    def number_is_added(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        return functional.silu(q @ k.mT + 1.0) / 128 @ v

    def less_a_number(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        e = (q @ k.mT - 3.0).exp()
        return e / e.sum(-1, keepdim=True) @ v

    def scores_of_another_shape(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        score = (q[:, :, :13] @ k.mT).reshape(len(q), HEADS, TOKENS, 13)
        return score.softmax(-1) @ v[:, :, :13]

    def one_key_for_all(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        k = k[:, :, :1].expand(-1, -1, TOKENS, -1)
        return (q @ k.mT + present[:, None, None, :].to(q.dtype)).softmax(-1) @ v

    def one_query_for_all(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        bias = torch.linspace(-1, 1, TOKENS**2).view(1, 1, TOKENS, TOKENS).to(q.dtype)
        return (q[:, :, :1] @ k.mT + bias).softmax(-1) @ v

    def one_for_all_samples(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        q, k, v = (x[:1].expand(len(q), -1, -1, -1) for x in (q, k.mT, v))
        score = (q @ k).masked_fill(~present[:, None, None, :], -torch.inf)
        return score.softmax(-1) @ v

    def rounded_scores(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        return (q @ k.mT).int().float().softmax(-1).to(v.dtype) @ v

    def padded_by_the_model(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        q, k, v = (functional.pad(x.flatten(0, 1), (0, 0, 0, 1)) for x in (q, k, v))
        p = torch.bmm(q, k.mT)[:, :, :-2].softmax(-1)
        return torch.bmm(p, v[:, :-2])[:, :-1].unflatten(0, (-1, HEADS))

    def long(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Tensor:
        k, v = (torch.cat([x] * 4, 2) for x in (k, v))
        return (q @ k.mT).softmax(-1) @ v

    return {f.__name__: f for f in (
        weights_are_read, scores_are_read, along_queries, scaled_behind_a_mask, normalized_twice,
        silu_of_another, softmax_times_two, twice_silu, mask_is_added, number_is_added,
        less_a_number,
        scores_of_another_shape, one_key_for_all, one_query_for_all, rounded_scores,
        one_for_all_samples, padded_by_the_model, long,
    )}[name]  # fmt: skip


UNMATCHED = [
    "weights_are_read", "scores_are_read", "along_queries", "scaled_behind_a_mask",
    "normalized_twice", "silu_of_another", "softmax_times_two", "twice_silu", "mask_is_added",
    "number_is_added", "less_a_number", "scores_of_another_shape", "one_query_for_all",
    "rounded_scores", "one_for_all_samples", "padded_by_the_model", "long",
]  # fmt: skip


@pytest.mark.parametrize("name", UNMATCHED)
def test_what_is_no_such_attention_is_left(name: str) -> None:
    model, inputs = Model(unmatched(name)), given()
    found, code = passed(model, *inputs)
    assert "short_attention" not in code
    with torch.no_grad():
        expected = model(*inputs)
    assert (found.double() - expected.double()).norm() < 0.01 * expected.double().norm()


@pytest.mark.sample(every=3)
@pytest.mark.parametrize("name", UNMATCHED)
def test_a_training_of_another_is_left(name: str) -> None:
    model, inputs = Model(unmatched(name)), given()
    found, code = trained(model, *inputs)
    assert "short_attention" not in code
    compare_steps(model, found, *inputs)


class Masked(torch.autograd.Function):
    """Scores with a mask, and their gradient with another one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor, of_gradient: Tensor) -> Tensor:
        ctx.save_for_backward(of_gradient)
        return x.masked_fill(out, -torch.inf)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.masked_fill(ctx.saved_tensors[0], 0.0), None, None


class MaskedAlike(torch.autograd.Function):
    """With the same."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, out: Tensor) -> Tensor:
        ctx.save_for_backward(out)
        return x.masked_fill(out, -torch.inf)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.masked_fill(ctx.saved_tensors[0], 0.0), None


class Lifted(MaskedAlike):
    """A gradient that is another number where nothing is read."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g.masked_fill(ctx.saved_tensors[0], 0.25), None


class Scaled(torch.autograd.Function):
    """A factor, of which the gradient has another."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 0.25


class ScaledAlike(Scaled):
    """A factor, of which the gradient has the same."""

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        return g * 0.5


def changed(kind: str) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor, present: Tensor) -> Any:
        out, score = ~present[:, None, None, :], q @ k.mT
        if kind.startswith("silu"):
            by = ScaledAlike if kind == "silu alike" else Scaled
            return by.apply(functional.silu(score)) @ v  # type: ignore[no-untyped-call]
        if kind.startswith("scale"):
            by = ScaledAlike if kind == "scale alike" else Scaled
            return by.apply(score).softmax(-1) @ v  # type: ignore[no-untyped-call]
        if kind == "mask":
            return Masked.apply(score, out, out.roll(1, -1)).softmax(-1) @ v  # type: ignore[no-untyped-call]
        by = Lifted if kind == "number" else MaskedAlike
        return by.apply(score, out).softmax(-1) @ v  # type: ignore[no-untyped-call]

    return attend


@pytest.mark.parametrize(
    ("kind", "count"),
    [
        ("scale alike", 1),
        ("scale", 0),
        ("silu alike", 1),
        ("silu", 0),
        ("mask alike", 1),
        ("mask", 0),
        ("number", 0),
    ],
)
def test_gradients_of_another_function_are_left(kind: str, count: int) -> None:
    model, inputs = Model(changed(kind)), given()
    found, code = trained(model, *inputs)
    assert code.count("short_attention_gradients.default") == count
    compare_steps(model, found, *inputs)


class Shown(Model):
    """Outputs by heads, also as views and behind other operators."""

    def forward(self, x: Tensor, present: Tensor) -> Any:
        made = self.inputs(x.flatten(0, 1)).view(len(x), -1, 3, HEADS, D)
        q, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)
        y = self.attend(q, k, v, present)
        return y, y.transpose(1, 2), y.tanh(), y.tanh().view(len(x), -1), y.detach()


def test_outputs_of_a_training_have_the_strides_of_eager_mode() -> None:
    model, inputs = Shown(masked), given()
    found, graphs = graphs_of(
        model, *inputs, change=lambda graph: None, trains=True,
        change_both=graph_passes.JointPasses(None),
    )  # fmt: skip
    assert "lokakern.short_attention" in graphs[0].python_code("self").src
    for one, other in zip(found, model(*inputs), strict=True):
        assert one.shape == other.shape and one.stride() == other.stride()
        assert (one.double() - other.double()).norm() < 0.01 * other.double().norm()


@pytest.mark.parametrize("trains", [True, False])
def test_what_reads_memory_by_strides_keeps_its_attention(trains: bool) -> None:
    class Strided(Model):
        def forward(self, x: Tensor, present: Tensor) -> Any:
            made = self.inputs(x.flatten(0, 1)).view(len(x), -1, 3, HEADS, D)
            q, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)
            return (self.attend(q, k, v, present) * 2).as_strided((3, 5), (7, 1), 2)

    model, inputs = Strided(masked), given()
    if trains:
        found, code = trained(model, *inputs)
        compare_steps(model, found, *inputs)
    else:
        y, code = passed(model, *inputs)
        assert torch.equal(y, model(*inputs).detach())
    assert "short_attention" not in code


def test_a_training_compiled_by_inductor() -> None:
    model, inputs = Model(masked), given()
    torch._dynamo.reset()
    texts: list[str] = []

    def step(x: Tensor, present: Tensor) -> Tensor:
        y: Tensor = torch.compile(model, dynamic=False)(x, present)
        return y

    y, texts = torch._inductor.utils.run_fw_bw_and_get_code(lambda: step(*inputs))  # type: ignore[no-untyped-call]
    assert "short_attention_gradients" in "\n".join(texts)
    compare_steps(model, [y, *gradients_of(step(*inputs), model)], *inputs)


def learned_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return (q @ k.mT + bias).softmax(-1) @ v


def test_a_bias_that_learns_is_left() -> None:
    class Learning(Model):
        def __init__(self) -> None:
            super().__init__(learned_bias)
            self.bias = nn.Parameter(torch.randn(HEADS, 1, TOKENS, dtype=torch.bfloat16))

        def forward(self, x: Tensor, present: Tensor) -> Any:
            return super().forward(x, self.bias)

    model, inputs = Learning(), given()
    found, code = trained(model, *inputs)
    assert "short_attention" not in code
    compare_steps(model, found, *inputs)


def test_an_expanded_key_is_one_for_all_tokens() -> None:
    model, inputs = Model(unmatched("one_key_for_all")), given()
    found, _ = passed(model, *inputs)
    with torch.no_grad():
        expected = model(*inputs)
    assert (found.double() - expected.double()).norm() < 0.01 * expected.double().norm()


def test_outputs_share_no_memory() -> None:
    class Twice(Model):
        def forward(self, x: Tensor, present: Tensor) -> Any:
            made = self.inputs(x.flatten(0, 1)).view(len(x), -1, 3, HEADS, D)
            q, k, v = made.permute(2, 0, 3, 1, 4).unbind(0)
            y = self.attend(q, k, v, present).transpose(1, 2)
            return y, y.contiguous(), y.transpose(1, 2).reshape(len(x), -1)

    model, inputs = Twice(masked), given()
    found, code = passed(model, *inputs)
    assert "short_attention" in code
    with torch.no_grad():
        expected = model(*inputs)
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape and (one - other).norm() < 0.01 * other.norm()
    assert found[1].is_contiguous() and found[2].is_contiguous()
    assert len({x.data_ptr() for x in found}) == 3


def _fused_graph(target: Any, *behind: Any, **options: Any) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """A graph of a kernel of torch, whose operands have values without data."""
    graph = fx.Graph()
    sizes = {"made": (BATCH, TOKENS, 3, HEADS, D), "present": (BATCH, TOKENS)}
    inputs = {}
    for name, size in sizes.items():
        inputs[name] = graph.placeholder(name)
        dtype = torch.bool if name == "present" else torch.bfloat16
        inputs[name].meta["val"] = torch.empty(size, dtype=dtype, device="meta")
    turned = add(graph, aten.permute.default, inputs["made"], [2, 0, 3, 1, 4])
    q, k, v = (add(graph, aten.select.int, turned, 0, place) for place in range(3))
    bias = add(graph, aten.unsqueeze.default, inputs["present"], 1)
    bias = add(graph, aten.unsqueeze.default, bias, 2)
    bias = add(graph, torch.ops.prims.convert_element_type.default, bias, torch.bfloat16)
    small = bias
    bias = add(graph, aten.constant_pad_nd.default, bias, [0, 1], 0.0)
    bias = add(graph, aten.slice.Tensor, bias, 3, 0, TOKENS)
    bias = add(graph, aten.expand.default, bias, [BATCH, HEADS, TOKENS, TOKENS])
    has_bias = "attn_bias" in [x.name for x in target._schema.arguments]
    node = graph.call_function(
        target, (q, k, v, *([bias, False] if has_bias else []), *behind), options
    )
    out = graph.call_function(operator.getitem, (node, 0))
    made = torch.empty(BATCH, TOKENS, HEADS, D, dtype=torch.bfloat16, device="meta")
    out.meta["val"] = made.transpose(1, 2)
    by_tokens = add(graph, aten.permute.default, out, [0, 2, 1, 3])
    graph.output(add(graph, aten.view.default, by_tokens, [BATCH, TOKENS, HEADS * D]))
    return graph, {"q": q, "bias": small, "node": node}


@pytest.mark.parametrize("name", ["efficient", "cudnn", "flash"])
def test_a_fused_attention_reads_its_bias_before_it_is_expanded(name: str) -> None:
    target = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    graph, nodes = _fused_graph(target, scale=0.5)
    short_attention.attend_at_once(graph)
    (made,) = graph.find_nodes(op="call_function", target=OP)
    assert made.args[0] is nodes["q"]
    assert made.args[3:] == (None if name == "flash" else nodes["bias"], 0.5, False, True, 0.0)
    assert not graph.find_nodes(op="call_function", target=target)
    assert not graph.find_nodes(op="call_function", target=aten.expand.default)
    graph.lint()


def _trained_graph(
    name: str, aliases: int = 0, **options: Any
) -> tuple[fx.Graph, dict[str, fx.Node]]:
    """The same with its gradients, which read the output under as many other names."""
    target = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    graph, nodes = _fused_graph(target, scale=0.5)
    node, output = nodes["node"], graph.output_node()
    (out,) = node.users
    parts = [x.name for x in target._schema.arguments]
    given = {**dict(zip(parts, node.args, strict=False)), **node.kwargs, "out": out}
    back = getattr(aten, f"_scaled_dot_product_{name}_attention_backward").default
    with graph.inserting_before(output):
        dy = graph.placeholder("dy")
        dy.meta["val"] = out.meta["val"]
        log = graph.call_function(operator.getitem, (node, 1))
        for _ in range(aliases):
            given["out"] = add(graph, aten.alias.default, given["out"])
        given |= {"logsumexp": log, "dropout_p": 0.0, "is_causal": False, **options}
        places = [x for x in back._schema.arguments if not x.kwarg_only]
        args = (dy, *(given.get(x.name) for x in places[1:]))
        nodes["back"] = graph.call_function(back, args, {"scale": given["scale"]})
        ends = []
        for place in range(3):
            ends.append(graph.call_function(operator.getitem, (nodes["back"], place)))
            ends[-1].meta["val"] = out.meta["val"]
    output.args = ((output.args[0], *ends),)
    return graph, {**nodes, "dy": dy, "log": log}


@pytest.mark.parametrize("aliases", [0, 2])
@pytest.mark.parametrize("name", ["efficient", "cudnn", "flash"])
def test_a_fused_attention_trains_by_an_op_each_way(name: str, aliases: int) -> None:
    """On a GPU torch 2.11 has two aliases of the output, which its gradients read."""
    graph, nodes = _trained_graph(name, aliases)
    short_attention.attend_in_training(graph)
    graph.lint()
    (made,) = graph.find_nodes(op="call_function", target=OP)
    gradients = torch.ops.lokakern.short_attention_gradients.default
    (back,) = graph.find_nodes(op="call_function", target=gradients)
    assert back.args == (nodes["dy"], *made.args)
    assert made.args[3:] == (None if name == "flash" else nodes["bias"], 0.5, False, True, 0.0)
    given: Any = graph.output_node().args[0]
    assert [x.args[0].args for x in given[1:]] == [(back, place) for place in range(3)]
    assert "scaled_dot" not in graph.python_code("self").src


@pytest.mark.parametrize(
    "options", [{"scale": 0.25}, {"dropout_p": 0.1}, {"is_causal": True}, {"attn_bias": None}]
)
def test_a_fused_attention_whose_gradients_are_of_another_is_left(options: dict[str, Any]) -> None:
    graph, _ = _trained_graph("efficient", **options)
    short_attention.attend_in_training(graph)
    assert "lokakern" not in graph.python_code("self").src


def test_a_fused_attention_without_gradients_is_left_in_a_training() -> None:
    graph, nodes = _trained_graph("efficient")
    given: Any = graph.output_node().args[0]
    graph.output_node().args = ((given[0], nodes["log"]),)
    for node in (*given[1:], nodes["back"]):
        graph.erase_node(node)
    short_attention.attend_in_training(graph)
    assert "lokakern" not in graph.python_code("self").src


def test_a_bias_of_a_fused_attention_that_learns_is_left() -> None:
    graph, nodes = _trained_graph("efficient")
    output = graph.output_node()
    with graph.inserting_before(output):
        of_bias = graph.call_function(operator.getitem, (nodes["back"], 3))
    output.args = ((*output.args[0], of_bias),)  # type: ignore[misc]
    short_attention.attend_in_training(graph)
    assert "lokakern" not in graph.python_code("self").src


def test_an_output_by_heads_stays_contiguous() -> None:
    target = aten._scaled_dot_product_cudnn_attention.default
    graph, nodes = _fused_graph(target)
    out = next(iter(nodes["node"].users))
    out.meta["val"] = torch.empty(BATCH, HEADS, TOKENS, D, dtype=torch.bfloat16, device="meta")
    graph.output_node().args = ((out,),)
    short_attention.attend_at_once(graph)
    (given,) = graph.output_node().args[0]  # type: ignore[misc, union-attr]
    assert given.target is aten.clone.default and given.meta["val"].is_contiguous()


def test_a_causal_one_stays_causal_and_has_a_scale() -> None:
    graph, _ = _fused_graph(aten._scaled_dot_product_flash_attention.default, 0.0, True)
    short_attention.attend_at_once(graph)
    (made,) = graph.find_nodes(op="call_function", target=OP)
    assert made.args[4:] == (D**-0.5, True, True, 0.0)


def test_a_causal_one_of_other_queries_is_left() -> None:
    """FlashAttention aligns the mask at the last key, other kernels at the first."""
    target = aten._scaled_dot_product_flash_attention.default
    graph, nodes = _fused_graph(target, 0.0, True)
    with graph.inserting_before(nodes["node"]):
        few = add(graph, aten.slice.Tensor, nodes["q"], 2, 0, 4)
    nodes["node"].args = (few, *nodes["node"].args[1:])
    short_attention.attend_at_once(graph)
    assert graph.find_nodes(op="call_function", target=target)


def test_a_shifted_bias_is_read_as_it_is() -> None:
    target = aten._scaled_dot_product_efficient_attention.default
    graph, _ = _fused_graph(target)
    (cut,) = graph.find_nodes(op="call_function", target=aten.slice.Tensor)
    cut.args = (*cut.args[:2], 1, TOKENS + 1)
    short_attention.attend_at_once(graph)
    (made,) = graph.find_nodes(op="call_function", target=OP)
    assert made.args[3] is cut


def test_one_with_dropout_is_left() -> None:
    target = aten._scaled_dot_product_flash_attention.default
    graph, _ = _fused_graph(target, 0.1)
    short_attention.attend_at_once(graph)
    assert graph.find_nodes(op="call_function", target=target)


def test_one_whose_logarithms_are_read_is_left() -> None:
    target = aten._scaled_dot_product_efficient_attention.default
    graph, nodes = _fused_graph(target)
    output = graph.output_node()
    with graph.inserting_before(output):
        log = graph.call_function(operator.getitem, (nodes["node"], 1))
    output.args = ((output.args[0], log),)
    short_attention.attend_at_once(graph)
    assert graph.find_nodes(op="call_function", target=target)


def reference(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool,
    silu: float = 0.0, reads_nothing: float = -math.inf,
) -> Tensor:  # fmt: skip
    """In float64; scores of a query that reads nothing may be another number."""
    score = q.double() @ k.double().mT * scale
    out = torch.zeros_like(score, dtype=torch.bool)
    if bias is not None and bias.dtype is torch.bool:
        out |= bias
    elif bias is not None:
        score = score + bias
    if causal:
        out |= torch.ones_like(out).triu(1)
    if silu:
        p = silu * functional.silu(score).masked_fill(out, 0.0)
    else:
        nothing = out.all(-1, keepdim=True)
        p = score.masked_fill(out & ~nothing, -math.inf).masked_fill(nothing, reads_nothing)
        p = p.softmax(-1)
    return (p @ v.double()).transpose(1, 2)


CASES = [
    (3, 4, 54, 54, 16, "added", False), (2, 2, 39, 39, 32, "", False),
    (3, 4, 2, 54, 16, "excluded", False), (2, 3, 100, 100, 24, "each", True),
    (1, 1, 1, 1, 8, "", False), (2, 2, 128, 128, 64, "excluded", True),
    (1, 1, 70, 5, 40, "", False),
]  # fmt: skip


def check(device: str, dtype: torch.dtype) -> None:
    """Of the kernel: against float64, with rows that read nothing, and with NaN."""
    from lokakern.kernels.triton.short_attention import short_attention as run

    torch.manual_seed(0)
    for batch, heads, queries, keys, d, kind, causal in CASES:
        made = torch.randn(batch, max(queries, keys), 3, heads, d, device=device).to(dtype)
        q, k, v = (x.transpose(1, 2) for x in made.unbind(2))
        q, k, v = q[:, :, :queries], k[:, :, :keys], v[:, :, :keys]
        bias: Tensor | None = None
        if kind == "added":
            dropped = torch.rand(batch, 1, 1, keys, device=device) < 0.3
            bias = torch.where(dropped, -math.inf, 0.0).to(dtype)
        elif kind == "each":
            bias = torch.randn(1, heads, queries, keys, device=device)
        elif kind == "excluded":
            bias = torch.rand(batch, 1, queries, keys, device=device) < 0.5
            bias[0, 0, 0] = True  # this query reads nothing
        check_unread(q, k, v, d**-0.5)
        for zeros in (True, False):
            found = run(q, k, v, bias, d**-0.5, causal, zeros)
            expected = reference(q, k, v, bias, d**-0.5, causal)
            nothing = expected.isnan()
            assert nothing.any() == (kind == "excluded")
            if zeros:
                assert not found[nothing].any()
            else:
                assert found.isnan()[nothing].all()
            error = (found.double() - expected)[~nothing].abs().max()
            assert error < (0.03 if dtype is torch.bfloat16 else 0.004), (queries, keys, d, error)
        found = run(q, k, v, bias, d**-0.5, causal, True, 0.0, True)
        parts = [functional.silu(x.float()).to(dtype) for x in (q, k, v)]
        expected = reference(*parts, bias, d**-0.5, causal).nan_to_num()  # type: ignore[misc]
        assert (found.double() - expected).norm() < 0.01 * expected.norm()
        if kind != "added":  # silu of minus infinity is NaN
            found = run(q, k, v, bias, d**-0.5, causal, True, 0.5)
            expected = reference(q, k, v, bias, d**-0.5, causal, 0.5)
            assert (found.double() - expected).norm() < 0.01 * expected.norm()
            found = run(q, k, v, bias, d**-0.5, causal, True, 0.5, True)
            parts = [functional.silu(x.float()).to(dtype) for x in (q, k, v)]
            expected = reference(*parts, bias, d**-0.5, causal, 0.5)  # type: ignore[misc]
            assert (found.double() - expected).norm() < 0.01 * expected.norm()
            with mock.patch(f"{run.__module__}.activates", return_value=False):
                apart = run(q, k, v, bias, d**-0.5, causal, True, 0.5, True)
            assert (apart.double() - expected).norm() < 0.01 * expected.norm()
        check_gradients(q, k, v, bias, d**-0.5, causal, 0.0)
        if kind != "added":
            check_gradients(q, k, v, bias, d**-0.5, causal, 0.5)
        made[0, 0] = math.nan
        found = run(q, k, v, None, 1.0, False, True)
        assert found[0].isnan().all() and not found[1:].isnan().any()


def check_gradients(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float, causal: bool, silu: float
) -> None:
    """Of the kernel and of the op without it, against autograd in float64."""
    from lokakern.kernels.triton.short_attention import short_attention_gradients as run

    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    given = bias, scale, causal, silu
    dy = torch.randn_like(q)
    is_known = ~reference(q, k, v, *given).isnan()
    y = reference(*leaves, *given, reads_nothing=0.0)  # type: ignore[misc]
    # Zeros, which a query that reads nothing gets, have no gradients.
    expected = torch.autograd.grad(y, leaves, dy.double().transpose(1, 2) * is_known)
    on_cpu = [None if x is None else x.cpu() for x in (dy, q, k, v, bias)]
    op = torch.ops.lokakern.short_attention_gradients
    tolerance = 0.012 if q.dtype is torch.bfloat16 else 0.0015
    for found in (run(dy, q, k, v, *given[:3], True, silu), op(*on_cpu, *given[1:3], True, silu)):
        for one, other in zip(found, expected, strict=True):
            assert one.transpose(1, 2).shape == other.shape
            assert one.is_contiguous() and one.dtype is q.dtype
            error = (one.transpose(1, 2).double().to(other.device) - other).norm()
            assert error < tolerance * other.norm() + 1e-6, (q.shape, k.shape, error)


def check_unread(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    """Gradients where a query reads nothing without zeros, and where no query reads NaN."""
    from lokakern.kernels.triton.short_attention import short_attention_gradients as run

    bias = torch.zeros(1, 1, q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    bias[:, :, 0] = True
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    dy = torch.randn_like(q)
    y = reference(*leaves, bias, scale, False).transpose(1, 2)  # type: ignore[misc, arg-type]
    expected = torch.autograd.grad(y, leaves, dy.double())
    on_cpu = [x.cpu() for x in (dy, q, k, v, bias)]
    op = torch.ops.lokakern.short_attention_gradients
    for found in (run(dy, q, k, v, bias, scale, False, False),
                  op(*on_cpu, scale, False, False, 0.0)):  # fmt: skip
        for one, other in zip(found, expected, strict=True):
            one = one.transpose(1, 2).double().to(other.device)
            assert torch.equal(one.isnan(), other.isnan())
            error = (one - other).nan_to_num().norm()
            assert error < 0.012 * other.nan_to_num().norm() + 1e-6
    if k.shape[2] > 1:
        bias = torch.zeros_like(bias)
        bias[..., -1] = True
        k = k.clone()
        k[:, :, -1] = torch.nan
        _, dk, dv = run(dy, q, k, v, bias, scale, False, False)
        assert not dk.isnan().any() and not dv.isnan().any()


if __name__ == "__main__":
    check("cpu", torch.float16)  # as the interpreter multiplies no bfloat16


def test_the_kernel_is_right_in_the_interpreter() -> None:
    run_interpreted("tests.nn.test_short_attention")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_right_on_a_gpu(dtype: torch.dtype) -> None:
    check("cuda", dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "attend", [plain, masked, biased, kept, early, by_silu, wide, few_queries, fused]
)
def test_a_model_is_right_on_a_gpu(attend: Attend) -> None:
    model, inputs = Model(attend).cuda(), [x.cuda() for x in given()]
    torch._dynamo.reset()
    with torch.no_grad():
        found, codes = torch._inductor.utils.run_and_get_code(
            torch.compile(model, dynamic=False), *inputs
        )
        expected = model(*inputs)
    assert "short_attention" in "\n".join(codes)
    assert (found.double() - expected.double()).norm() < 0.01 * expected.double().norm()
    model = Activated(attend).cuda()
    with torch.no_grad():
        found, expected = torch.compile(model, dynamic=False)(*inputs), model(*inputs)
    assert (found.double() - expected.double()).norm() < 0.01 * expected.double().norm()


@pytest.mark.gpu
@pytest.mark.parametrize("attend", [plain, masked, biased, kept, early, by_silu, wide, fused])
def test_a_model_trains_right_on_a_gpu(attend: Attend) -> None:
    model, inputs = Model(attend).cuda(), [x.cuda() for x in given()]
    torch._dynamo.reset()
    compiled = torch.compile(model, dynamic=False)
    y, codes = torch._inductor.utils.run_fw_bw_and_get_code(lambda: compiled(*inputs))  # type: ignore[no-untyped-call]
    assert "short_attention_gradients" in "\n".join(codes)
    compare_steps(model, [y, *gradients_of(compiled(*inputs), model)], *inputs)
