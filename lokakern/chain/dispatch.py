"""Dispatch of chains: per layer the kernel and the output's format, so that the whole is fastest.

Times of the layers add up, and so do squares of their errors: a norm keeps the relative error that
it is given, an activation enlarges it somewhat (`chain_ways.GAINS`), and what a layer adds has
nothing to do with it. What is rounded between two layers counts once. What is chosen can then be
measured whole, by ``python -m lokakern.bench chain``.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from lokakern.chain.candidates import (
    NONE,
    SCALED,
    TENSOR,
    Chain,
    Form,
    Layer,
    unquantized_steps,
    ways_of,
    worth_measuring,
)
from lokakern.chain.choice import ChainChoice, is_faster, steps_of, time_of
from lokakern.chain.search import best_paths, fastest_within
from lokakern.epilogue import norm_form
from lokakern.errors import BudgetError, FormatError, ShapeError, UnknownNameError
from lokakern.functional.checks import granularity_named
from lokakern.problems import make_problem
from lokakern.selection import dispatcher
from lokakern.selection.arguments import budget_of, flag_of
from lokakern.selection.dispatcher import AnyDevice
from lokakern.types import REALISTIC_DISTRIBUTIONS, ErrorBudget, Granularity

# Gradients, which no forward pass reads: under a scale that is known beforehand rows that are small
# against eps vanish, as no norm makes them large.
GRADIENTS = "X12"
INPUTS = tuple(name for name in REALISTIC_DISTRIBUTIONS if name != GRADIENTS)
BESIDE = ("residual", "gate", "cross", "residual_last")  # words for tensors of other layers


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
) -> ChainChoice:
    """The fastest chain of layers whose error as a whole is within the budget, from measurements.

    Per layer it chooses the kernel and the format of its output: bfloat16, or FP8 with scales of
    rows, of 1x128, or with one that the norm bounds (`gemm_norm`). Where a layer's kernel reads FP8
    and the layer before writes bfloat16, a quantizer stands between them, and its time counts.
    Times add up, and so do squares of errors; all combinations are weighed.
    The unquantized chain is always legal: it is the answer where nothing else is within the budget,
    nothing is faster beyond noise, or it was not measured itself; and of frozen choices, because
    `lokakern.freeze` keeps no chains.

    Args:
        layers: ``(n, k, epilogue)`` each: columns of the output and of the input, which is the
            output of the layer before, and what comes after the product, as "bias+layer+affine" or
            "bias+block_rms(256)+hardswish".
        m: Rows of all of them.
        budget: Largest accepted row error of the output against a float64 chain, on the whole.
            None means the unquantized chain.
        distribution: Name (or names) of the input distributions to judge errors on; None means all
            realistic ones but that of gradients.
        device: A product such as "NVIDIA H200", a `torch.device` that is here, or a `Device`; None
            means the one here.
        regime: Of times.
        in_granularity: Scales of an input that comes in the device's E4M3: "tensor", "row" or
            "1x128"; None where it is bfloat16.
        out_granularity: Scales of an output in E4M3, "tensor" where the norm bounds it; None for
            bfloat16.
        prepared: Whether weights are quantized ahead. False leaves them and what is between layers
            in bfloat16; a kernel may quantize both, which its time includes.

    Raises:
        ShapeError: There are no layers, or sizes do not fit each other.
        UnknownNameError: No such epilogue, or one that reads other tensors; no such distribution.
        FormatError: No such granularity, one scale for an output that nothing bounds, or `prepared`
            is neither True nor False.
        BudgetError: The budget is not a limit on the row error.
        DeviceError: The database does not know the device.
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
    )
    if chain.writes is TENSOR and not chain.layers[-1].is_bounded:
        raise FormatError(
            "dispatch_chain: out_granularity is 'tensor', and nothing bounds the last layer's "
            f"output ({chain.layers[-1].epilogue}); expected row or 1x128"
        )
    held = dispatcher.choices()
    if held is not None:
        plain = unquantized_steps(chain)
        note = f"chains are not in {held.origin}; the unquantized chain is taken"
        return ChainChoice(chain, limit, plain, plain, note=note)
    ways = [ways_of(chain, place) for place in range(len(chain.layers))]
    ends = (Form(scales, scales) for scales in (chain.reads, chain.writes))
    paths = tuple(best_paths(ways, *ends))
    missing = tuple(worth_measuring(chain, (way for layer in ways for way in layer)))
    plain = unquantized_steps(chain)
    note = ""
    if time_of(plain) is None:
        unknown = next(step.problem for step in plain if step.time is None)
        note = f"no unquantized kernel was measured at {unknown}; the unquantized chain is taken"
    best = None if note or limit is None else fastest_within(paths, limit**2)
    steps = plain if best is None or not is_faster(steps_of(best), plain) else steps_of(best)
    return ChainChoice(chain, limit, steps, plain, paths, missing, note)


def _limit_of(budget: ErrorBudget | float | None) -> float | None:
    if budget is None:
        return None
    limits = budget_of(budget).limits
    if set(limits) != {"row_err"}:
        raise BudgetError(
            f"dispatch_chain: budget is {', '.join(limits)}; expected a limit on row_err: of the "
            "other errors nobody knows how they add up"
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
        beside = [word for word in layer.epilogue.split("+") if word in BESIDE]
        if beside:
            raise UnknownNameError(
                f"dispatch_chain: layer {place + 1} has {' and '.join(beside)}; a layer of a chain "
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


def _scales(name: str, given: Granularity | str | None) -> Granularity:
    if given is None:
        return NONE
    found = granularity_named(f"dispatch_chain: {name}", given)
    if found not in SCALED:
        raise FormatError(f"dispatch_chain: {name} is {found.value!r}; expected tensor, row, 1x128")
    return found
