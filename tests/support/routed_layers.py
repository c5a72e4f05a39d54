"""Layers on routes of an H200, emulated: m from 16 on is quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lokakern.conversion.routes import GEMMS, Judge, Route
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import PLAIN, in_dtype, route_text, with_eager
from lokakern.types import Granularity

ROW_KERNEL = "cuda.quantize_row+cuda.scaled_gemm_row"
GROUP_KERNEL = "cuda.quantize_group+cuda.scaled_gemm_group"
BLOCK_KERNEL = "cuda.quantize_group+cuda.scaled_gemm_block"
ROW, GROUP, BLOCK = Granularity.ROW, Granularity.GROUP, Granularity.BLOCK
BY_ROW = route_text(ROW, [(0, ""), (16, ROW_KERNEL)], [(0, ""), (17, ROW_KERNEL)])
BY_GROUP = route_text(Granularity.NONE, [(0, ""), (16, GROUP_KERNEL)], [(0, "")])
ROUTE = f"row;16:0={ROW_KERNEL};1:0={ROW_KERNEL}"
ROUTES = (BY_ROW, BY_ROW, BY_GROUP)
EAGER_ROUTES = (with_eager(PLAIN, BY_ROW), with_eager(PLAIN, BY_ROW), with_eager(PLAIN, BY_GROUP))
M, N, K = 48, 40, 64


def layer_of(routes: tuple[str, str, str] = ROUTES, n: int = N, k: int = K, bias: bool = True,
             dtype: torch.dtype = torch.bfloat16) -> Linear:  # fmt: skip
    torch.manual_seed(0)
    layer = Linear(k, n, bias, dtype=dtype)
    layer.take_routes(routes, layer.weight)
    return layer


def layer_in(dtype: torch.dtype, routes: tuple[str, str, str] = ROUTES, **options: Any) -> Linear:
    """As `layer_of`, with routes for bfloat16 or float16."""
    first, second, third = (in_dtype(route, dtype) for route in routes)
    return layer_of((first, second, third), dtype=dtype, **options)


def plain_of(layer: nn.Linear) -> nn.Linear:
    plain = nn.Linear(
        layer.in_features, layer.out_features, layer.bias is not None, dtype=layer.weight.dtype
    )
    plain.load_state_dict({k: v for k, v in layer.state_dict().items() if "norm" not in k})
    return plain


def rows(m: int = M, k: int = K, seed: int = 1) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).bfloat16()


def passed(call: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """The output and all gradients of a call."""
    x = x.clone().requires_grad_()
    y = call(x)
    y.backward(gradient)
    found = [y.detach(), x.grad, *(p.grad for p in call.parameters())]
    call.zero_grad()
    return [f for f in found if f is not None]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def is_quantized(*_: Any, judge_at: int = 2, **__: Any) -> tuple[Route, ...]:
    """Replaces `routes_of`: FP8 for every product with a budget, measured or not."""
    judge = _[judge_at]
    assert isinstance(judge, Judge)
    return tuple(Route(gemm, ROUTE if judge.budget else "", "") for gemm in GEMMS)
