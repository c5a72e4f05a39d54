"""Trial steps of a model whose state is as before afterwards."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lokakern.nn.linear import CHAIN_DATA, CHAIN_SCALE, Routed

DERIVED = ("fp8_data", "fp8_scale", "held_weight")  # buffers of converted layers
SHARE_OF_FREE = 0.5  # of the GPU's free memory for copies; larger copies go to the host


@contextlib.contextmanager
def restored_state(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, is_trained: bool
) -> Iterator[None]:
    """Restore the values of a model, its gradients and an optimizer after the block.

    Restored are buffers, the random number generators of torch and, if the model is trained,
    parameters, gradients and main gradients, in the same tensors. Copies are kept on the GPU if
    they fit into half of its free memory, else on the host.

    Args:
        model: The model.
        optimizer: The optimizer that the steps call, if any. Its state is loaded again, in new
            tensors.
        is_trained: Whether steps may change parameters and gradients.
    """
    tensors = [*own_buffers(model)]
    gradients: dict[nn.Parameter, Tensor | None] = {}
    if is_trained:
        parameters = [p for p in model.parameters() if p.requires_grad]
        gradients = {p: p.grad for p in parameters}
        tensors += [p.detach() for p in parameters]
        tensors += [x for x in gradients.values() if x is not None]
        main_grads = (getattr(p, "main_grad", None) for p in parameters)
        tensors += [x for x in main_grads if x is not None]
    copies = _copies(tensors)
    state: Any = None if optimizer is None else copy.deepcopy(optimizer.state_dict())
    every = (*tensors, *model.parameters())
    devices = {x.device for x in every if x.device.type == "cuda"}
    try:
        with torch.random.fork_rng(devices=[x.index for x in devices]):
            yield
    finally:
        with torch.no_grad():
            for tensor, values in zip(tensors, copies, strict=True):
                tensor.copy_(values)
        for parameter, gradient in gradients.items():
            parameter.grad = gradient
        if optimizer is not None:
            optimizer.load_state_dict(state)


def own_buffers(model: nn.Module) -> Iterator[Tensor]:
    """Buffers but those that `convert` derives from weights, and those that no step can change."""
    seen = set()
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            is_known = name in DERIVED or name.startswith((CHAIN_DATA, CHAIN_SCALE))
            is_derived = isinstance(module, Routed) and is_known
            if not is_derived and not _is_expanded(buffer) and id(buffer) not in seen:
                seen.add(id(buffer))
                yield buffer


def _is_expanded(tensor: Tensor) -> bool:
    """Whether elements share memory, which torch refuses to write to."""
    if tensor.layout is not torch.strided:
        return False
    return any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    held = {device: 0 for device in {x.device for x in tensors}}
    for tensor in tensors:
        held[tensor.device] += 0 if tensor.is_sparse else tensor.nbytes
    fits = {
        device: device.type != "cuda"
        or nbytes <= SHARE_OF_FREE * torch.cuda.mem_get_info(device)[0]
        for device, nbytes in held.items()
    }
    return [x.clone() if fits[x.device] else x.to("cpu", copy=True) for x in tensors]
