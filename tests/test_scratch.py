"""Scratch: launches of a stream share one, and graphs and whoever asks have their own."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern import scratch
from lokakern.kernels.cuda import gemm_norm
from lokakern.norm import norm_named
from lokakern.registry.register import KERNELS, load_kernels
from lokakern.types import (
    Device,
    Format,
    Granularity,
    Layout,
    NormEpilogue,
    Operand,
    Problem,
    Rejected,
)
from tests.support import native

load_kernels()
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)


def test_scratch_is_zeros() -> None:
    found = scratch.zeros(48, torch.device("cpu"))
    assert found.dtype == torch.uint8 and found.tolist() == [0] * 48
    with scratch.owned():
        assert scratch.zeros(16, torch.device("cpu")).numel() == 16


def test_launches_of_one_call_share_scratch() -> None:
    device = torch.device("cpu")
    with scratch.of_one_call():
        first, second, wider = (scratch.zeros(size, device) for size in (32, 16, 64))
        assert first.data_ptr() == second.data_ptr() != wider.data_ptr()
        assert wider.numel() == 64 and scratch.zeros(64, device) is wider
        with scratch.of_one_call():
            assert scratch.zeros(16, device) is not wider
        assert scratch.zeros(16, device) is wider
    with scratch.of_one_call():
        assert scratch.zeros(16, device) is not wider
    assert scratch.zeros(16, device) is not scratch.zeros(16, device)


@pytest.mark.gpu
def test_a_chain_in_a_graph_has_the_bits_of_calls() -> None:
    """Three layers of up to 2048 columns, whose blocks tell each other of rows in one memory."""
    torch.manual_seed(0)
    widths = (3200, 2048, 2048, 1024)
    modules = [
        x for k, n in pairwise(widths) for x in (nn.Linear(k, n), nn.LayerNorm(n), nn.ReLU())
    ]
    model = nn.Sequential(*modules).cuda().bfloat16().requires_grad_(False)
    handle = lokakern.convert(model, 0.06, inference=True, regime="compiled-graph")
    if not any(span.plan.chains for span in handle.spans):
        pytest.skip("nothing was measured on this GPU")
    x = torch.randn(8192, 3200, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = model(x)
        for _ in range(3):
            graph.replay()
            assert torch.equal(found, expected)


def test_what_is_kept_is_made_by_another_thread_on_the_same_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Allocations of this one may be in a pool of torch.compile."""
    streams: list[object] = []

    @contextmanager
    def entered(stream: object) -> Iterator[None]:
        streams.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"of {device}")
    monkeypatch.setattr(torch.cuda, "stream", entered)
    threads: list[int] = []

    def make() -> Tensor:
        threads.append(threading.get_ident())
        return torch.ones(3, requires_grad=True)

    with torch.inference_mode():
        found = scratch.outlasting(torch.device("cuda"), make)
    assert found.tolist() == [1.0] * 3 and not found.is_inference()
    assert streams == ["of cuda"] and threads[0] != threading.get_ident()
    scratch.outlasting(torch.device("cpu"), make)
    assert threads[1] == threading.get_ident() and len(streams) == 1

    def fails() -> Tensor:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        scratch.outlasting(torch.device("cuda"), fails)


@pytest.mark.gpu
def test_scratch_outlasts_a_cuda_graph_of_torch() -> None:
    """Its first launch is that of a graph's warm-up, where nothing else may stay."""

    def call(x: Tensor, w: Tensor) -> Tensor:
        return lokakern.gemm_norm(x, w.t(), norm="layer").relu()

    given = [torch.randn(n, 512, device="cuda").bfloat16() for n in (2048, 2048)]
    expected = call(*given)
    compiled = torch.compile(call, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        assert torch.equal(compiled(*given), expected)


def test_entering_and_leaving_are_told_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also to a listener that is added within the block, or twice."""
    monkeypatch.setattr(scratch, "_ON_OWNED", [])
    told: list[int] = []
    with scratch.owned():
        scratch.on_owned(told.append)
    assert told == []
    scratch.on_owned(told.append)
    with pytest.raises(ValueError, match="no"), scratch.owned():
        raise ValueError("no")
    assert told == [1, -1]


@pytest.mark.gpu
def test_only_launches_of_one_stream_share_scratch() -> None:
    device = torch.device("cuda")
    first = scratch.zeros(64, device)
    assert scratch.zeros(32, device).data_ptr() == first.data_ptr()
    with scratch.owned():
        assert scratch.zeros(64, device).data_ptr() != first.data_ptr()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert scratch.zeros(64, device).data_ptr() != first.data_ptr()
    seen = {first.data_ptr()}
    for graph in [torch.cuda.CUDAGraph() for _ in range(2)]:
        with torch.cuda.graph(graph):
            held = scratch.zeros(64, device)
            assert scratch.zeros(32, device).data_ptr() == held.data_ptr() not in seen
        seen.add(held.data_ptr())


@pytest.mark.gpu
@pytest.mark.parametrize("spares", [True, False])
def test_a_graph_clears_no_spare(spares: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    scratch.zeros(64, device)
    if not spares:
        monkeypatch.setattr(scratch, "_SPARE", defaultdict(list))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        held = scratch.zeros(64, device)
    held.fill_(7)
    graph.replay()
    assert held.tolist() == [7 if spares else 0] * held.numel()
    held.zero_()


@pytest.mark.gpu
@pytest.mark.parametrize("replays", [True, False])
def test_calls_in_graphs_and_beside_them_have_the_same_bits(replays: bool) -> None:
    """Rows of 2048 columns are shared by blocks, which tell each other of them."""
    torch.manual_seed(0)
    a, w = (torch.randn(2048, 2048, device="cuda").bfloat16() for _ in range(2))

    def call() -> Tensor:
        return lokakern.gemm_norm(lokakern.gemm_norm(a, w.t(), norm="layer"), w.t(), norm="layer")

    with native.in_use() if replays else nullcontext():
        expected = [call() for _ in range(3)][-1]
        graphs, found = [torch.cuda.CUDAGraph() for _ in range(2)], []
        for graph in graphs:
            with torch.cuda.graph(graph):
                found.append(call())
        streams = [torch.cuda.Stream() for _ in range(3)]
        torch.cuda.synchronize()
        for _ in range(20):
            for stream, run in zip(streams, (*[x.replay for x in graphs], call), strict=True):
                with torch.cuda.stream(stream):
                    own = run()
        torch.cuda.synchronize()
    assert all(torch.equal(x, expected) for x in (*found, own))


class Where(threading.local):
    """The current stream of a thread, and what it captures."""

    stream, capture, mode = 1, 0, "global"


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch) -> Where:
    """Streams and captures by numbers, without a GPU; memory is that of a CPU."""
    at = Where()

    @contextmanager
    def relaxed() -> Iterator[None]:
        at.mode = "relaxed"
        yield
        at.mode = "global"

    def synchronize() -> None:
        assert at.mode == "relaxed", "this breaks what another thread captures"

    monkeypatch.setattr(scratch.driver, "_anything_while_capturing", relaxed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(at.capture))
    monkeypatch.setattr(
        torch.cuda, "current_stream",
        lambda _: SimpleNamespace(cuda_stream=at.stream, synchronize=synchronize),
    )  # fmt: skip
    monkeypatch.setattr(scratch, "_capture_number", lambda stream: at.capture)
    for name in ("_OF_STREAM", "_OF_CAPTURE"):
        monkeypatch.setattr(scratch, name, {})
    monkeypatch.setattr(scratch, "_SPARE", defaultdict(list))
    monkeypatch.setattr(scratch, "outlasting", lambda _, make: make())
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, dtype, device: zeros(*size, dtype=dtype))
    return at


def test_threads_that_capture_take_spares_of_their_own(
    at: Where, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each waits before it removes the spare that it found, until all have found one, or 50 ms."""
    device, count = torch.device("cuda"), 4
    scratch.zeros(512, device)
    meet = threading.Barrier(count)

    class Spares(list[Tensor]):
        def pop(self, *place: Any) -> Tensor:
            with suppress(threading.BrokenBarrierError):
                meet.wait(0.05)
            return super().pop(*place)

    monkeypatch.setitem(scratch._SPARE, 0, Spares(scratch._SPARE[0]))

    def capture(number: int) -> int:
        at.capture = number
        return scratch.zeros(512, device).data_ptr()

    with ThreadPoolExecutor(count) as threads:
        taken = set(threads.map(capture, range(1, count + 1)))
    held = {x.data_ptr() for each in scratch._OF_CAPTURE.values() for x in each}
    assert len(taken) == count and taken == held


def test_a_stream_of_a_capture_takes_a_spare(at: Where, monkeypatch: pytest.MonkeyPatch) -> None:
    device, alive = torch.device("cuda"), list[Tensor]()

    def taken(stream: int, capture: int, byte_count: int = 512) -> int:
        at.stream, at.capture = stream, capture
        alive.append(scratch.zeros(byte_count, device))
        return alive[-1].data_ptr()

    first = taken(1, 7)  # no call outside of a capture was made: each clears
    assert first not in (taken(1, 7), taken(1, 7))
    eager = taken(1, 0)
    held = {key: taken(*key) for key in ((1, 7), (2, 7), (1, 8))}
    assert len({eager, *held.values()}) == 4
    assert {key: taken(*key, 100) for key in held} == held
    assert taken(1, 7, 1024) not in held.values()  # no spare is large enough
    assert held[1, 7] == taken(1, 7)
    others = {taken(1, number) for number in range(9, 9 + scratch.SPARES - 3)}
    assert not others & {*held.values()} and len(others) == scratch.SPARES - 3
    assert taken(1, 99) != taken(1, 99)  # none is left
    taken(1, 0)
    assert taken(1, 99) == taken(1, 99)
    monkeypatch.setattr(scratch, "MOST_CAPTURES", 3)
    assert taken(1, 100) != taken(1, 100)


def problem(n: int, epilogue: str, out: Format = Format.BFLOAT16) -> Problem:
    a = Operand(Format.E4M3FN, Granularity.ROW)
    b = Operand(Format.E4M3FN, Granularity.ROW, Layout.COLUMN)
    granularity = Granularity.TENSOR if out.is_fp8 else Granularity.NONE
    return Problem(
        op="gemm_norm", m=2048, n=n, k=512, a=a, b=b, epilogue=epilogue, out_format=out,
        out_granularity=granularity,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (problem(128, "block_rms(4)"), "multiples of 8"),
        (problem(96, "block_rms(12)"), "multiples of 8"),
        (problem(77, "residual+layer", Format.E4M3FN), "two columns"),
        (problem(8192, "layer"), "no tile holds"),
    ],
)
def test_unsupported_problems_raise(asked: Problem, words: str) -> None:
    answer = KERNELS["cuda.gemm_norm_row"].supports(asked, H200)
    assert isinstance(answer, Rejected) and words in answer.reason


def test_maps_are_of_addresses_and_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two views of one weight that begin at the same place are not the same operand."""
    launched: list[object] = []
    monkeypatch.setattr(gemm_norm, "tensor_map", lambda x, *_: x.stride())
    base = torch.randn(256, 512).bfloat16()
    tile = gemm_norm.Tile(64, warpgroups=1)
    kind = gemm_norm.NormKind("none", "rms")
    plan = gemm_norm.make_plan(40, 128, 256, kind, tile, 132)
    plan = plan._replace(launch=lambda grid, pointers, scalars, maps: launched.append(maps))
    a, out = torch.randn(40, 256).bfloat16(), torch.empty(40, 128, dtype=torch.bfloat16)
    for weight in (base[:128, :256], base.view(-1)[: 128 * 256].view(128, 256)):
        gemm_norm.run(plan, kind, a, None, weight, None, out, None,
                      NormEpilogue(norm_named("rms")), None)  # fmt: skip
    assert launched[0] != launched[1]
