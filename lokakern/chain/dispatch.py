"""Dispatch of chains: the kernel and output format of each layer for the fastest chain.

Times of layers add up, and so do squares of errors: a norm keeps the relative error of its input,
an activation increases it slightly (`lokakern.chain.candidates.GAINS`), and errors of layers are
independent. Rounding between two layers counts once. ``python -m lokakern.bench chain`` measures a
whole chain.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch

from lokakern.chain.candidates import (
    NONE,
    SCALED,
    TENSOR,
    Chain,
    Form,
    Layer,
    options_of,
    unquantized_steps,
    worth_measuring,
)
from lokakern.chain.choice import ChainChoice, is_faster, steps_of, time_of
from lokakern.chain.frozen_chain import frozen_choice, keep
from lokakern.chain.search import best_paths, fastest_within
from lokakern.epilogue import norm_form
from lokakern.errors import BudgetError, FormatError, ShapeError, UnknownNameError
from lokakern.functional.checks import granularity_named
from lokakern.problems import make_problem
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of, flag_of
from lokakern.selection.dispatcher import AnyDevice
from lokakern.types import REALISTIC_DISTRIBUTIONS, ErrorBudget, Format, Granularity

# Gradients are not inputs of a forward pass: with a static scale, rows that are small against eps
# vanish, because a norm does not scale them up.
GRADIENTS = "X12"
INPUTS = tuple(name for name in REALISTIC_DISTRIBUTIONS if name != GRADIENTS)
OTHER_INPUTS = ("residual", "gate", "cross", "residual_last")  # tensors of other layers


def dispatch_chain(
    layers: Sequence[tuple[int, int, str]],
    m: int,
    budget: ErrorBudget | float | None = None,
    *,
    distribution: str | Sequence[str] | None = None,
    device: AnyDevice = None,
    regime: str | None = None,
    in_granularity: Granularity | str | None = None,
    out_granularity: Granularity | str | None = None,
    prepared: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> ChainChoice:
    """The fastest chain of layers whose error as a whole is within the budget, from measurements.

    It chooses the kernel of each layer and the format of its output: ``dtype``, or FP8 with
    rowwise, 1x128 or static scales, these from the norm's bound. If a kernel reads FP8 and the
    layer before writes ``dtype``, a quantizer runs in between, and its time counts. Times add up,
    and so do squares of errors; all combinations are compared. The result is the unquantized chain
    if no other chain is within the budget and significantly faster, if the unquantized chain was
    not measured, or if frozen choices are in use and have none for these arguments.

    Args:
        layers: ``(n, k, epilogue)`` of each layer: output columns, input columns, and the epilogue,
            such as "bias+layer+affine" or "bias+block_rms(256)+hardswish".
        m: Rows of all layers.
        budget: Largest accepted row error of the chain's output against a float64 chain. None means
            the unquantized chain.
        distribution: Name (or names) of input distributions for errors; None means all realistic
            ones except gradients.
        device: A product such as "NVIDIA H200", a local `torch.device`, or a `Device`; None means
            the local device.
        regime: Regime of times.
        in_granularity: Granularity of an input in the device's E4M3: "tensor", "row" or "1x128";
            None for ``dtype``.
        out_granularity: Granularity of an output in E4M3, "tensor" if the norm bounds it; None for
            ``dtype``.
        prepared: Whether weights are prepared. With False, weights and tensors between layers are
            of ``dtype``; a kernel may quantize both, which its time includes.
        dtype: What is not FP8: bfloat16, or float16, in which outputs beyond 65504 are infinite.

    Raises:
        ShapeError: There are no layers, or sizes do not match.
        UnknownNameError: The epilogue is unknown or reads other tensors, or the distribution is
            unknown.
        FormatError: The granularity is unknown, or "tensor" for an unbounded output, or `prepared`
            is not a bool, or the dtype is another one.
        BudgetError: The budget is not a limit on the row error.
        DeviceError: The device is not in the database.
        ChoicesError: The frozen choices in use hold no chain of these layers, but something else.
    """
    limit = _limit_of(budget)
    chain = Chain(
        _checked(layers),
        _rows(m),
        dispatcher.device_named(device),
        dispatcher.distribution_names(distribution) or INPUTS,
        regime,
        _scales("in_granularity", in_granularity),
        _scales("out_granularity", out_granularity),
        flag_of("dispatch_chain", "prepared", prepared),
        _half(dtype),
    )
    if chain.writes is TENSOR and not chain.layers[-1].is_bounded:
        raise FormatError(
            "dispatch_chain: out_granularity is 'tensor', but the last layer's output "
            f"({chain.layers[-1].epilogue}) is not bounded; expected row or 1x128"
        )
    held = dispatcher.choices()
    if held is not None:
        return frozen_choice(chain, limit, held.origin)
    options = [options_of(chain, place) for place in range(len(chain.layers))]
    ends = (Form(scales, scales) for scales in (chain.reads, chain.writes))
    paths = tuple(best_paths(options, *ends))
    missing = tuple(worth_measuring(chain, (option for layer in options for option in layer)))
    plain = unquantized_steps(chain)
    note = ""
    if time_of(plain) is None:
        unknown = next(step.problem for step in plain if step.time is None)
        note = f"no unquantized kernel was measured at {unknown}; the unquantized chain is taken"
    best = None if note or limit is None else fastest_within(paths, limit**2)
    steps = plain if best is None or not is_faster(steps_of(best), plain) else steps_of(best)
    choice = ChainChoice(chain, limit, steps, plain, paths, missing, note)
    keep(choice)
    return choice


def _limit_of(budget: ErrorBudget | float | None) -> float | None:
    if budget is None:
        return None
    limits = budget_of(budget).limits
    if set(limits) != {"row_err"}:
        raise BudgetError(
            f"dispatch_chain: budget is {', '.join(limits)}; expected a limit on row_err, the only "
            "error that can be added over layers"
        )
    return limits["row_err"]


def _checked(layers: Sequence[tuple[int, int, str]]) -> tuple[Layer, ...]:
    if not isinstance(layers, Iterable):
        raise ShapeError(
            f"dispatch_chain: layers is {layers!r}; expected a sequence of (n, k, epilogue)"
        )
    found: list[Layer] = []
    for place, given in enumerate(layers):
        usable = isinstance(given, Sequence) and not isinstance(given, str) and len(given) in (2, 3)
        if not usable or not isinstance((*given, "none")[2], str):
            raise ShapeError(
                f"dispatch_chain: layer {place + 1} is {given!r}; expected (n, k, epilogue)"
            )
        layer = Layer(*given)
        problem = make_problem("gemm_norm", (1, layer.n, layer.k), epilogue=layer.epilogue)
        if found and problem.k != found[-1].n:
            raise ShapeError(
                f"dispatch_chain: layer {place + 1} reads {problem.k} columns, and layer {place} "
                f"writes {found[-1].n}"
            )
        others = [word for word in layer.epilogue.split("+") if word in OTHER_INPUTS]
        if others:
            raise UnknownNameError(
                f"dispatch_chain: layer {place + 1} has {' and '.join(others)}; a layer of a chain "
                "reads the layer before and nothing else"
            )
        found.append(Layer(problem.n, problem.k, str(norm_form(layer.epilogue))))
    if not found:
        raise ShapeError("dispatch_chain: there are no layers; expected at least one")
    return tuple(found)


def _rows(m: int) -> int:
    try:
        rows = operator.index(m)
    except TypeError:
        rows = 0
    if rows < 1 or isinstance(m, bool):
        raise ShapeError(f"dispatch_chain: m is {m!r}; expected an integer of at least 1")
    return rows


def _half(dtype: torch.dtype) -> Format:
    if dtype not in (torch.bfloat16, torch.float16):
        raise FormatError(
            f"dispatch_chain: dtype is {dtype!r}; expected torch.bfloat16 or torch.float16"
        )
    return Format.of(dtype)


def _scales(name: str, given: Granularity | str | None) -> Granularity:
    if given is None:
        return NONE
    found = granularity_named(f"dispatch_chain: {name}", given)
    if found not in SCALED:
        raise FormatError(f"dispatch_chain: {name} is {found.value!r}; expected tensor, row, 1x128")
    return found
