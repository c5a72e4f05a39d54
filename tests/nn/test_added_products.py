"""Sums of two batched products in graphs of converted models, by one kernel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from lokakern.nn import added_products, graph_passes
from tests.support.interpreted import run_interpreted
from tests.support.routed_layers import ROUTE, layer_of
from tests.support.traced_graphs import graphs_of

BATCH, TOKENS, D, RANK, COUNT = 5, 40, 40, 6, 12
Read = Callable[["Model", Tensor], Tensor]


@pytest.fixture(autouse=True)
def every_device_has_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(added_products, "is_fast_on", lambda *_: True)
    monkeypatch.setattr(added_products, "LEAST_BYTES", 0)


class Model(nn.Module):
    """A factorization machine and products across tokens of the same embeddings, as in Wukong."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.weight = nn.Parameter(torch.randn(RANK + COUNT, TOKENS).bfloat16())
        self.layer = layer_of((ROUTE, "", ""), 16, TOKENS * RANK, bias=False)
        self.read = read

    def forward(self, x: Tensor) -> Tensor:
        return self.read(self, x)


def usual(model: Model, x: Tensor) -> Tensor:
    both = torch.bmm(model.weight.expand(len(x), -1, -1), x)
    projected, compressed = both.split([RANK, COUNT], 1)
    y = model.layer(torch.bmm(x, projected.mT).flatten(1))
    return torch.cat([y, compressed.flatten(1)], 1)


def three_terms(model: Model, x: Tensor) -> Tensor:
    """Another gradient is added between both products."""
    return torch.cat([usual(model, x), x.flatten(1).sin()], 1)


def other_samples(model: Model, x: Tensor) -> Tensor:
    """Both left operands are of samples."""
    projected = torch.bmm(x[:, :, :TOKENS], x)[:, : RANK + COUNT] * model.weight.sum()
    return model.layer(torch.bmm(x, projected[:, :RANK].mT).flatten(1))


def one_is_read_twice(model: Model, x: Tensor) -> Tensor:
    """A product that is read by the sum, and by another operator."""
    left, right = x[:, :, :RANK], x[:, :RANK]
    machine = torch.bmm(left, right)
    mixed = torch.bmm(model.weight[:, :TOKENS].t().expand(len(x), -1, -1), x[:, : RANK + COUNT])
    y = model.layer((machine + mixed)[:, :, :RANK].flatten(1))
    return torch.cat([y, machine.flatten(1)], 1)


def run(read: Read) -> tuple[list[Tensor], list[Tensor], str]:
    """Output and gradients, changed and as they are, and the text of the graphs."""
    model = Model(read)
    torch.manual_seed(0)
    x = torch.randn(BATCH, TOKENS, D).bfloat16().requires_grad_()
    leaves = [x, *model.parameters()]
    found, graphs = graphs_of(
        model, x, change=lambda graph: None, trains=True,
        change_both=graph_passes.JointPasses(None),
    )  # fmt: skip
    torch.manual_seed(2)
    weights = torch.randn(found.shape).to(found)
    changed = [found, *torch.autograd.grad((found * weights).sum(), leaves)]
    y = model(x)
    expected = [y, *torch.autograd.grad((y * weights).sum(), leaves)]
    return changed, expected, "\n".join(graph.python_code("self").src for graph in graphs)


@pytest.mark.parametrize(
    ("read", "count"), [(usual, 1), (three_terms, 0), (other_samples, 0), (one_is_read_twice, 0)]
)
def test_the_gradient_of_embeddings_is_one_op(read: Read, count: int) -> None:
    changed, expected, text = run(read)
    assert text.count("lokakern.added_products") == count
    for one, other in zip(changed, expected, strict=True):
        assert one.shape == other.shape and one.dtype is other.dtype
        assert (one.double() - other.double()).norm() < 0.01 * other.double().norm()


@pytest.mark.parametrize(
    ("name", "limit"), [("MOST_K", RANK - 1), ("MOST_R", RANK + COUNT - 1), ("LEAST_BYTES", 10**9)]
)
def test_what_a_tile_does_not_hold_and_small_sums_are_left(
    name: str, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(added_products, name, limit)
    assert "added_products" not in run(usual)[2]


def test_limits_are_those_of_the_kernel() -> None:
    kernel = pytest.importorskip("lokakern.kernels.triton.added_products", reason="needs Triton")
    assert (kernel.MOST_K, kernel.MOST_R) == (added_products.MOST_K, added_products.MOST_R)


SHAPES = [
    (2, 130, 24, 120, 160), (1, 5, 3, 1, 7), (3, 64, 48, 192, 40), (1, 129, 64, 256, 33),
    (2, 40, 17, 96, 64), (3, 130, 64, 256, 64), (0, 8, 8, 8, 8),
]  # fmt: skip


def check(device: str, dtype: torch.dtype) -> None:
    """Of the kernel: against float64, at rows that are not contiguous, and with NaN."""
    from lokakern.kernels.triton.added_products import added_products as call

    torch.manual_seed(0)
    for batch, m, k, r, n in SHAPES:
        a = torch.randn(batch, m, 2 * k, device=device).to(dtype)[:, :, :k]
        b, x = (torch.randn(batch, n, y, device=device).to(dtype).mT for y in (k, r))
        w = torch.randn(r, m, device=device).to(dtype).t()
        expected = a.double() @ b.double() + w.double() @ x.double()
        for weight in (w, w.contiguous()):
            found = call(a, b, weight, x)
            assert found.is_contiguous() and found.dtype is dtype
            error = (found.double() - expected).norm()
            assert error <= (0.003 if dtype is torch.bfloat16 else 4e-4) * expected.norm()
        if batch:
            b = b.clone()
            b[0, 0, 0] = torch.nan
            found = call(a, b, w, x)
            assert found[0, :, 0].isnan().all() and not found[0, :, 1:].isnan().any()
            assert not found[1:].isnan().any()
    with pytest.raises(ValueError, match="expected at most 64 and 256"):
        call(*(torch.zeros(1, *y, device=device) for y in ((8, 65), (65, 8))), w, x)


if __name__ == "__main__":
    check("cpu", torch.float16)  # as the interpreter multiplies no bfloat16


def test_the_kernel_is_right_in_the_interpreter() -> None:
    run_interpreted("tests.nn.test_added_products")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_is_right_on_a_gpu(dtype: torch.dtype) -> None:
    check("cuda", dtype)


# Of many samples a block, which copies run ahead of; of one or two warpgroups, and of odd sizes.
MANY = [
    (2048, 720, 24, 120, 160), (700, 720, 48, 192, 160), (1000, 130, 8, 8, 8),
    (300, 60, 64, 256, 256), (3, 193, 40, 104, 200), (1, 1, 16, 64, 32), (500, 65, 56, 72, 96),
    (40, 190, 8, 256, 224),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("size", MANY)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_of_cuda_is_right_each_time(size: tuple[int, ...], dtype: torch.dtype) -> None:
    """At rows with gaps, with what is not finite, and in equal bits."""
    from lokakern.kernels.cuda import added_products as cuda

    batch, m, k, r, n = size
    torch.manual_seed(0)
    a = torch.randn(batch, m, k + 8, device="cuda").to(dtype)[:, :, :k]
    b, x = (torch.randn(batch, rows + 1, n, device="cuda").to(dtype)[:, 1:] for rows in (k, r))
    w = torch.randn(r, m, device="cuda").to(dtype).t()
    a[0, 0, 0], x[-1, -1, -1] = torch.nan, torch.inf
    if not cuda.takes(a, b, w, x):
        pytest.skip("another GPU")
    first = cuda.added_products(a, b, w, x)
    for some in range(0, batch, 100):
        at = slice(some, some + 100)
        expected = a[at].double() @ b[at].double() + w.double() @ x[at].double()
        finite = expected.isfinite()
        assert torch.equal(finite, first[at].isfinite())
        error = (first[at].double() - expected)[finite].abs()
        bound = (a[at].double().abs() @ b[at].double().abs()
                 + w.double().abs() @ x[at].double().abs())[finite]  # fmt: skip
        step = 2.0**-8 if dtype is torch.bfloat16 else 2.0**-11
        assert (error <= step * expected[finite].abs() + 2.0**-18 * bound).all()
    for weight in (w, w.contiguous()) * 5:
        again = cuda.added_products(a, b, weight, x)
        assert torch.equal(again.view(torch.int16), first.view(torch.int16))
