"""Scales of operands from the amax of earlier steps: `DelayedScaling`.

A dynamic tensorwise scale takes one pass over an operand before the one that quantizes it. With a
delayed scale the quantizer records the amax in its own pass, for later steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lokakern.errors import FormatError, ShapeError
from lokakern.nn.linear import Linear
from lokakern.nn.routed_matmul import (
    PLAIN,
    Delayed,
    delayed,
    delayed_key,
    fp8_on,
    new_delayed,
    set_settled,
    settle,
    settled,
    unsettled,
)
from lokakern.numerics import SMALLEST_SCALE

LARGEST_SCALE = 2.0**125  # of a static scale, see `lokakern.quantize`
OPERANDS = ("input", "weight", "grad_output")
_ATTRIBUTES = ("history", "scales", "settled")


class DelayedScaling:
    """The scales of a conversion, ``convert(..., scaling="delayed").delayed_scaling``.

    ::

        loss(model(x), target).backward()
        optimizer.step()
        handle.delayed_scaling.update()

    The scale of an operand is ``max(history) * 2**margin / MAX``, where the history holds its amax
    in the last steps, and MAX is the largest FP8 value. Larger elements saturate, in that step. An
    operand that was all zeros, or not used, in all of these steps keeps its scale. Until the first
    `update` that has an amax of it, an operand has a dynamic scale.

    Args:
        sites: Converted layers by name.
        key: Of the conversion.
        history: Steps of the history.
        margin: Powers of two between the largest amax and the largest FP8 value.

    Raises:
        ShapeError: ``history`` is no integer of 1 or more, or ``margin`` no integer from 0 to 8.
    """

    def __init__(self, sites: Mapping[str, nn.Module], key: str, history: int, margin: int) -> None:
        for name, value, least, most in (
            ("history", history, 1, 2**16), ("margin", margin, 0, 8)
        ):  # fmt: skip
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ShapeError(
                    f"convert: {name} is {value!r}; expected an integer from {least} to {most}"
                )
        self.history, self.margin = history, margin
        self._sites = sites
        self._keys = {name: f"{key[:12]}.{place}" for place, name in enumerate(sites)}
        self._amax = torch.empty(0)  # [history, layers, operands], the last step last

    def marked(self, name: str, text: str) -> str:
        """A route of a site with its key, if delayed scaling applies to it."""
        layer = self._sites[name]
        if not isinstance(layer, Linear):
            return text
        key = self._keys[name]
        found = delayed(text, key)
        if found != text and key not in (layer.delayed or {}):
            layer.keep_delayed(key, new_delayed(layer.weight.device))
        return found

    @property
    def products(self) -> list[str]:
        """The products with delayed scaling, as ``site/gemm``."""
        return self._products(is_delayed=True)

    @property
    def left(self) -> list[str]:
        """The quantized products with dynamic scales, of other granularities or other modules."""
        return self._products(is_delayed=False)

    def _products(self, is_delayed: bool) -> list[str]:
        gemms = ("output", "grad_input", "grad_weight")
        return [
            f"{name}/{gemm}"
            for name, layer in self._sites.items()
            for gemm, text in zip(gemms, getattr(layer, "_routes", ()), strict=False)
            if text != PLAIN and (delayed_key(text) == self._keys[name]) is is_delayed
        ]

    @torch.no_grad()
    def update(self, group: Any = None) -> None:
        """Compute new scales; once after each step of the optimizer.

        With several ranks the largest amax of all of them counts, in one all-reduce. A CUDA graph
        of a step may contain it, if the steps before the capture called it.

        Args:
            group: Of torch.distributed; None: the default one.
        """
        states = self._states()
        if not states:
            return
        device = next(iter(states.values())).scales.device
        ahead = torch.stack([state.amax.to(device) for state in states.values()])
        behind = torch.stack([state.amax_behind.to(device) for state in states.values()])
        now = torch.stack(
            (
                ahead[:, 0].maximum(behind[:, 3]),
                ahead[:, 1].maximum(behind[:, 1]),
                behind[:, 0].maximum(behind[:, 2]),
            ),
            dim=1,
        )
        if dist.is_initialized() and dist.get_world_size(group) > 1:
            dist.all_reduce(now, dist.ReduceOp.MAX, group=group)
        if self._amax.shape[1:] != now.shape or self._amax.device != device:
            kept = self._amax.to(device) if self._amax.shape[1:] == now.shape else None
            self._amax = now.new_zeros((self.history, *now.shape)) if kept is None else kept
        self._amax.copy_(self._amax.roll(-1, 0))  # no place of the host's: CUDA graphs repeat it
        self._amax[-1] = now
        most = self._amax.amax(0)
        # Divided by a tensor: torch multiplies by the reciprocal of a number on GPUs.
        largest = torch.full_like(most, torch.finfo(fp8_on(device)).max)
        scales = most * 2.0**self.margin / largest
        before = torch.stack([state.scales.to(device) for state in states.values()])
        scales = torch.where(most > 0, scales.clamp(SMALLEST_SCALE, LARGEST_SCALE), before)
        for state, new in zip(states.values(), scales, strict=True):
            state.scales.copy_(new)
            state.amax.zero_()
            state.amax_behind.zero_()
        self._settle(most)

    def _settle(self, most: Tensor) -> None:
        """Let operands that have an amax, ``[layers, operands]``, have scales of it from now on.

        Others, such as gradients behind a weight of zeros, or all infinite, stay dynamic: by the
        scale of 1 that they would have, later ones may become zero. Only a step with an operand
        that has no scale yet waits for the device, and none in a capture, which could not.
        """
        keys = [self._keys[name] for name in self._states()]
        if not any(map(unsettled, keys)) or (
            most.is_cuda and torch.cuda.is_current_stream_capturing()
        ):
            return
        for key, largest in zip(keys, most.tolist(), strict=True):
            settle(key, [place for place in unsettled(key) if largest[place] > 0.0])

    @property
    def scales(self) -> dict[str, dict[str, float]]:
        """The present scales by site and operand, ``x ~ data * scale``; reading them synchronizes.

        Operands with dynamic scales have none.
        """
        return {
            name: {
                operand: scale
                for operand, scale, is_settled in zip(
                    OPERANDS, state.scales.tolist(), settled(self._keys[name]), strict=True
                )
                if is_settled
            }
            for name, state in self._states().items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Histories and scales, for a checkpoint beside those of model and optimizer.

        Save it after `update`.
        """
        states = self._states()
        recent = torch.zeros(self.history, len(states), 3)
        if self._amax.shape == recent.shape:  # else nothing was recorded
            recent = self._amax.cpu()
        return {
            name: {
                "history": recent[:, place].clone(),
                "scales": state.scales.to("cpu", copy=True),
                "settled": settled(self._keys[name]),
            }
            for place, (name, state) in enumerate(states.items())
        }

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave, of a conversion with the same products.

        Raises:
            FormatError: It is of other layers, or of another length of the history.
        """
        states = self._states()
        for name in dict.fromkeys((*states, *state)):
            of_layer = state.get(name) if name in states else None
            is_fit = isinstance(of_layer, Mapping) and all(x in of_layer for x in _ATTRIBUTES)
            if of_layer is None or not is_fit or of_layer["history"].shape != (self.history, 3):
                raise FormatError(
                    f"load_state_dict: the state of {name!r} is missing here or there, or of "
                    f"another history than {self.history}; convert with the same arguments first"
                )
        if not states:
            return
        device = next(iter(states.values())).scales.device
        histories = [state[name]["history"] for name in states]
        history = torch.stack(histories, dim=1).to(device)
        if self._amax.shape != history.shape or self._amax.device != device:
            self._amax = torch.empty_like(history)
        self._amax.copy_(history)  # CUDA graphs know its address
        for name, own in states.items():
            own.scales.copy_(state[name]["scales"])
            own.amax.zero_()
            own.amax_behind.zero_()
            set_settled(self._keys[name], state[name]["settled"])

    def forget(self) -> None:
        """Drop the state of each layer; `Conversion.undo` does it."""
        for name in self._states():
            layer = self._sites[name]
            assert isinstance(layer, Linear)  # others have none
            layer.keep_delayed(self._keys[name], None)
            set_settled(self._keys[name], (False,) * 3)

    def _states(self) -> dict[str, Delayed]:
        found = {}
        for name, layer in self._sites.items():
            state = (getattr(layer, "delayed", None) or {}).get(self._keys[name])
            if state is not None:
                found[name] = state
        return found
