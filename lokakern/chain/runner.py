"""`ChainRun`: a chosen chain with weights, prepared once and launched by each call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lokakern.chain.candidates import NONE, TENSOR, Chain, Step
from lokakern.chain.launches import Matrix, empty_matrix, launcher_of, read_as
from lokakern.epilogue import norm_form
from lokakern.errors import FormatError, ShapeError, UnsupportedError
from lokakern.functional.checks import check_matrix, check_same_device
from lokakern.functional.norm_checks import (
    aligned_epilogue,
    check_epilogue,
    norm_of,
    static_scale_of,
)
from lokakern.functional.quantize import quantize
from lokakern.registry.register import Kernel, kernel_named
from lokakern.scratch import owned
from lokakern.selection.arguments import device_of
from lokakern.types import (
    Granularity,
    NormEpilogue,
    Problem,
    QuantizedTensor,
    alignment_of,
)

Parameters = tuple[Any, Any, Any, Any]  # weight, bias, norm weight and norm bias of a layer


@dataclass(slots=True)
class _Launch:
    """A kernel and its operands; None stands for the chain's input or output."""

    run: Callable[[Any, Any], None]
    left: Matrix | None
    out: Matrix | None


class ChainRun:
    """Runs a chain: ``run(x)``.

    Calls share the tensors between layers, so they must not overlap: use one stream and one thread.
    They can be captured in a CUDA graph. There are no gradients.
    """

    def __init__(
        self, chain: Chain, steps: Sequence[Step], parameters: Sequence[Parameters], eps: float
    ) -> None:
        self._chain = chain
        device = _check(chain, parameters)
        self._device = device
        self._epilogues = [
            _epilogue_of(chain, place, given, eps) for place, given in enumerate(parameters)
        ]
        self._static = self._static_scale(len(chain.layers) - 1, chain.writes)
        given = self._empty(chain.layers[0].k, chain.reads, None)  # of the input's shape
        written: Matrix = given
        final = self._empty(chain.layers[-1].n, chain.writes, self._static)
        self._launches: list[_Launch] = []
        for number, step in enumerate(steps):
            is_last = number == len(steps) - 1
            problem, kernel = step.problem, kernel_named(step.kernel)
            scales = problem.out_granularity
            columns = problem.k if problem.b is None else problem.n
            scale = self._static_scale(step.place, scales) if problem.b is not None else None
            out = final if is_last else self._empty(columns, scales, scale)
            left = read_as(written, problem.a.granularity)
            weight = None if problem.b is None else _weight(problem, parameters[step.place][0])
            run = _runner(kernel, left, weight, out, self._epilogues[step.place])
            self._launches.append(
                _Launch(run, None if written is given else left, None if is_last else out)
            )
            written = out

    def __call__(self, x: Matrix, out: Matrix | None = None) -> Matrix:
        """The chain's output, ``[m, n]``: of the chain's dtype, or a `QuantizedTensor`.

        Args:
            x: ``[m, k]``, row-major, in the chain's dtype; or from `quantize` where it reads FP8.
            out: Output, as this returns it; None allocates it.

        Raises:
            ShapeError: ``x`` or ``out`` has another shape or layout.
            FormatError: ``x`` or ``out`` has another format.
            UnsupportedError: A gradient is required.
        """
        chain = self._chain
        self._check("x", x, chain.layers[0].k, chain.reads)
        if out is None:
            out = self._empty(chain.layers[-1].n, chain.writes, self._static)
        else:
            self._check("out", out, chain.layers[-1].n, chain.writes)
        tensors = (y for y in (x, out) if isinstance(y, Tensor))
        if torch.is_grad_enabled() and any(y.requires_grad for y in tensors):
            raise UnsupportedError("a chain has no gradient; use torch.no_grad()")
        for launch in self._launches:
            launch.run(
                x if launch.left is None else launch.left, out if launch.out is None else launch.out
            )
        return out

    def empty_output(self) -> Matrix:
        """A tensor for ``out`` of a call."""
        return self._empty(self._chain.layers[-1].n, self._chain.writes, self._static)

    def _static_scale(self, place: int, scales: Granularity) -> Tensor | None:
        if scales is not TENSOR:
            return None
        columns = self._chain.layers[place].n
        return static_scale_of(
            "chain", self._epilogues[place], columns, self._chain.fp8, self._device
        )

    def _empty(self, columns: int, scales: Granularity, scale: Tensor | None) -> Matrix:
        fp8, half = self._chain.fp8.dtype, self._chain.half.dtype
        return empty_matrix(self._chain.m, columns, scales, scale, fp8, self._device, half)

    def _check(self, name: str, x: Matrix, columns: int, scales: Granularity) -> None:
        """Check format, shape and layout of an input or output."""
        wanted = self._chain.half.dtype if scales is NONE else self._chain.fp8.dtype
        data = x.data if isinstance(x, QuantizedTensor) else x
        found = x.granularity if isinstance(x, QuantizedTensor) else NONE
        if not isinstance(data, Tensor) or data.dtype is not wanted or found is not scales:
            kind = data.dtype if isinstance(data, Tensor) else type(x).__name__
            raise FormatError(
                f"chain: {name} is {kind} with {found.value} scales; expected {wanted} with "
                f"{scales.value} scales"
            )
        shape, device = (self._chain.m, columns), self._device
        if tuple(data.shape) != shape or data.device != device:
            raise ShapeError(
                f"chain: {name} is {list(data.shape)} on {data.device}; expected {list(shape)} on "
                f"{device}: a chain is chosen for one m"
            )
        right = not x.transposed if isinstance(x, QuantizedTensor) else data.is_contiguous()
        alignment = 16 if scales is not NONE else alignment_of(2 * columns)
        step = data.stride(0) * data.element_size() if shape[0] > 1 else 0
        if not right or (data.data_ptr() | step) % alignment:
            layout = "contiguous" if scales is NONE else "in the layout of quantize"
            raise ShapeError(
                f"chain: {name} has strides {data.stride()}; expected row-major, {layout}, every "
                f"row aligned to {alignment} bytes"
            )


def _check(chain: Chain, parameters: Sequence[Parameters]) -> torch.device:
    """Check weights; returns their device."""
    for place, (layer, (weight, *_)) in enumerate(zip(chain.layers, parameters, strict=True)):
        name = f"weight of layer {place + 1}"
        check_matrix("chain", name, weight)
        if weight.dtype is not chain.half.dtype:
            raise FormatError(f"chain: {name} is {weight.dtype}; expected {chain.half.dtype}")
        if tuple(weight.shape) != (layer.n, layer.k) or not weight.is_contiguous():
            raise ShapeError(
                f"chain: {name} is {list(weight.shape)} with strides {weight.stride()}; expected "
                f"{[layer.n, layer.k]}, row-major"
            )
        check_same_device("chain", **{"first weight": parameters[0][0], name: weight})
    device: torch.device = parameters[0][0].device
    if device_of(parameters[0][0]) != chain.device:
        raise UnsupportedError(
            f"chain: weights are on {device}; the chain is for {chain.device.product}"
        )
    return device


def _epilogue_of(chain: Chain, place: int, given: Parameters, eps: float) -> NormEpilogue:
    layer = chain.layers[place]
    form = norm_form(layer.epilogue)
    names = ("weight", "bias", "norm_weight", "norm_bias")
    check_same_device("chain", **dict(zip(names, given, strict=True)))
    _, bias, norm_weight, norm_bias = (None if x is None else x.detach() for x in given)
    norm = norm_of("chain", form.norm, eps)
    epilogue = NormEpilogue(norm, bias, norm_weight, norm_bias, form.last)
    if epilogue.name() != layer.epilogue:
        raise ShapeError(
            f"chain: layer {place + 1} is {layer.epilogue!r}, but its tensors are for "
            f"{epilogue.name()!r}; pass a bias for 'bias', and a weight or a bias of the norm for "
            "'affine'"
        )
    check_epilogue("chain", epilogue, chain.m, layer.n, chain.half.dtype)
    return aligned_epilogue(epilogue)


def _weight(problem: Problem, weight: Tensor) -> Matrix:
    """The right operand ``[k, n]``, quantized if the problem's is."""
    assert problem.b is not None  # an op with two operands
    if problem.b.granularity is NONE:
        return weight.detach().t()
    return quantize(weight.detach(), problem.b.granularity, out_format=problem.b.format).t()


@owned()
def _runner(
    kernel: Kernel, a: Matrix, b: Matrix | None, out: Matrix, epilogue: NormEpilogue
) -> Callable[[Any, Any], None]:
    """`launcher_of` with a workspace that belongs to this chain."""
    return launcher_of(kernel, a, b, out, epilogue)
