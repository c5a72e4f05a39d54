"""Memory and time of training steps with inputs saved in FP8 and in 16 bits, on a GPU.

Of MLPs whose layers are `WIDTH` wide, eager and compiled, with SiLU, ReLU or nothing between the
layers: the bytes that wait for the backward pass, the peak of a step, and its time, as a median of
interleaved rounds.

    python scripts/measure_saved_inputs.py
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor, nn

import lokakern

SAMPLES, WIDTH, LAYERS = 8192, 4096, 8
ROUNDS, STEPS = 7, 5  # steps of a round
KERNELS = {"output": "row", "grad_input": "row", "grad_weight": "1x128"}
MIB = 2**20


def model_of(activation: type[nn.Module] | None) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), *([activation()] if activation else [])]
    return nn.Sequential(*layers).to("cuda", torch.bfloat16)


def step(call: Callable[[Tensor], Tensor], model: nn.Module, x: Tensor) -> int:
    """A step; returns the bytes that the forward pass leaves."""
    model.zero_grad()
    before = torch.cuda.memory_allocated()
    y = call(x)
    left = torch.cuda.memory_allocated() - before - y.nbytes
    y.backward(torch.ones_like(y))  # type: ignore[no-untyped-call]
    return left


def measure(activation: type[nn.Module] | None, *, is_compiled: bool) -> None:
    x = torch.randn(SAMPLES, WIDTH, device="cuda").bfloat16()
    torch._dynamo.reset()
    runs = []
    for keep in (None, "fp8"):
        model = model_of(activation)
        lokakern.convert(model, kernels=KERNELS, keep_inputs=keep)
        call = torch.compile(model, dynamic=False) if is_compiled else model
        for _ in range(3):
            left = step(call, model, x)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step(call, model, x)
        runs.append((call, model, left, torch.cuda.max_memory_allocated() - before))
    times: list[list[float]] = [[], []]
    for _ in range(ROUNDS):
        for (call, model, *_), found in zip(runs, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(STEPS):
                step(call, model, x)
            end.record()
            end.synchronize()
            found.append(start.elapsed_time(end) / STEPS)
    name = activation.__name__ if activation else "nothing"
    how = "compiled" if is_compiled else "eager"
    for (_, _, left, peak), found, keep in zip(runs, times, ("16 bits", "fp8"), strict=True):
        print(
            f"{how} {name} {keep}: {left / MIB:.0f} MiB saved, peak {peak / MIB:.0f} MiB, "
            f"{statistics.median(found):.3f} ms"
        )


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("measure_saved_inputs: no GPU is available; it measures one")
    for is_compiled in (False, True):
        for activation in (None, nn.SiLU, nn.ReLU):
            measure(activation, is_compiled=is_compiled)


if __name__ == "__main__":
    main()
