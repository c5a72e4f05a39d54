"""Gradients of weights that add up in float32 over micro-batches: `MainGrads`.

Kernels add each product to ``weight.main_grad``; autograd sees no gradient of these weights. So DDP
and optimizers, which read ``weight.grad``, need the calls of this module.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lokakern.errors import UnsupportedError
from lokakern.nn.linear import Linear
from lokakern.nn.raw_product import RawProduct

_WHY_NOT = (
    "its weight is not trained, has hooks of gradients, or is not multiplied as it is (padded, "
    "fused, across tokens)"
)
_OF_OTHERS = "it is a parameter of a module that is no nn.Linear"


class MainGrads:
    """The main gradients of a conversion, ``convert(..., main_grads=True).main_grads``.

    ::

        for x, target in micro_batches:
            loss(model(x), target).backward()  # adds to weight.main_grad
        handle.main_grads.reduce()  # mean over the ranks of torch.distributed, if there are several
        handle.main_grads.hand_over()  # weight.grad, for clipping and the optimizer
        optimizer.step()
        handle.main_grads.zero()

    Args:
        sites: Converted layers by name.
    """

    def __init__(self, sites: Mapping[str, nn.Module]) -> None:
        self._sites = sites
        self._is_handed_over = False

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights with a main gradient by the name of their first layer."""
        found: dict[str, nn.Parameter] = {}
        known: set[int] = set()
        for name, layer in self._sites.items():
            if isinstance(layer, Linear) and layer.adds_gradient and id(layer.weight) not in known:
                known.add(id(layer.weight))
                found[name] = cast("nn.Parameter", layer.weight)
        return found

    @property
    def left(self) -> dict[str, str]:
        """Converted sites whose gradients, if any, are in ``weight.grad``, with the reason."""
        return {
            name: _OF_OTHERS if isinstance(layer, RawProduct) else _WHY_NOT
            for name, layer in self._sites.items()
            if not (isinstance(layer, Linear) and layer.adds_gradient)
        }

    @torch.no_grad()
    def reduce(self, group: Any = None) -> None:
        """Average main gradients over ranks, in float32; after the last backward pass of a step.

        Nothing happens without a process group.

        Args:
            group: Of torch.distributed; None: the default one.

        Raises:
            UnsupportedError: They were handed over already.
        """
        gradients = self._gathered("reduce")
        if not dist.is_initialized() or dist.get_world_size(group) == 1 or not gradients:
            return
        sums = [dist.all_reduce(x, group=group, async_op=True) for x in gradients]
        for done in sums:
            done.wait()
        torch._foreach_div_(gradients, float(dist.get_world_size(group)))

    @torch.no_grad()
    def hand_over(self) -> None:
        """Set ``weight.grad``: of float32 weights to the main gradient itself, else rounded once.

        Weights that are not trained any more have none. An optimizer with float32 copies of
        bfloat16 or float16 weights reads ``weight.main_grad`` instead.

        A scaled loss makes main gradients so much larger: with a `torch.amp.GradScaler` this comes
        before its ``unscale_`` and ``step``, which divide what they find in ``weight.grad``.

        Raises:
            UnsupportedError: They were handed over already, and not set to zero since.
        """
        gradients = self._gathered("hand_over")
        for weight, gradient in zip(self.weights.values(), gradients, strict=True):
            if weight.requires_grad:
                weight.grad = _handed_over(gradient, weight.dtype)
        self._is_handed_over = True

    @torch.no_grad()
    def zero(self) -> None:
        """Set main gradients to zero, and ``weight.grad`` to None, for the next step."""
        for weight in self.weights.values():
            weight.grad = None
            _main_grad_of(weight).zero_()
        self._is_handed_over = False

    def ddp(self, module: nn.Module, **options: Any) -> DistributedDataParallel:
        """Wrap a module in DDP, which leaves these weights to `reduce`.

        Their values are those of the first rank of the group then, as DDP does for the others. In
        ``DistributedDataParallel(module)`` gradients of zeros would take memory and time.

        Args:
            module: The converted model, or one that contains it.
            options: Of `torch.nn.parallel.DistributedDataParallel`.

        Raises:
            UnsupportedError: The module has none of these weights, or no other trained parameter,
                so that DDP has nothing to do: call `broadcast` and `reduce` without it.
        """
        own = {id(weight) for weight in self.weights.values()}
        others = False
        names = []
        for name, parameter in module.named_parameters(remove_duplicate=False):
            if id(parameter) in own:
                names.append(name)
            else:
                others |= parameter.requires_grad
        if not names or not others:
            found = "none of these weights" if not names else "no other parameter to train"
            raise UnsupportedError(
                f"ddp: {type(module).__name__} has {found}; pass the converted model"
                + (", or call broadcast() and reduce() without DDP" if names else "")
            )
        self.broadcast(options.get("process_group"))
        ignored = [*getattr(module, "_ddp_params_and_buffers_to_ignore", ()), *names]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
            module, list(dict.fromkeys(ignored))
        )
        return DistributedDataParallel(module, **options)

    def broadcast(self, group: Any = None) -> None:
        """Give each rank the weights of the group's first one; `ddp` does it.

        Args:
            group: Of torch.distributed; None: the default one.
        """
        first = 0 if group is None else dist.get_global_rank(group, 0)
        for weight in self.weights.values():
            dist.broadcast(weight.detach(), first, group=group)

    def _gathered(self, what: str) -> list[Tensor]:
        """Main gradients, with what autograd added to ``weight.grad`` for other readers."""
        if self._is_handed_over:
            raise UnsupportedError(
                f"{what}: the main gradients were handed over for a step of the optimizer; call "
                "zero() after it, before the next backward pass"
            )
        found = []
        for weight in self.weights.values():
            gradient = _main_grad_of(weight)
            given = weight.grad
            # Another conversion of the same weight may have handed it over.
            if given is not None and given is not getattr(gradient, "rounded", gradient):
                gradient.add_(given.detach())
                weight.grad = None
            found.append(gradient)
        return found


def _main_grad_of(weight: nn.Parameter) -> Tensor:
    found: Any = weight
    gradient: Tensor = found.main_grad
    return gradient


def _handed_over(gradient: Any, dtype: torch.dtype) -> Tensor:
    """A main gradient in the dtype of its weight, which it keeps if it is another tensor."""
    found: Tensor = gradient.to(dtype)
    if found is not gradient:
        gradient.rounded = found
    return found
