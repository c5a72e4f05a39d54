"""Concatenated float32 weights of fused layers, in graphs of compiled training."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lokakern.mods.together import FusedLinear
from lokakern.nn import graph_passes, wide_gradients
from lokakern.nn.routed_matmul import PLAIN, in_dtype, route_text
from lokakern.types import Granularity
from tests.support.routed_layers import BY_GROUP, BY_ROW, rows
from tests.support.traced_graphs import graphs_of

K, N = 64, 24
Read = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    def __init__(
        self, read: Read, routes: tuple[str, str, str], dtype: torch.dtype, half: torch.dtype
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(K, n, dtype=dtype) for n in (N, 2 * N))
        self.fused = FusedLinear(list(self.parts))  # type: ignore[arg-type]
        self.fused.take_routes([in_dtype(route, half) for route in routes], None)
        with torch.no_grad():
            for parameter in self.parameters():  # so that rounding changes nothing
                parameter.copy_(parameter.to(half))
        self.read, self.half_dtype = read, half

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, dtype=self.half_dtype):
            return self.read(self, x.relu())


def usual(model: Model, x: Tensor) -> Tensor:
    return torch.cat(model.fused(x), 1)


def read_otherwise(model: Model, x: Tensor) -> Tensor:
    weight = model.fused.weight()
    bias = torch.cat([part.bias for part in model.fused.parts])
    return model.fused.product(x, weight, bias) + weight.square().sum()


def run(
    read: Read = usual, routes: tuple[str, str, str] = (BY_ROW, BY_ROW, BY_GROUP),
    dtype: torch.dtype = torch.float32, half: torch.dtype = torch.bfloat16,
) -> tuple[list[Tensor], list[Tensor], str]:  # fmt: skip
    """Outputs and gradients, changed and in eager calls, and the dtypes that are concatenated."""
    model = Model(read, routes, dtype, half)
    x = rows(k=K).to(half).requires_grad_()
    found, graphs = graphs_of(
        model, x, change=lambda graph: None, trains=True,
        change_both=graph_passes.JointPasses(None),
    )  # fmt: skip
    torch.manual_seed(2)
    weights = torch.randn(found.shape)
    both = []
    for y in (found, model(x)):
        grads = torch.autograd.grad((y.float() * weights).sum(), [x, *model.parameters()])
        both.append([y, *grads])
    text = "\n".join(graph.python_code("self").src for graph in graphs)
    return both[0], both[1], text


def written(text: str) -> list[str]:
    """Names of what is concatenated along the first axis, with a cast before or without."""
    casts = set(re.findall(r"(\w+) = torch\.ops\.prims\.convert_element_type\.default", text))
    found = re.findall(r"aten\.cat\.default\(\[(\w+), \w+\]\)", text)
    return ["rounded" if name in casts else "wide" for name in found]


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("routes", [(BY_ROW, BY_ROW, BY_GROUP), (PLAIN, BY_ROW, PLAIN)])
def test_weights_are_rounded_as_they_are_concatenated(
    routes: tuple[str, str, str], half: torch.dtype
) -> None:
    found, expected, text = run(routes=routes, half=half)
    assert written(text) == ["wide", "rounded"]  # biases are left to the compiler
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert (one.float() - other.float()).norm() <= 0.001 * other.float().norm()


def test_gradients_of_concatenated_weights_are_written_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wide_gradients, "_fits", lambda device: True)
    kernel = "cuda.quantize_group+torch.scaled_mm_block"
    wide = route_text(Granularity.NONE, [(0, ""), (16, kernel)], [(0, "")])
    found, expected, text = run(routes=(BY_ROW, BY_ROW, wide))
    assert "wide_weight_gradient." in text and "lokakern.weight_gradient." not in text
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype and one.shape == other.shape
        assert (one.float() - other.float()).norm() <= 0.005 * other.float().norm()


@pytest.mark.parametrize(
    ("read", "dtype"), [(read_otherwise, torch.float32), (usual, torch.bfloat16)]
)
def test_weights_that_are_read_otherwise_or_are_rounded_stay(
    read: Read, dtype: torch.dtype
) -> None:
    _, _, text = run(read, dtype=dtype)
    assert written(text) and "rounded" not in written(text)
