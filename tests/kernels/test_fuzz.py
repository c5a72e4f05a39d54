"""Scaled GEMMs of random sizes, layouts, values and epilogues.

A few seeds of each kernel; LOKAKERN_FUZZ=1000 tries as many. A failure names its seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lokakern import numerics
from lokakern.device import current_device
from lokakern.errors import UnsupportedError
from lokakern.functional.run import run
from lokakern.quantized_tensor import pitch_of
from lokakern.registry import ops
from lokakern.registry.register import (
    KERNELS,
    PROMOTED_KERNEL_ERR_BOUND,
    Kernel,
    fp8_format,
    load_kernels,
)
from lokakern.types import Epilogue, Format, Granularity, QuantizedTensor, empty_data

load_kernels()
SEEDS = tuple(range(int(os.environ.get("LOKAKERN_FUZZ", "25"))))
FEW = 8  # where it is slow
NAMES = sorted(
    name for name, kernel in KERNELS.items() if kernel.op == "scaled_gemm" and not kernel.libraries
)
EDGES = (1, 2, 7, 8, 13, 16, 31, 39, 63, 64, 65, 100, 127, 128, 129, 160, 192, 255, 256, 257, 384)


def cases() -> Iterator[Any]:
    for name in NAMES:
        if KERNELS[name].architectures == {"any"}:
            yield pytest.param(name, "cpu", id=f"{name}-cpu")
        yield pytest.param(name, "cuda", id=f"{name}-cuda", marks=pytest.mark.gpu)


class Draw:
    """One random call of a kernel, and what it must write."""

    def __init__(self, kernel: Kernel, where: str, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.kernel, self.where = kernel, where
        torch.manual_seed(seed)
        groups = int(self.rng.integers(2, 6)) if kernel.batched and self.chance(0.3) else 1
        many = 4000 if where == "cuda" else 300
        self.n, self.k = self.size(1200), self.size(1500)
        shape = self.rng.choice(["any", "long", "tall"], p=[0.7, 0.15, 0.15])
        if shape == "long":
            many, self.n, self.k = 40, self.size(100), int(self.rng.integers(1500, 20001))
        elif shape == "tall":
            self.n, self.k = (int(size) for size in self.rng.integers(1, 65, 2))
        if kernel.b_granularity is Granularity.BLOCK and self.chance(0.5):  # what libraries take
            self.n, self.k = -(-self.n // 128) * 128, -(-self.k // 128) * 128
        elif self.chance(0.3):
            self.n, self.k = -(-self.n // 16) * 16, -(-self.k // 16) * 16
        m = self.size(many)
        if shape == "tall":
            m = int(self.rng.integers(many, 200_001 if where == "cuda" else 20_001))
        offsets = None
        if groups > 1 and self.chance(0.5):
            m *= groups
            ends = np.sort(self.rng.integers(0, m + 1, groups + 1)).astype(np.int32)
            offsets = torch.from_numpy(ends).to(where)
        elif groups > 1:
            m = groups * max(1, m // groups)
        self.m, self.groups, self.offsets = m, groups, offsets
        four = fp8_format(current_device(where))
        five = Format.E5M2FNUZ if four is Format.E4M3FNUZ else Format.E5M2
        forms = [(four, four), (four, four), (five, four), (four, five)]
        self.forms = forms[self.rng.integers(len(forms))]

    def chance(self, share: float) -> bool:
        return bool(self.rng.random() < share)

    def size(self, most: int) -> int:
        if self.chance(0.6):
            return int(self.rng.choice(EDGES))
        return int(self.rng.integers(1, most))

    def values(self, rows: int, columns: int) -> Tensor:
        """Zeros, and now and then something that is not finite.

        Rows of very different sizes, or products where activations differ.
        """
        x = torch.randn(rows, columns, device=self.where)
        if self.chance(0.5):
            x *= torch.exp2(torch.randint(-12, 12, (rows, 1), device=self.where))
        else:
            x *= 2 * self.k**-0.25
        if self.chance(0.3):
            x *= torch.rand(rows, columns, device=self.where) < 0.1
        if self.chance(0.2):
            x[self.rng.integers(rows), self.rng.integers(columns)] = float(
                self.rng.choice([np.nan, np.inf, -np.inf])
            )
        return x

    def quantized(self, x: Tensor, form: Format, granularity: Granularity) -> QuantizedTensor:
        q = numerics.quantize(x, form, granularity)
        data = q.data.contiguous() if self.chance(0.1) else self.in_nan(q.data, form)
        return QuantizedTensor(data, q.scale, granularity)

    def in_nan(self, x: Tensor, form: Format) -> Tensor:
        """A copy with NaN between its rows, which no kernel may read."""
        rows, columns = x.shape
        whole = torch.full((rows, pitch_of(columns)), form.nan_byte, dtype=torch.uint8)
        data = whole.to(x.device)[:, :columns]
        data.copy_(x.contiguous().view(torch.uint8))
        return data.view(form.dtype)

    def left(self) -> list[QuantizedTensor]:
        by_group = self.kernel.granularity is Granularity.GROUP
        if not (self.kernel.k_slices and self.k > 128 and self.chance(0.3)):
            x = self.values(self.m, self.k)
            return [self.quantized(x, self.forms[0], self.kernel.granularity)]
        cut = 128 * int(self.rng.integers(1, -(-self.k // 128)))
        parts = (cut, self.k - cut)
        if by_group:
            return [
                self.quantized(self.values(self.m, k), self.forms[0], Granularity.GROUP)
                for k in parts
            ]
        q = numerics.quantize(self.values(self.m, self.k), self.forms[0], self.kernel.granularity)
        slices = q.data.split(parts, dim=1)
        return [QuantizedTensor(self.in_nan(x, q.format), q.scale, q.granularity) for x in slices]

    def wide(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """``[m, n]``, and what it is a slice of."""
        before, after = (int(self.rng.choice([0, 1, 8, 16])) for _ in range(2))
        if self.chance(0.5):
            before = after = 0
        whole = torch.randn(self.m, before + self.n + after, device=self.where).to(dtype)
        return whole[:, before : before + self.n], whole

    def run(self) -> str | None:
        """Run the kernel and describe its fault: "" for none, None if it rejects the problem."""
        kernel, where = self.kernel, self.where
        a = self.left()
        weight = self.values(self.groups * self.n, self.k)
        b = self.quantized(weight, self.forms[1], kernel.b_granularity).t()
        last = str(self.rng.choice(sorted({e.split("+")[-1] for e in kernel.epilogues} - {"bias"})))
        kinds = [
            torch.bfloat16,
            torch.bfloat16,
            torch.float32,
            fp8_format(current_device(where)).dtype,
        ]
        dtype = kinds[self.rng.integers(4)]
        accumulate = kernel.accumulates and dtype is torch.float32 and self.chance(0.7)
        small = dtype.itemsize == 1
        bias = None
        if self.chance(0.5):
            bias = torch.randn(self.n, device=where).to(torch.bfloat16 if small else dtype)
        cross = None
        if last == "cross":
            cross, last = (self.wide(torch.bfloat16)[0], self.wide(torch.bfloat16)[0]), "none"
        if small:
            out = whole = empty_data(self.m, self.n, dtype, torch.device(where))
            out.view(torch.uint8).fill_(0x15)
        else:
            out, whole = self.wide(dtype)
        held = whole.clone()
        before = out.clone()
        out_scale = float(self.rng.choice([1e-4, 0.3, 50.0])) if small else None
        options: dict[str, Any] = {"bias": bias, "activation": last, "cross": cross}
        options |= {"out_scale": out_scale, "accumulate": accumulate, "offsets": self.offsets}
        if self.offsets is None:
            options["groups"] = self.groups
        try:
            run(
                kernel,
                a if len(a) > 1 else a[0],
                b,
                out=out,
                out_format=Format.of(dtype),
                **options,
            )
        except UnsupportedError as refused:
            return None if len(str(refused)) > 20 else f"refused without a reason: {refused}"
        x0, x = cross or (None, None)
        epilogue = Epilogue(last, x0, x, None, accumulate, self.groups, self.offsets)
        sums = ops.scaled_sums(a, b, epilogue)
        exact, size = ops.finished(*sums, bias, epilogue, before if accumulate else None)
        inside = slice(0, self.m)
        if self.offsets is not None:
            inside = slice(int(self.offsets[0]), int(self.offsets[-1]))
        # The kernel's bound is of its sums: the output is rounded once, whatever the kernel.
        size, roundoff = kernel.kernel_err_bound * size, Format.of(dtype).unit_roundoff
        error = numerics.kernel_error(out[inside], exact[inside], size[inside], roundoff, out_scale)
        if error.maximum > 1 + roundoff:
            return f"{error.maximum:.3g} times what is allowed"
        written = torch.zeros_like(whole, dtype=torch.bool)
        first = (out.data_ptr() - whole.data_ptr()) // out.element_size()
        written[inside, first : first + self.n] = True
        same = whole.contiguous().view(torch.uint8) == held.contiguous().view(torch.uint8)
        same = same.view(self.m, -1, dtype.itemsize).all(-1)
        return "" if bool((same | written).all()) else "wrote where it must not"

    def __str__(self) -> str:
        jagged = "" if self.offsets is None else f" offsets={self.offsets.tolist()}"
        forms = " x ".join(form.value for form in self.forms)
        return f"m={self.m} n={self.n} k={self.k} groups={self.groups}{jagged} {forms}"


@pytest.mark.parametrize(("name", "where"), list(cases()))
def test_random_scaled_gemms(name: str, where: str) -> None:
    kernel = KERNELS[name]
    if not kernel.runs_on(current_device(where)):
        pytest.skip(f"needs a GPU of {', '.join(sorted(kernel.architectures))}")
    taken = 0
    for seed in SEEDS[:FEW] if where == "cpu" and "LOKAKERN_FUZZ" not in os.environ else SEEDS:
        draw = Draw(kernel, where, seed)
        wrong = draw.run()
        taken += wrong is not None
        assert not wrong, f"{name}, seed {seed}: {draw}: {wrong}"
    if kernel.epilogues > {"none", "bias"}:
        assert taken


def test_slightly_too_large_errors_are_found() -> None:
    """The bound of kernels on tensor cores finds errors of 5 %."""
    right = KERNELS["torch.emulated_row"]

    def launch(*given: Any) -> None:
        right.launch(*given)
        out = given[4]
        larger = 1.05 * out.float()
        if out.dtype.itemsize == 1:
            numerics.cast(larger, out)
        else:
            out.copy_(larger)

    wrong = replace(right, launch=launch, kernel_err_bound=PROMOTED_KERNEL_ERR_BOUND)
    found = [Draw(wrong, "cpu", seed).run() for seed in range(12)]
    assert sum("times what is allowed" in (words or "") for words in found) >= 10, found


def test_random_sizes_include_long_sums_and_many_rows() -> None:
    drawn = [Draw(KERNELS["torch.emulated_row"], "cpu", seed) for seed in range(100)]
    assert sum(draw.k > 5000 for draw in drawn) >= 5
    assert sum(draw.m > 5000 for draw in drawn) >= 5
