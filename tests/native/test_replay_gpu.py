"""On a GPU: Python and replays give equal bits, for every public function."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lokakern
from lokakern.native import replay, replayed
from tests.support import native
from tests.support.native import bits, compare_bits

pytestmark = pytest.mark.gpu
SIZES = (1, 7, 16, 100, 128, 300, 512, 1024, 2048)
ROWS = (1, 5, 16, 100, 2048, 8192)


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    with native.in_use() as module, torch.no_grad():
        yield module


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("seed", range(12))
def test_replays_have_the_bits_of_python(seed: int, dtype: torch.dtype, library: Any) -> None:
    draw = random.Random(seed)
    shape = [draw.choice(x) for x in (ROWS, SIZES, SIZES)]
    assert compare_bits(draw, *shape, "cuda", dtype) > 8 and library.size() > 8


def test_compiled_calls_are_replayed_with_the_bits_of_python(library: Any) -> None:
    for name, call in native.calls(256, 512, 384, "cuda").items():
        own, replay.NATIVE.replay = replay.NATIVE.replay, None
        x = torch.randn(256, 384, device="cuda", dtype=torch.bfloat16)
        try:
            expected = bits(call(x))
        finally:
            replay.NATIVE.replay = own
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for _ in range(4):
            assert all(map(torch.equal, bits(compiled(x)), expected)), name
    assert library.size() > 12


def test_graphs_streams_and_threads() -> None:
    x = torch.randn(2048, 512, device="cuda", dtype=torch.bfloat16)
    w = lokakern.quantize(torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)).t()

    def call() -> Any:
        return lokakern.scaled_gemm(lokakern.quantize(x), w)

    expected = [call() for _ in range(3)][-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    captured.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(captured, expected)
    found: list[bool] = []

    def work() -> None:
        stream = torch.cuda.Stream()
        with torch.no_grad(), torch.cuda.stream(stream):
            results = [call() for _ in range(50)]
            stream.synchronize()
            found.append(all(torch.equal(y, expected) for y in results))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 4


def test_a_thread_whose_first_call_is_a_replay() -> None:
    """It fills memory and launches without a context of its own."""
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    filled = replayed(lambda x: torch.full((4,), 2.0, device=x.device))
    expected = [filled(x).clone() for _ in range(3)][-1]
    quantized = [bits(lokakern.quantize(x, "tensor")) for _ in range(3)][-1]
    torch.cuda.synchronize()
    found: list[bool] = []

    def work() -> None:
        with torch.no_grad():
            first, second = filled(x), bits(lokakern.quantize(x, "tensor"))
        found.append(torch.equal(first, expected) and all(map(torch.equal, second, quantized)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [True]


def test_the_first_launch_of_a_plan_under_capture() -> None:
    """The second call, which is recorded, and the third are captured."""
    x = torch.randn(300, 512, device="cuda", dtype=torch.bfloat16)
    expected = bits(lokakern.quantize(x, "tensor"))
    captured = []
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured += [lokakern.quantize(x, "tensor") for _ in range(3)]
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, [y for q in captured for y in bits(q)], expected * 3))


@pytest.mark.parametrize("mode", ["compiled", "eager"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_converted_models_are_replayed(mode: str, dynamic: bool, library: Any) -> None:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 2048)]
    model = torch.nn.Sequential(*layers).to("cuda", torch.bfloat16).eval().requires_grad_(False)
    lokakern.convert(model, 0.06, inference=True)
    run = torch.compile(model, dynamic=dynamic, fullgraph=True) if mode == "compiled" else model
    for m in (4096, 8192):
        for _ in range(3):
            x = torch.randn(m, 2048, device="cuda", dtype=torch.bfloat16)
            own, replay.NATIVE.replay = replay.NATIVE.replay, None
            expected = model(x)
            replay.NATIVE.replay = own
            y = run(x)
            error = (y.float() - expected.float()).norm() / expected.float().norm()
            assert error < 1e-2
    if any("scaled_gemm" in str(layer) for layer in layers):
        assert library.size()
