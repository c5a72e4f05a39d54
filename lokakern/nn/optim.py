"""Adam and AdamW that step large parameters at the bandwidth of the memory.

A step reads and writes 28 bytes of a parameter in float32 and computes next to nothing. What is
here is torch's with another kernel: `torch.optim` by name, arguments, state and checkpoints.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# From here on a launch takes the host less time than the device, which needs 28 us of an H200.
LEAST_ELEMENTS = 2**22
DTYPES = torch.float32, torch.bfloat16, torch.float16
_HAS_TRITON = importlib.util.find_spec("triton") is not None


class _LargeSteps(torch.optim.Adam):
    """A step of `torch.optim` of which a kernel takes the large parameters."""

    def __init__(self, params: Any, *args: Any, **options: Any) -> None:
        if not (options.get("foreach") or options.get("differentiable")):
            options.setdefault("fused", True)
        super().__init__(params, *args, **options)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As of `torch.optim`; groups of one that left its way of stepping open are fused."""
        super().load_state_dict(state_dict)
        for group in self.param_groups:
            if group["fused"] is None and not (group["foreach"] or group["differentiable"]):
                group["fused"] = True
                for p in group["params"]:  # fused steps count on the device of a parameter
                    if isinstance(count := self.state.get(p, {}).get("step"), Tensor):
                        self.state[p]["step"] = count.to(p.device)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """A step of all parameters that have a gradient, as of `torch.optim`."""
        if torch.compiler.is_compiling():  # a compiler writes its own kernels
            return _steps_of_torch(self, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        large = list(self._large())
        if not large:
            _steps_of_torch(self, None)
            return loss
        gradients = [p.grad for _, p in large]
        for _, p in large:
            p.grad = None
        try:
            _steps_of_torch(self, None)  # first: it says what it cannot step, and in a graph why
        finally:
            for (_, p), gradient in zip(large, gradients, strict=True):
                p.grad = gradient
        self._step_large(large)
        return loss

    def _large(self) -> Iterator[tuple[dict[str, Any], Tensor]]:
        """Large parameters with their groups; none of those that torch has to step."""
        # A GradScaler has torch divide gradients by its scale, and skip steps by what overflowed.
        is_scaled = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if not _HAS_TRITON or any(x is not None for x in is_scaled):
            return
        for group in self.param_groups:
            if not group["fused"] or group["amsgrad"] or group["differentiable"]:
                continue
            if any(isinstance(beta, Tensor) for beta in group["betas"]):
                continue
            for p in group["params"]:
                # torch makes the state in the first step.
                if p.numel() >= LEAST_ELEMENTS and p.grad is not None and _fits(p, self.state[p]):
                    yield group, p

    @torch.no_grad()
    def _step_large(self, large: list[tuple[dict[str, Any], Tensor]]) -> None:
        from lokakern.kernels.triton.adam_step import adam_step  # here: it needs Triton

        torch._foreach_add_([self.state[p]["step"] for _, p in large], 1)
        for group, p in large:
            state, gradient = self.state[p], p.grad
            assert gradient is not None
            with torch.cuda.device_of(p):  # type: ignore[no-untyped-call]
                adam_step(
                    p, gradient, state["exp_avg"], state["exp_avg_sq"], state["step"],
                    lr=group["lr"], betas=group["betas"], eps=group["eps"],
                    decay=group["weight_decay"], maximizes=group["maximize"],
                    is_decoupled=group["decoupled_weight_decay"],
                )  # fmt: skip
            # What is kept for a version of a weight, such as its FP8, is of the one before.
            torch.autograd.graph.increment_version((p, state["exp_avg"], state["exp_avg_sq"]))


class Adam(_LargeSteps):
    """`torch.optim.Adam`, by default with ``fused=True``; a kernel steps large parameters.

    An H200 takes less time for a step, and results are torch's within the rounding of float32.
    The kernel takes parameters of `LEAST_ELEMENTS` or more on a GPU, in float32, bfloat16 or
    float16. torch steps all others, such as DTensors of FSDP2 and weights with gaps in memory, and
    those of a group that is not ``fused``, or has ``amsgrad``; all of them in a step by a
    ``GradScaler`` or under ``torch.compile``, and in their first step.
    """


class AdamW(_LargeSteps, torch.optim.AdamW):
    """`torch.optim.AdamW`; otherwise as `Adam`."""


def _steps_of_torch(optimizer: torch.optim.Adam, closure: Callable[[], Any] | None) -> Any:
    """A step without the optimizer's hooks, which run around the whole step."""
    step: Any = torch.optim.Adam.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step(optimizer, closure)


def _fits(p: Tensor, state: dict[str, Any]) -> bool:
    """Whether the kernel reads a parameter, its gradient and its state as one run of memory."""
    step = state.get("step")
    if not _on_gpu(p) or not isinstance(step, Tensor) or step.device != p.device:
        return False
    tensors: Any = p, p.grad, state["exp_avg"], state["exp_avg_sq"]
    is_dense = p.is_contiguous() or (p.dim() == 2 and p.mT.is_contiguous())
    return is_dense and all(_is_like(x, p) for x in tensors)


def _is_like(x: Tensor, p: Tensor) -> bool:
    """Whether a tensor is a plain one, at the same places of its memory as a parameter."""
    return (
        type(x) in (torch.Tensor, torch.nn.Parameter)
        and x.layout is torch.strided
        and (x.device, x.shape, x.stride()) == (p.device, p.shape, p.stride())
        and x.dtype in DTYPES
        and not x.is_neg()
    )


def _on_gpu(p: Tensor) -> bool:
    return p.is_cuda
