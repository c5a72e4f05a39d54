"""Samples of a watch by its kernel are those of torch: on the CPU, compiled, and on a GPU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lokakern import nvrtc
from lokakern.kernels.cuda import window_samples as kernel
from lokakern.probe import sample_kernel
from lokakern.probe.hooks import GOLDEN, SAMPLED_ROWS
from lokakern.probe.statistics import coprime_from
from lokakern.probe.windows import ELEMENTS, LEAST_SIZE, MOST_ELEMENTS
from tests.support import native, window_kernel
from tests.support.disassembly import disassembled
from tests.support.register_use import registers
from tests.support.sharing import shared_folder

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Whole tiles and parts of them, rows of 16 bytes and others, fewer rows than are kept; and none
# beside a row, or a column.
SIZES = ((1, 1), (5, 8), (128, 256), (129, 264), (300, 39), (1000, 513), (257, 1), (1, 700))
EPSILON = 2.0**-53


def hostile(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Numbers of all sizes, subnormal ones, zeros, infinities and NaNs."""
    generator = torch.Generator().manual_seed(rows + 7 * columns)
    x = torch.randn(rows, columns, generator=generator)
    low, high = (-7, 4) if dtype is torch.float16 else (-40, 30)
    x *= torch.logspace(low, high, rows)[torch.randperm(rows, generator=generator), None]
    if rows > 8:
        x[1] = 0.0
        x[2] = -0.0
        x[4, -1], x[5, columns // 2], x[6, 0] = math.inf, -math.inf, math.nan
    return x.to(dtype)


def places_of(rows: int, step: int = 1) -> tuple[int, int, int, int, int]:
    """As of `Sample.places_of`, of a step that begins in the middle."""
    kept = min(SAMPLED_ROWS, rows)
    first, stride = 0, 1
    if kept < rows:
        first, stride = rows // 2, coprime_from(int(GOLDEN * rows), rows)
    return step // 2, step, first, stride, kept


def check_sample(found: list[Tensor], x: Tensor, places: tuple[int, ...]) -> None:
    """Bits are those of torch; of a NaN any."""
    first, step, kept_first, stride, kept = places
    rows = x.reshape(-1, x.shape[-1])
    index = (kept_first + stride * torch.arange(kept, device=x.device)) % len(rows)
    part = rows[first::step]
    expected = [torch.linalg.vector_norm(part, math.inf, dim=d).float() for d in (1, 0)]
    row_sizes, column_sizes, taken = found
    for sizes, exact in zip((row_sizes, column_sizes), expected, strict=True):
        torch.testing.assert_close(sizes, exact, rtol=0, atol=0, equal_nan=True)
    assert taken.dtype is x.dtype
    torch.testing.assert_close(taken, rows[index], rtol=0, atol=0, equal_nan=True)
    is_zero = taken == 0
    assert torch.equal(taken.signbit()[is_zero], rows[index].signbit()[is_zero])


@pytest.fixture
def launched() -> Iterator[window_kernel.Launches]:
    with native.in_use(), window_kernel.on_host() as found:
        yield found


def poison(device: str = "cpu") -> None:
    """Leave memory full of NaN to the next allocations."""
    for size in (1 << 12, 1 << 16, 1 << 20, 1 << 22):
        torch.empty(size, device=device).fill_(math.nan)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.sample(every=2)
def test_samples_are_those_of_torch(dtype: torch.dtype, launched: window_kernel.Launches) -> None:
    matrices = [hostile(rows, columns, dtype) for rows, columns in SIZES]
    matrices += [hostile(60, 33, dtype).view(4, 15, 33), hostile(61, 40, dtype)[1:]]
    rows = [x.numel() // x.shape[-1] for x in matrices]
    places = [places_of(count, 3 if count > 100 else 1) for count in rows]
    poison()
    found = native.library().take_pass(matrices, places, ELEMENTS)
    assert len(launched.blocks) == len(launched.cleared) == 1, "one launch for all of them"
    for place, x in enumerate(matrices):
        check_sample(found.tensors(place), x, places[place])


def test_matrices_of_all_dtypes_may_be_more_than_a_launch_takes(
    launched: window_kernel.Launches,
) -> None:
    count = 2 * kernel.MOST_MATRICES + 1
    matrices = [hostile(9 + i, 1 + i, DTYPES[i % 3]) for i in range(count)]
    places = [places_of(len(x)) for x in matrices]
    found = native.library().take_pass(matrices, places, ELEMENTS)
    assert len(launched.blocks) == 3 and len(launched.cleared) == 1
    for place, x in enumerate(matrices):
        check_sample(found.tensors(place), x, places[place])


def test_what_the_kernel_does_not_take_is_left_to_torch(launched: window_kernel.Launches) -> None:
    take, x = native.library().take_pass, torch.randn(20, 16)
    places = places_of(20)
    other = [x.double(), x.t(), x[:0], torch.empty(20, 16, device="meta"), torch._neg_view(x)]
    for one in other:
        assert take([x, one], [places, places], ELEMENTS) is None
    assert take([x], [(0, 1, 0, 1, kernel.MOST_KEPT + 1)], ELEMENTS) is None
    assert take([], [], ELEMENTS) is None
    with TorchDispatchMode():
        assert take([x], [places], ELEMENTS) is None
    assert not launched.blocks


@pytest.mark.usefixtures("launched")
def test_sizes_of_weights_are_those_of_torch() -> None:
    weights = [hostile(rows, columns, torch.bfloat16) for rows, columns in SIZES]
    for x, (rows, columns) in zip(weights, native.library().sizes_of(weights), strict=True):
        check_sample([rows, columns, x[:0]], x, (0, 1, 0, 1, 0))


def test_after_a_failed_launch_torch_takes_samples(launched: window_kernel.Launches) -> None:
    """Also those of weights, at the end of a step; and the kernel is launched no more."""
    library, x = native.library(), torch.randn(4, 4)
    assert library.take_pass([x], [places_of(4)], ELEMENTS) is not None
    launched.failure = 701
    with pytest.warns(UserWarning, match="from now on; taking them: error 701"):
        ((rows, columns),) = library.sizes_of([x])
    assert torch.equal(rows, x.abs().amax(1).to(rows.dtype))
    assert torch.equal(columns, x.abs().amax(0).to(columns.dtype))
    launched.failure = 0
    assert library.take_pass([x], [places_of(4)], ELEMENTS) is None
    assert library.window_kernel_failure(-1) == "taking them: error 701"


def numbers(matrices: list[Tensor], limits: tuple[float, ...]) -> tuple[Tensor, Tensor]:
    """Numbers of a window of matrices, by the kernel and by torch."""
    library = native.library()
    places = [places_of(len(x)) for x in matrices]
    by = library.take_pass(matrices, places, ELEMENTS)
    assert by is not None
    in_pass = [(by, place) for place in range(len(matrices))]
    by_launch = library.window_numbers([[] for _ in matrices], in_pass, [], *limits)
    tensors = [by.tensors(place) for place in range(len(matrices))]
    by_torch = library.window_numbers(tensors, [(None, 0)] * len(matrices), [], *limits)
    if matrices[0].is_cuda:
        torch.cuda.synchronize()
    return tuple(torch.from_numpy(x.compute(0)) for x in (by_launch, by_torch))  # type: ignore[return-value]


def check_numbers(device: str) -> None:
    """All but means are equal to the bit.

    Deviations and means are those of float64, rounded to float32. The kernel adds two times 256
    numbers, torch's algorithm has as many steps, so each is off by at most 512 roundings of float64
    at the size of the numbers added, far below the one of float32 of what is larger by 2^-29. With
    that one, which squares double, the number, half the binary logarithm of a ratio of sums of
    squares, differs by at most 4 x 2^-24 / ln 2.
    """
    matrices = [hostile(400, c, DTYPES[c % 3]) for c in (1, 39, 264, 700)]
    matrices += [torch.randn(400, 200).bfloat16() + 3.0, torch.randn(3, 50), torch.zeros(90, 8)]
    matrices = [x.to(device) for x in matrices]
    limits = (ELEMENTS, MOST_ELEMENTS, 10.0, 0.01, LEAST_SIZE, 1e-12)
    found, expected = numbers(matrices, limits)
    count = len(matrices)
    # In this order, with no weights: spreads of rows, columns, elements; shares; means; the rest.
    is_mean = torch.zeros(len(found), dtype=torch.bool)
    is_mean[4 * count : 5 * count] = True
    assert torch.equal(found[~is_mean], expected[~is_mean])
    torch.testing.assert_close(found[is_mean], expected[is_mean], rtol=0, atol=4 * 2**-24 * 1.5)
    assert float(expected[is_mean].max()) > 1.0


@pytest.mark.usefixtures("launched")
def test_numbers_are_those_of_torch() -> None:
    check_numbers("cpu")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.usefixtures("launched")
def test_deviations_and_means_are_those_of_float64(dtype: torch.dtype) -> None:
    """Of columns whose means are far larger than their deviations, too."""
    x = torch.randn(SAMPLED_ROWS, 70) + torch.linspace(-9, 9, 70).sinh()
    x = x.to(dtype)
    by = native.library().take_pass([x], [places_of(len(x))], ELEMENTS)
    values = by.values()[SAMPLED_ROWS + 70 :].double()
    elements = values[: -2 * 70]
    deviations, means = values[-2 * 70 : -70], values[-70:]
    step = coprime_from(-(-x.numel() // ELEMENTS), 70)
    assert torch.equal(elements, x.flatten()[::step].double())
    exact = x.double()
    mean = exact.mean(0)
    deviation = (exact - mean).square().mean(0).sqrt()
    slack = 2 * SAMPLED_ROWS * EPSILON * exact.abs().amax(0)
    assert bool(((means - mean).abs() <= 2.0**-24 * mean.abs() + slack).all())
    assert bool(((deviations - deviation).abs() <= 2.0**-24 * deviation + slack).all())


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100", "sm_120"])
def test_it_compiles_without_spills(architecture: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On sm_90 two blocks of 256 threads fit into an SM, and whole rows come 16 bytes at once."""
    monkeypatch.setenv("LOKAKERN_CACHE", str(shared_folder("compiled")))
    code = nvrtc.cubin(kernel.program(), architecture)
    used, spilled = registers(code)
    assert spilled == 0 and used <= 128
    if architecture == "sm_90":
        (text,) = disassembled([code])
        words = re.findall(r"\b(LDG\S*|RED\S*)", text)
        assert sum(word.endswith(".128") for word in words) >= 8
        assert any("MAX" in word for word in words)


def test_other_devices_are_left_to_torch() -> None:
    found = sample_kernel.SampleKernel([torch.device("cpu")])
    found.compile()
    found.load()
    assert (found.status(), found.reasons) == ("not loaded", {})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_samples_on_a_gpu_are_those_of_torch(dtype: torch.dtype) -> None:
    with native.in_use() as library:
        loaded = sample_kernel.SampleKernel([torch.device("cuda", 0)])
        loaded.compile()
        loaded.load()
        assert loaded.status() == "loaded"
        sizes = (*SIZES, (8192, 3456), (8192, 512))
        matrices = [hostile(rows, columns, dtype).cuda() for rows, columns in sizes]
        places = [places_of(len(x), 3 if len(x) > 100 else 1) for x in matrices]
        poison("cuda")
        found = library.take_pass(matrices, places, ELEMENTS)
        for place, x in enumerate(matrices):
            check_sample(found.tensors(place), x, places[place])
        weights = library.sizes_of(matrices)
        for x, (rows, columns) in zip(matrices, weights, strict=True):
            check_sample([rows, columns, x[:0]], x, (0, 1, 0, 1, 0))
        check_numbers("cuda")
