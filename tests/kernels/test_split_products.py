"""Products whose parts of k go through memory: on the CPU with made-up parts, and on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lokakern import jit, numerics, nvrtc
from lokakern.device import current_device
from lokakern.formats import Format
from lokakern.kernels.cuda import scaled_gemm
from lokakern.kernels.cuda import scaled_gemm_split as kernel
from lokakern.kernels.cuda.scaled_gemm import SCALES
from lokakern.kernels.cuda.tiles import DEPTH, ROWS, Kind
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import Epilogue, Granularity, Operand, QuantizedTensor, Rejected
from tests.support import cuda_host_launch as host
from tests.support.kernel_cases import LONG_SUMS, kernel_here

load_kernels()
H200_SMS = 132
# One tile and several; tails of rows, of columns and of steps; odd columns.
SIZES = ((24, 64, 131088), (1, 8, 1024), (65, 13, 16384), (129, 72, 9984), (300, 520, 5120))
OUTPUTS = (torch.bfloat16, torch.float16, torch.float32)


def operands(
    scales: str, m: int, n: int, k: int, device: str, form: Format = Format.E4M3FN
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """a, and b as `quantize` makes it of a weight ``[n, k]``."""
    generator = torch.Generator(device).manual_seed(m + n)
    made = []
    for rows, granularity in zip((m, n), SCALES[scales], strict=True):
        x = torch.randn(rows, k, device=device, generator=generator)
        x *= torch.logspace(-3, 3, rows, device=device).unsqueeze(1)
        made.append(numerics.quantize(x, form, granularity))
    return made[0], made[1]


def run(
    scales: str,
    a: QuantizedTensor,
    b: QuantizedTensor,
    out: Tensor,
    bias: Tensor | None = None,
    accumulates: bool = False,
) -> None:
    """Launch both, with parts that hold NaN."""
    found = KERNELS[f"cuda.scaled_gemm_{scales}_split"]
    given = (a.data, a.scale, b.data.t(), b.scale.t(), out, bias)
    extra = (Epilogue(accumulate=True),) if accumulates else ()
    workspace = found.workspace(*given, *extra)
    for part in workspace:
        part.fill_(float("nan"))
    found.launch(*given, workspace, *extra)


def error(a: QuantizedTensor, b: QuantizedTensor, out: Tensor, *terms: Tensor | None) -> float:
    """`numerics.kernel_error` of a product and what was added to it."""
    left, right = numerics.dequantize(a).double(), numerics.dequantize(b).double().t()
    exact, size = left @ right, left.abs() @ right.abs()
    for term in terms:
        if term is not None:
            exact, size = exact + term.double(), size + term.double().abs()
    roundoff = torch.finfo(out.dtype).eps / 2
    return numerics.kernel_error(out, exact, size, roundoff).maximum


def test_parts_take_all_sms_and_all_steps() -> None:
    more = ((24, 720, 327680), (256, 512, 115200), (1152, 32, 7344), (64, 64, 2**30 - 16))
    for m, n, k in (*SIZES, *more):
        for scales in SCALES:
            tile = kernel.tile_of(m, n, k, Kind(scales, 4, direct=True), H200_SMS)
            assert tile is not None
            steps, blocks = -(-k // DEPTH), tile.count(m, n) * tile.parts
            assert tile.parts > 1 and blocks <= H200_SMS
            assert blocks > 0.9 * H200_SMS or k < 2**17
            # As first_step and last_step of mainloop.cuh, in an int.
            ends = [steps * part // tile.parts for part in range(tile.parts + 1)]
            lengths = [last - first for first, last in itertools.pairwise(ends)]
            assert sum(lengths) == steps and min(lengths) >= kernel.LEAST_STEPS
            assert steps * tile.parts < 2**31


@pytest.fixture(scope="module")
def folder() -> Path:
    sources = Path(kernel.SOURCE).parent
    headers = {"ptx.cuh": host.HEADER, "half_ptx.cuh": host.HALF_HEADER}
    return host.sources("split_products", {"sum_parts.cu": sources / "sum_parts.cu"} | headers)


bind_sums = kernel.bind_sums  # before it is replaced


def bound_on_host(folder: Path, *arguments: Any) -> host.HostLaunch:
    program = bind_sums(*arguments).program
    threads = kernel.SUM_THREADS
    return host.HostLaunch(folder, program, pointers=2, scalars="ii", threads=threads)


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("bias", [None, *OUTPUTS])
def test_parts_are_added_to_an_output(
    bias: torch.dtype | None, dtype: torch.dtype, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second launch is compiled for the CPU; the first is one that knows the operands."""
    monkeypatch.setattr(kernel, "bind_sums", functools.partial(bound_on_host, folder))
    monkeypatch.setattr(jit, "compute_units", lambda _: H200_SMS)
    monkeypatch.setattr(scaled_gemm, "tensor_map", lambda *_: "a map")

    def first_launch(self: Any, grid: Any, pointers: Any, scalars: Any, maps: Any) -> None:
        assert (len(pointers), len(scalars), len(maps)) == self._parameters
        macros = dict(self.program.macros)
        rows, columns, count = (macros[x] for x in ("WARPGROUPS", "BLOCK_N", "PARTS"))
        assert grid == (-(-m // (ROWS * rows)) * -(-n // columns) * count, 1, 1)
        assert (*scalars, macros["N"], macros["K"]) == (m, n, k)
        (a_scale, b_scale, parts), terms = pointers[:3], pointers[3:]
        assert macros["BIAS"] == {None: 0, OUTPUTS[0]: 2, OUTPUTS[1]: 1, OUTPUTS[2]: 4}[bias]
        assert (a_scale.data_ptr(), b_scale.data_ptr()) == (a.scale.data_ptr(), b.scale.data_ptr())
        steps = -(-k // DEPTH)
        left, right = numerics.dequantize(a).double(), numerics.dequantize(b).double()
        for part in range(count):
            at = slice(steps * part // count * DEPTH, steps * (part + 1) // count * DEPTH)
            total = left[:, at] @ right[:, at].t()
            for term in () if part else terms:
                total += term.double()
            parts[part] = total.flatten().float()

    monkeypatch.setattr(kernel.CudaLaunch, "__call__", first_launch)
    for m, n, k in ((24, 64, 6160), (65, 13, 4096), (1, 8, 1024), (3, 5, 40000), (130, 264, 2048)):
        a, b = operands("row", m, n, k, "cpu")
        vector = None if bias is None else torch.randn(n).to(bias)
        for accumulates in (False, True)[: 1 + (dtype is torch.float32)]:
            out = torch.randn(m * n + n % 2).to(dtype)[n % 2 :].view(m, n)  # starts anywhere
            before = out.clone() if accumulates else None
            run("row", a, b, out, vector, accumulates)
            assert error(a, b, out, vector, before) <= 1


def test_what_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "why_not", lambda _: None)
    device = dataclasses.replace(current_device(), vendor="nvidia", architecture="sm_90")
    found = KERNELS["cuda.scaled_gemm_row_split"]
    row = Operand(Format.E4M3FN, Granularity.ROW)

    def why(shape: tuple[int, int, int], **more: Any) -> str | None:
        answer = found.supports(make_problem("scaled_gemm", shape, a=row, **more), device)
        return answer.reason if isinstance(answer, Rejected) else None

    assert why((24, 64, 1310720)) is None
    assert why((24, 64, 1310720), out_format=Format.FLOAT16) is None
    assert why((64, 64, 2048)) is None and why((512, 512, 16384)) is None
    assert "from k=2048 on" in str(why((24, 64, 2032)))
    assert "from k=16384 on" in str(why((512, 512, 16368)))
    assert "from k=104858 on" in str(why((8192, 2048, 2048)))
    assert "too many tiles" in str(why((8192, 2048, 2**18)))
    assert "less than 2^30" in str(why((24, 64, 2**30)))
    assert "writes bfloat16 or float32" in str(why((24, 64, 8192), out_format=Format.E4M3FN))


def on_gpu() -> list[Any]:
    return [pytest.param(name, id=name, marks=pytest.mark.gpu) for name in LONG_SUMS]


@pytest.mark.parametrize("dtype", OUTPUTS)
@pytest.mark.parametrize("name", on_gpu())
def test_every_size(name: str, dtype: torch.dtype) -> None:
    scales = kernel_here(name, "cuda").name.split("_")[2]
    for m, n, k in SIZES:
        a, b = operands(scales, m, n, k, "cuda", Format.E5M2 if n % 8 else Format.E4M3FN)
        for bias in (None, *OUTPUTS):
            vector = None if bias is None else torch.randn(n, device="cuda").to(bias)
            for accumulates in (False, True)[: 1 + (dtype is torch.float32)]:
                before = torch.randn(m, n, device="cuda").to(dtype)
                out = before.clone() if accumulates else torch.full_like(before, float("nan"))
                run(scales, a, b, out, vector, accumulates)
                found = error(a, b, out, vector, before if accumulates else None)
                assert found <= KERNELS[name].kernel_err_bound, (m, n, k, bias, accumulates)


@pytest.mark.parametrize("name", on_gpu())
def test_nan_stays_in_its_row_and_its_column(name: str) -> None:
    scales, (m, n, k) = kernel_here(name, "cuda").name.split("_")[2], (129, 72, 9984)
    a, b = operands(scales, m, n, k, "cuda")
    a.data.view(torch.uint8)[3, 5000] = 0x7F
    b.data.view(torch.uint8)[7, 9000] = 0x7F
    out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
    run(scales, a, b, out)
    expected = torch.zeros(m, n, dtype=torch.bool, device="cuda")
    expected[3], expected[:, 7] = True, True
    assert torch.equal(out.isnan(), expected)


@pytest.mark.parametrize("name", on_gpu())
def test_calls_one_after_the_other_and_in_a_graph_are_the_same(name: str) -> None:
    """Bits do not depend on which block is first, and launches do not overtake each other."""
    scales, (m, n, k) = kernel_here(name, "cuda").name.split("_")[2], (24, 64, 131072)
    pairs = [operands(scales, m + i, n, k, "cuda") for i in range(4)]
    outs = [torch.empty(m + i, n, dtype=torch.bfloat16, device="cuda") for i in range(4)]
    for (a, b), out in zip(pairs, outs, strict=True):
        run(scales, a, b, out)
        torch.cuda.synchronize()
    again = [torch.empty_like(out) for out in outs]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for (a, b), out in zip(pairs, again, strict=True):
            run(scales, a, b, out)
    for _ in range(20):
        for out in again:
            out.fill_(float("nan"))
        graph.replay()
        for out, expected in zip(again, outs, strict=True):
            assert torch.equal(out.view(torch.int16), expected.view(torch.int16))
