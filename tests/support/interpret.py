"""Run Triton kernels interpreted: ``python tests/support/interpret.py triton.NAME ...``.

Run by test_triton_interpreted.py in a process of its own: what `triton.jit` makes under
TRITON_INTERPRET=1 cannot be compiled. Prints a line per failure and exits with 1 if there is any.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Iterator

os.environ["TRITON_INTERPRET"] = "1"

import interpret_norm
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.registry import ops
from lokakern.registry.register import Kernel, kernel_named
from lokakern.triton_interpreter import make_exact
from lokakern.types import Format, Granularity, empty_data

FP8 = (Format.E4M3FN, Format.E5M2, Format.E4M3FNUZ, Format.E5M2FNUZ)
DTYPES = (torch.bfloat16, torch.float32, torch.float16)
SIZES = ((1, 1), (3, 129), (130, 257))
# More sizes, each in one format and dtype: tails of blocks, of groups and of 16 bytes.
OTHERS = ((2, 64), (1, 128), (7, 31), (33, 40), (4, 256), (129, 5), (17, 130), (5, 127), (64, 16))
LONG = (5, 9000)  # rows that do not fit registers; slow here, so in one format only
# m, n, k: single rows, tails on every axis, all tiles of the rule, several tiles a program.
SHAPES = (
    (1, 8, 13), (3, 24, 128), (65, 130, 200), (130, 257, 384), (1, 130, 128),
    (2, 16, 160),
    (300, 40, 33), (600, 60, 144), (260, 260, 129), (600, 300, 64), (5, 7, 1), (140, 64, 256),
)  # fmt: skip


def quantizer_cases() -> list[tuple[Format, torch.dtype, tuple[int, int]]]:
    """Twelve sizes, three of them in every format and from every dtype."""
    every = list(itertools.product(FP8, DTYPES))
    few = [(*kind, size) for kind, size in zip(itertools.cycle(every), OTHERS, strict=False)]
    return [*itertools.product(FP8, DTYPES, SIZES), *few]


def hard_values(rows: int, columns: int, dtype: torch.dtype, form: Format, seed: int) -> Tensor:
    """Rows in turn: normal, zero, tiny, huge, subnormal, at the midpoints of the format, wide."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    every = torch.arange(256, dtype=torch.uint8).view(form.dtype).double()
    steps = every[torch.isfinite(every)].unique()
    middles = (steps[1:] + steps[:-1]) / 2
    picked = middles[torch.randint(len(middles), (rows, columns), generator=generator)]
    picked[:, 0] = form.maximum  # makes the scale of the row 1, so the midpoints stay midpoints
    kind = (torch.arange(rows) % 8)[:, None]
    x = torch.where(kind == 1, 0.0, x)
    x = torch.where(kind == 2, x * 1e-38, x)
    x = torch.where(kind == 3, (x * 1e38).clamp(-3e38, 3e38), x)
    x = torch.where(kind == 4, x * 1e-41, x)
    x = torch.where(kind == 5, picked, x)
    x = torch.where(kind == 6, x * torch.exp(4 * torch.randn(x.shape, generator=generator)), x)
    x = torch.where(kind == 7, picked * 2.0**-120, x)
    if rows > 1:
        chance = torch.rand(x.shape, generator=generator)
        for value, low in ((float("nan"), 0.0), (float("inf"), 0.01), (-float("inf"), 0.02)):
            x = torch.where((chance >= low) & (chance < low + 0.01), value, x)
        x = torch.where((chance > 0.95) & (chance < 0.96), -0.0, x)
    return x.to(dtype)


def poisoned_scale(granularity: Granularity, rows: int, columns: int) -> Tensor:
    scale = granularity.empty_scale(rows, columns, torch.device("cpu"))
    return scale.fill_(float("nan"))


def check_quantize(kernel: Kernel) -> Iterator[str]:
    seeds = itertools.count()
    cases = [*quantizer_cases(), (FP8[0], DTYPES[0], LONG)]
    for form, dtype, (rows, columns) in cases:
        for only_normal in (False, True):
            x = hard_values(rows, columns, dtype, form, next(seeds))
            if only_normal:  # a tensor's scale is decided by its largest row
                x = torch.randn(rows, columns).to(dtype)
            wide = torch.full((rows, columns + 7), float("nan"), dtype=dtype)
            wide[:, 3 : 3 + columns] = x
            for view in (x,) if only_normal else (x, wide[:, 3 : 3 + columns]):
                expected = numerics.quantize(view, form, kernel.granularity)
                data = empty_data(rows, columns, form.dtype, x.device)
                data.view(torch.uint8).fill_(0xAA)
                scale = poisoned_scale(kernel.granularity, rows, columns)
                kernel.launch(view, data, scale, kernel.workspace(view, data, scale))
                got, want = data.view(torch.uint8), expected.data.view(torch.uint8)
                case = f"{form.value} from {dtype} [{rows}, {columns}] stride {view.stride(0)}"
                if not torch.equal(scale, expected.scale):
                    at = (scale != expected.scale).nonzero()[0].tolist()
                    yield f"{case}: scale{at} {scale[tuple(at)]} != {expected.scale[tuple(at)]}"
                if not torch.equal(got, want):
                    wrong = (got != want).nonzero()
                    at = tuple(wrong[0].tolist())
                    yield (
                        f"{case}: {len(wrong)} bytes differ, first at {at}: x = {view[at]!r} "
                        f"became {int(got[at]):#04x}, not {int(want[at]):#04x}"
                    )


def check_dequantize(kernel: Kernel) -> Iterator[str]:
    for form, dtype, (rows, columns) in quantizer_cases():
        x = hard_values(rows, columns, torch.float32, form, rows)
        q = numerics.quantize(x, form, kernel.granularity)
        expected = numerics.dequantize(q, dtype)
        for padding in (0, 5):
            whole = torch.full((rows, columns + padding), 77.0, dtype=dtype)
            out = whole[:, :columns]
            kernel.launch(q.data, q.scale, out, ())
            case = f"{form.value} to {dtype} [{rows}, {columns}] padding {padding}"
            if not torch.equal(out.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)):
                yield f"{case}: {int((out != expected).sum())} elements differ"
            if not bool((whole[:, columns:] == 77.0).all()):
                yield f"{case}: wrote past the end of a row"


def check_scaled_gemm(kernel: Kernel) -> Iterator[str]:
    pairs = [(f, f) for f in (Format.E4M3FN, Format.E4M3FNUZ)]
    pairs += [(Format.E5M2, Format.E4M3FN), (Format.E4M3FN, Format.E5M2)]
    cases = itertools.product(SHAPES, (False, True))
    for index, ((m, n, k), with_bias) in enumerate(cases):
        dtype = DTYPES[index // 3 % 3]
        a_form, b_form = pairs[index % len(pairs)]
        generator = torch.Generator().manual_seed(index)
        # Rows and columns of very different sizes: a scale at the wrong place shows.
        x = torch.randn(m, k, generator=generator) * torch.exp2(
            torch.randint(-9, 9, (m, 1), generator=generator)
        )
        w = torch.randn(n, k, generator=generator) * torch.exp2(
            torch.randint(-9, 9, (n, 1), generator=generator)
        )
        if dtype is torch.float16:  # no overflow
            x *= 2.0**-12
        spoiled = m // 2 if m > 2 else None
        if spoiled is not None:
            x[spoiled, k // 3] = float("nan")
        a = numerics.quantize(x, a_form, kernel.granularity)
        b = numerics.quantize(w, b_form, kernel.b_granularity)
        bias = torch.randn(n, generator=generator).to(dtype) if with_bias else None
        padding = 9 if index % 3 == 0 else 0
        whole = torch.full((m, n + padding), float("nan"), dtype=dtype)
        out = whole[:, :n]
        kernel.launch(a.data, a.scale, *b.transpose, out, bias, ())
        exact, magnitude = ops.product(a, b.t(), bias), ops.magnitude(a, b.t(), bias)
        roundoff = Format.of(dtype).unit_roundoff
        error = numerics.kernel_error(out, exact, magnitude, roundoff)
        case = f"m={m} n={n} k={k} {a_form.value} x {b_form.value} -> {dtype} bias={with_bias}"
        # No tensor core here: float32 sums, so every kernel meets the accurate bound.
        if error.maximum > 1.0:
            relative = ((out.double() - exact).abs() / magnitude).nan_to_num(posinf=1e300)
            at = divmod(int(relative.argmax()), n)
            yield (
                f"{case}: kernel_error {error.maximum:.3g} > 1, worst at {at}: "
                f"{float(out[at])} for {float(exact[at])}"
            )
        finite = torch.isfinite(out).all(dim=1)
        if spoiled is not None and (bool(finite[spoiled]) or int((~finite).sum()) != 1):
            yield f"{case}: rows that are not finite {(~finite).nonzero().flatten().tolist()}"
        if padding and not bool(torch.isnan(whole[:, n:]).all()):
            yield f"{case}: wrote past the end of a row"


CHECKS: dict[str, Callable[[Kernel], Iterator[str]]] = {
    "quantize": check_quantize,
    "dequantize": check_dequantize,
    "scaled_gemm": check_scaled_gemm,
    "gemm_norm": interpret_norm.check_gemm_norm,
    "norm_quantize": interpret_norm.check_norm_quantize,
}


def main(names: list[str]) -> int:
    make_exact()
    found = 0
    for name in names:
        kernel = kernel_named(name)
        failures = list(CHECKS[kernel.op](kernel))
        for failure in failures[:40]:
            print(f"{name}: {failure}")
        print(f"{name}: {len(failures)} failures")
        found += len(failures)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
