"""Routes of kernels that a caller names, for accuracy trials on any device.

No measurement is read, so that a trial needs none: where a device has no kernel with the asked
scales, their emulation runs, slowly and with the same rounding. Nothing says that these kernels are
fast, or that their errors are within a budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lokakern.conversion.routes import GEMMS, NO_GRADIENTS, MRange, Route, problem_of, within
from lokakern.errors import FormatError, UnknownNameError, UnsupportedError
from lokakern.nn.routed_matmul import PLAIN, Segments, route_text
from lokakern.registry.register import Kernel, kernel_named, kernels_for
from lokakern.registry.unmeasured import NEW_KERNELS
from lokakern.selection.weight_forms import FORMS, with_weight
from lokakern.types import Device, Format, Granularity, Problem

FORCED = "forced, not chosen by measurement"
UNQUANTIZED = "bf16"
_TENSOR = (Granularity.TENSOR, Granularity.TENSOR)
_ROW = (Granularity.ROW, Granularity.ROW)
# Scales of the left and the right operand: of products with a weight, and of the gradient of a
# weight, a product of two activations.
SCALES = {
    "tensor": (_TENSOR, _TENSOR),
    "row": (_ROW, _ROW),
    "1x128": (
        (Granularity.GROUP, Granularity.BLOCK),
        (Granularity.GROUP, Granularity.GROUP),
    ),
}
Kernels = str | Mapping[str, str]


@dataclass(frozen=True)
class Forced:
    """The kernels that a caller names, instead of a budget.

    Attributes:
        names: For each GEMM of `GEMMS`: a key of `SCALES`, "bf16", or the name of a kernel.
    """

    names: tuple[str, ...]


def forced_by(kernels: Kernels) -> Forced:
    """Check the argument ``kernels`` of `convert`.

    Raises:
        FormatError: It is neither text nor a mapping of texts, or it is empty.
        UnknownNameError: A GEMM, or a kernel, is unknown.
    """
    named = dict.fromkeys(GEMMS, kernels) if isinstance(kernels, str) else kernels
    is_known = isinstance(named, Mapping) and all(isinstance(x, str) for x in named.values())
    if not is_known or not named:
        raise FormatError(
            f"convert: kernels is {kernels!r}; expected a text, or a mapping of texts by GEMM such "
            "as {'output': 'row', 'grad_input': 'row'}"
        )
    for gemm, name in named.items():
        if gemm not in GEMMS:
            raise UnknownNameError(
                f"convert: kernels names a GEMM {gemm!r}; expected some of {', '.join(GEMMS)}"
            )
        _check_name(name)
    return Forced(tuple(str(named.get(gemm, UNQUANTIZED)) for gemm in GEMMS))


def _check_name(name: str) -> None:
    known = {kernel.name for kernel in kernels_for("gemm") if kernel.quantizes}
    if name not in {*SCALES, UNQUANTIZED, *known}:
        raise UnknownNameError(
            f"convert: kernels names {name!r}, which is no kernel of op gemm that quantizes; "
            f"expected {', '.join(SCALES)}, {UNQUANTIZED}, or such a kernel of `python -m "
            "lokakern.bench list kernels`"
        )


def forced_routes(
    n: int, k: int, forced: Forced, device: Device, *, has_bias: bool = False,
    inference: bool = False, m_range: MRange | None = None, site: str = "", is_turned: bool = False,
    half: Format = Format.BFLOAT16,
) -> tuple[Route, ...]:  # fmt: skip
    """Routes of the three GEMMs of a layer ``Y[m, n] = X[m, k] W[n, k]^T`` by named kernels.

    Args:
        n: Outputs.
        k: Inputs.
        forced: The kernels.
        device: Device whose kernels are used, or emulated elsewhere.
        has_bias: Whether the output has a bias.
        inference: Whether weights are quantized once, without gradients.
        m_range: Smallest and largest m that is quantized; None: all m.
        site: Name of the layer, for errors.
        is_turned: As of `routes_of`.
        half: As of `routes_of`.

    Raises:
        UnsupportedError: A kernel that was named does not take a product.
    """
    found = []
    for gemm, name in zip(GEMMS, forced.names, strict=True):
        if inference and gemm != "output":
            found.append(Route(gemm, PLAIN, NO_GRADIENTS))
        elif name == UNQUANTIZED:
            found.append(Route(gemm, PLAIN, FORCED))
        else:
            turned = is_turned and not inference
            epilogue = "bias" if has_bias and gemm == "output" and not turned else "none"
            at = [problem_of(gemm, m, n, k, epilogue, turned, half) for m in (16, 17)]
            kernels, reasons = zip(
                *(_kernel_for(p, gemm, name, device, inference) for p in at), strict=True
            )
            if kernels[0] is None and name not in SCALES:
                raise UnsupportedError(
                    f"convert: {name} does not compute {gemm} of layer {site!r} (n={n} k={k}) on "
                    f"{device.product}: {reasons[0]}; leave the layer out with skip=, or name "
                    f"another kernel, scales or 'bf16' for this GEMM, such as "
                    f"kernels={{'{gemm}': 'bf16', ...}}"
                )
            found.append(_route(gemm, kernels, reasons, m_range))
    return tuple(found)


def _route(
    gemm: str, kernels: tuple[Kernel | None, ...], reasons: tuple[str, ...], m_range: MRange | None
) -> Route:
    """The route of kernels for m that 16 divides and for other m, None for bf16."""
    segments: list[Segments] = []
    for kernel in kernels:
        every: Segments = [(0, kernel.name if kernel else "")]
        segments.append(every if m_range is None else within(every, m_range, ""))
    known = [kernel for kernel in kernels if kernel is not None]
    is_weight = gemm != "grad_weight"
    form = known[0].b_granularity if known and is_weight else Granularity.NONE
    why = [FORCED]
    if any("any" in kernel.architectures for kernel in known):
        why.append("emulated")
    if not known:
        why.append(f"bf16, because {reasons[0]}")
    elif kernels[1] is None:
        why.append(f"bf16 at m that 16 does not divide, because {reasons[1]}")
    return Route(gemm, route_text(form, segments[0], segments[1]), "; ".join(why))


def _kernel_for(
    problem: Problem, gemm: str, name: str, device: Device, inference: bool
) -> tuple[Kernel | None, str]:
    """The kernel of this name, or the first with these scales; None with the reason."""
    if name not in SCALES:
        kernel = kernel_named(name)
        reason = _refusal(kernel, problem, gemm, device, inference)
        return (kernel, "") if reason is None else (None, reason)
    scales = SCALES[name][gemm == "grad_weight"]
    alike = [
        kernel
        for kernel in kernels_for("gemm", device)
        if (kernel.granularity, kernel.b_granularity) == scales
    ]
    reasons = []
    for kernel in sorted(alike, key=lambda x: _rank(x, device)):
        reason = _refusal(kernel, problem, gemm, device, inference)
        if reason is None:
            return kernel, ""
        reasons.append(f"{kernel.name}: {reason}")
    return None, "; ".join(reasons[-2:])


def _rank(kernel: Kernel, device: Device) -> tuple[bool, bool, bool, bool, bool, str]:
    """Order among kernels with the same scales, the same wherever the package is installed.

    Kernels of lokakern take more sizes than those of torch and of libraries; new ones come last.
    """
    is_emulation = "any" in kernel.architectures
    is_fast = "fast" in kernel.accumulation
    is_torch = kernel.language == "torch"
    is_new = (kernel.name, device.architecture) in NEW_KERNELS
    return is_emulation, is_fast, bool(kernel.libraries), is_torch, is_new, kernel.name


def _refusal(
    kernel: Kernel, problem: Problem, gemm: str, device: Device, inference: bool
) -> str | None:
    """Why a kernel does not compute a GEMM of a module, or None."""
    reason = None if inference else kernel.refusal(problem, device)
    if reason is not None or gemm == "grad_weight":
        return reason
    form = kernel.b_granularity
    if form not in FORMS:
        return f"it reads weights with {form} scales, and modules have {', '.join(FORMS)} scales"
    reason = kernel.refusal(with_weight(problem, form, device), device)
    is_same = reason is None or inference
    return reason if is_same else f"it reads no weight that was quantized ahead: {reason}"
