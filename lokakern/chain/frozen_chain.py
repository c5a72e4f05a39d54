"""Chains in frozen choices: kept for `lokakern.freeze`, and read as a stranger's file.

A launch is text, ``place|kernel|reads|weight|writes``, with granularities of its operands and
output.
"""

from __future__ import annotations

from collections.abc import Sequence

from lokakern.chain.candidates import NONE, SCALED, TENSOR, Chain, Step, unquantized_steps
from lokakern.chain.choice import ChainChoice
from lokakern.errors import LokakernError
from lokakern.problems import make_problem
from lokakern.registry.register import KERNELS
from lokakern.selection import dispatcher
from lokakern.selection.frozen.answers import HeldAnswer, question
from lokakern.selection.table import Origin
from lokakern.types import Granularity, Problem

Launch = tuple[int, str, Granularity, Granularity, Granularity]
MOST_STEPS = 64


def keep(choice: ChainChoice) -> None:
    """Keep a choice, and the unquantized chain beside it, unless measurements were missing."""
    if choice.is_miss:
        return
    for limit, steps in ((None, choice.plain), (choice.budget, choice.steps)):
        texts = ["|".join(map(str, launch_of(step))) for step in steps]
        kernels = {step.kernel for step in steps}
        dispatcher.keep_answer(choice.chain.device, _asked(choice.chain, limit), texts, kernels)


def frozen_choice(chain: Chain, limit: float | None, origin: Origin) -> ChainChoice:
    """The choice of the frozen choices in use; the unquantized chain if they have none.

    Raises:
        ChoicesError: They hold launches that are no chain, or a kernel that does not take its
            problem.
    """
    found = [_held(chain, asked) for asked in (None, limit)]
    plain, steps = found[0] or unquantized_steps(chain), found[1]
    note = "" if steps else f"not among the choices of {origin}; the unquantized chain is taken"
    return ChainChoice(chain, limit, steps or plain, plain, note=note, origin=origin)


def _asked(chain: Chain, limit: float | None) -> str:
    return question(
        "dispatch_chain", layers=chain.layers, m=chain.m, row_err=limit,
        distributions=chain.distributions, regime=chain.regime, reads=chain.reads,
        writes=chain.writes, prepared=chain.prepared, dtype=chain.half,
    )  # fmt: skip


def _held(chain: Chain, limit: float | None) -> tuple[Step, ...] | None:
    asked = _asked(chain, limit)
    answer = dispatcher.held_answer(chain.device, asked)
    if answer is None:
        return None
    try:
        launches = [_launch(text) for text in answer.texts]
    except ValueError:
        answer.expect(False, f"{answer.texts} are no launches")
        raise
    return checked_steps(chain, launches, answer)


def launch_of(step: Step) -> Launch:
    """What tells a launch beside its chain."""
    problem = step.problem
    weight = NONE if problem.b is None else problem.b.granularity
    return step.place, step.kernel, problem.a.granularity, weight, problem.out_granularity


def _launch(text: str) -> Launch:
    place, kernel, *scales = text.split("|")
    reads, weight, writes = map(Granularity, scales)
    return int(place), kernel, reads, weight, writes


def checked_steps(chain: Chain, launches: Sequence[Launch], answer: HeldAnswer) -> tuple[Step, ...]:
    """The steps of a chain from launches in an answer, which may be forged.

    Each layer has one kernel of op gemm_norm, in order, with at most one conversion of its input
    before it; each launch reads what the one before wrote, a static scale also as rowwise or 1x128
    ones; and every kernel takes its problem.

    Raises:
        ChoicesError: It is not so.
    """
    answer.expect(0 < len(launches) <= MOST_STEPS, f"a chain has {len(launches)} launches")
    form, is_static, next_place, is_converted = chain.reads, False, 0, False
    steps: list[Step] = []
    for launch in launches:
        place, name, reads, _, writes = launch
        kernel = KERNELS.get(name) if name in answer.kernels else None
        op = "" if kernel is None else kernel.op
        answer.expect(kernel is not None, f"{name!r} is no kernel of the file")
        assert kernel is not None
        fits = reads is form or (is_static and reads in SCALED)
        fits = fits and place == next_place < len(chain.layers)
        if op == "gemm_norm":
            is_static = writes is TENSOR
            fits = fits and (not is_static or chain.layers[place].is_bounded)
            next_place, is_converted = next_place + 1, False
        else:
            fits = fits and not is_converted and (op == "quantize" or reads is chain.reads)
            is_static, is_converted = False, True
        answer.expect(fits, f"launch {len(steps) + 1} of a chain does not fit: {launch}")
        try:
            problem = _problem(chain, launch, op)
            refusal = kernel.refusal(problem, chain.device)
        except LokakernError as error:
            answer.expect(False, f"launch {len(steps) + 1} of a chain: {error}")
            raise
        answer.expect(refusal is None, f"{name} does not take {problem}: {refusal}")
        answer.expect(chain.takes(kernel), f"{name} takes no float16")
        form = writes
        steps.append(Step(place, problem, name))
    is_whole = next_place == len(chain.layers) and not is_converted and form is chain.writes
    answer.expect(is_whole, f"a chain of {len(chain.layers)} layers ends after {launches[-1]}")
    return tuple(steps)


def _problem(chain: Chain, launch: Launch, op: str) -> Problem:
    """The problem of a launch.

    Raises:
        LokakernError: There is none.
    """
    place, _, reads, weight, writes = launch
    k = chain.layers[place].k
    if op == "gemm_norm":
        return chain.problem(place, reads, weight, writes)
    if op == "dequantize":
        problem = chain.dequantizing(k)
    else:
        problem = make_problem(
            "quantize", (chain.m, k), a=chain.operand(k), out_format=chain.fp8,
            out_granularity=writes,
        )  # fmt: skip
    if launch != (place, launch[1], problem.a.granularity, NONE, problem.out_granularity):
        raise LokakernError(f"{launch} is no launch of op {op}")
    return problem
