"""Gradients of a norm, an activation and the vectors around them in one op, as graphs can call it.

A compiler makes several kernels of them: one for the gradient of each element, and for each vector,
such as the bias of the product before, a sum in two steps. The kernel of op norm_backward reads its
operands once. With a relu and the sums for a bias it takes 6.0 us of an H200 where Inductor's
kernels take 10.1 (8192 x 512), and 2.8 and 4.2 us at 512 x 64.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lokakern.device import current_device
from lokakern.epilogue import NormEpilogue
from lokakern.functional.checks import row_major
from lokakern.gradients import NormGradients
from lokakern.native import recorded_op
from lokakern.norm import Norm, norm_named
from lokakern.registry.register import KERNELS, Kernel, load_kernels

KERNEL = "cuda.norm_backward"
EMULATION = "torch.norm_backward"
LONGEST_ROW, CHUNK = 8192, 8  # columns that the kernel takes: the most, and what divides them
LONGEST_BLOCK = 256  # of columns that are normalized together, if not all; a power of two
# In compiled code. Training steps of three layers with LayerNorm and relu take an H200 0.71 to 0.99
# times as long with the op at 128 to 2048 columns and 512 to 32768 rows, and at 4096 columns 0.98
# to 1.08.
LONGEST_COMPILED = 2048
# Behind a norm the op pays by the sums for vectors. With one or none such steps take 1.02 to 1.09
# times as long with it (1024 columns, 8192 rows), with two or more 0.85 to 0.89.
FEWEST_VECTORS = 2
_LIBRARY = torch.library.Library("lokakern", "FRAGMENT")


def takes(columns: int, block: int = 0) -> bool:
    """Whether `KERNEL` takes rows of so many columns, normalized in blocks, or whole: 0."""
    is_power = CHUNK <= block <= LONGEST_BLOCK and block & (block - 1) == 0
    is_block = block in (0, columns) or is_power
    return 0 < columns <= LONGEST_ROW and columns % CHUNK == 0 and is_block


def is_fast(columns: int, device: str) -> bool:
    """Whether the op runs `KERNEL` for gradients of so many columns."""
    if device != "cuda" or not takes(columns):
        return False
    return gradient_kernel(torch.device(device, torch.cuda.current_device())).name == KERNEL


def is_faster_compiled(columns: int, norm: Norm, vectors: int, device: str) -> bool:
    """Whether the op is faster than what a compiler makes of torch's steps.

    Args:
        columns: Of what is normalized.
        norm: Around it.
        vectors: How many of them get a gradient.
        device: Type of the device.
    """
    if norm.kind == "none":
        return vectors > 0 and is_fast(columns, device)
    is_whole = norm.block in (0, columns) and columns <= LONGEST_COMPILED
    return is_whole and vectors >= FEWEST_VECTORS and is_fast(columns, device)


def norm_gradient(
    dd: Tensor, y: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, norm: str, activation: str, eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of ``activation(norm(y))``.

    Args:
        dd: Gradient of the output, ``[m, n]``, in the dtype of y.
        y: Input of the norm, ``[m, n]``, bfloat16 or float16. With relu and without a norm, the
            output does.
        bias: Bias of the product before; its gradient is that of the sums of rows. Vectors are
            float32, or of the dtype of y.
        norm_weight: ``[n]``.
        norm_bias: ``[n]``.
        norm: Name of the norm, as of `lokakern.norm.norm_named`.
        activation: As of `NormEpilogue`.
        eps: Of the norm.

    Returns:
        The gradient of y, in its dtype, and in the dtype of the vectors those of the given ones,
        ``[vectors, n]``, summed in float32 in the order of `lokakern.sums`.
    """
    dy, sums = _empty(dd, y, bias, norm_weight, norm_bias)
    if not y.numel():
        return dy, sums.zero_()
    epilogue = NormEpilogue(
        norm_named(norm, eps), bias=bias, norm_weight=norm_weight, norm_bias=norm_bias,
        activation=activation,
    )  # fmt: skip
    kernel = gradient_kernel(y.device)
    if not takes(y.shape[1], epilogue.norm.block):
        kernel = KERNELS[EMULATION]
    dd, y = row_major(dd, apart=True), row_major(y, apart=True)
    # `KERNEL` rounds no sums: without room for them it leaves those of each 128 rows.
    adds = kernel.name == KERNEL and len(sums) > 0
    outputs = NormGradients(dy, None, None, None if adds or not len(sums) else sums)
    workspace = kernel.workspace(dd, y, outputs, epilogue)
    kernel.launch(dd, y, outputs, epilogue, workspace)
    if adds:
        from lokakern.kernels.cuda.gradient_sums import launch_sums  # needs NVRTC's bindings

        launch_sums(workspace[0], sums.view(-1))
    return dy, sums


def _empty(
    dd: Tensor, y: Tensor, bias: Tensor | None, norm_weight: Tensor | None,
    norm_bias: Tensor | None, *_given: object,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    vectors = [x for x in (bias, norm_weight, norm_bias) if x is not None]
    dtype = vectors[0].dtype if vectors else torch.float32
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    return dy, torch.empty((len(vectors), y.shape[1]), dtype=dtype, device=y.device)


@functools.cache
def gradient_kernel(device: torch.device) -> Kernel:
    """`KERNEL` where it runs, else its emulation."""
    load_kernels()
    kernel = KERNELS.get(KERNEL)
    here = current_device(device.type, device.index or 0)
    return kernel if kernel is not None and kernel.runs_on(here) else KERNELS[EMULATION]


recorded_op(
    _LIBRARY,
    "norm_gradient(Tensor dd, Tensor y, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias, "
    "str norm, str activation, float eps) -> (Tensor, Tensor)",
    norm_gradient,
    # A fixed layout would copy views of what is not there yet. And a sum of products that only
    # pointwise ops read stays a sum; for others Inductor copies it into each product in turn: nine
    # copies of 16 us of an H200 for MaskNet's ten towers at 8192 samples.
    tags=(torch.Tag.flexible_layout, torch.Tag.pointwise),
)
torch.library.register_fake("lokakern::norm_gradient", _empty, lib=_LIBRARY)
