"""Replays on two GPUs of one process, the current one and another."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import lokakern
from lokakern.native import plan_file, replay
from tests.support import native
from tests.support.native import compare_bits

pytestmark = pytest.mark.gpu
DEVICES = ("cuda:0", "cuda:1")


@pytest.fixture(autouse=True)
def library() -> Iterator[Any]:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    with native.in_use() as module:
        yield module


def model_on(device: str, inference: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(512, 768), torch.nn.ReLU(), torch.nn.Linear(768, 256)]
    model = torch.nn.Sequential(*layers).to(device, torch.bfloat16)
    lokakern.convert(model.requires_grad_(not inference), kernels="row", inference=inference)
    return model


def rows(device: str, seed: int = 1) -> torch.Tensor:
    x = torch.randn(1024, 512, generator=torch.Generator().manual_seed(seed))
    return x.to(device, torch.bfloat16)


@pytest.mark.parametrize("current", [0, 1])
def test_public_calls_on_each_gpu(current: int, library: Any) -> None:
    with torch.no_grad(), torch.cuda.device(current):
        for device in DEVICES * 2:
            assert compare_bits(random.Random(0), 300, 256, 512, device=device) > 8
        assert torch.cuda.current_device() == current


@pytest.mark.parametrize("mode", ["eager", "compiled", "graph"])
def test_converted_models_on_each_gpu(mode: str) -> None:
    found = {}
    for device in DEVICES:
        with torch.no_grad():
            model = model_on(device, inference=True)
            run = model if mode == "eager" else torch.compile(model, fullgraph=True)
            results = [run(rows(device, seed)) for seed in (1, 2, 3)]
            if mode == "graph":
                static, graph = rows(device), torch.cuda.CUDAGraph()
                with torch.cuda.device(device):
                    # torch's default stream for captures is of the GPU of the first capture.
                    with torch.cuda.graph(graph, stream=torch.cuda.Stream(device)):
                        y = run(static)
                    for seed in (1, 2, 3):
                        static.copy_(rows(device, seed))
                        graph.replay()
                        results.append(y.clone())
        found[device] = [y.cpu() for y in results]
    assert all(map(torch.equal, *found.values()))
    if mode == "graph":
        assert all(map(torch.equal, found["cuda:0"][:3], found["cuda:0"][3:]))


def test_threads_train_on_a_gpu_each() -> None:
    models = {device: model_on(device, inference=False) for device in DEVICES}
    found: dict[str, list[torch.Tensor]] = {}

    def train(device: str) -> None:
        model = models[device]
        for seed in range(8):
            model(rows(device, seed)).float().square().mean().backward()
        found[device] = [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    threads = [threading.Thread(target=train, args=(device,)) for device in DEVICES]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found["cuda:0"]) == 4
    assert all(map(torch.equal, *(found[device] for device in DEVICES)))


@pytest.mark.parametrize("current", [0, 1])
def test_a_plan_file_is_loaded_for_each_gpu(current: int, tmp_path: Path, library: Any) -> None:
    """Kernels are loaded into the context of their GPU, whichever is current."""
    with torch.no_grad(), torch.cuda.device(current):
        models = {device: torch.compile(model_on(device, inference=True)) for device in DEVICES}
        x = {device: rows(device) for device in DEVICES}
        expected = models["cuda:1"](x["cuda:1"]).cpu()
        count = plan_file.save_plans(tmp_path / "plans", models["cuda:1"], x["cuda:1"])
        models["cuda:0"](x["cuda:0"])
        replay.forget()
        for index in (0, 1):
            assert library.load_plans(str(tmp_path / "plans"), index) == count
            assert torch.cuda.current_device() == current
        before = library.size()
        for device, model in models.items():
            assert torch.equal(model(x[device]).cpu(), expected)
        assert library.size() == before == 2 * count
