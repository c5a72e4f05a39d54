"""Chains in frozen choices: plans that may be forged are checked before they are used."""

from __future__ import annotations

from collections.abc import Sequence

from lokakern.chain.frozen_chain import checked_steps
from lokakern.conversion.chain_rivals import ChainJudge, SpanLayer
from lokakern.conversion.frozen_routes import ends_of
from lokakern.nn.chain_plan import ChainLayer, plan_text, read_plan
from lokakern.nn.routed_matmul import in_dtype
from lokakern.selection.frozen.answers import HeldAnswer
from lokakern.types import Granularity


def checked_plan(
    text: str, span: Sequence[SpanLayer], judge: ChainJudge, answer: HeldAnswer
) -> tuple[ChainLayer, ...]:
    """The layers of a plan of chains (`lokakern.nn.chain_plan`) from an answer.

    Raises:
        ChoicesError: It is no plan of these layers, or a kernel does not take its problem.
    """
    half = judge.half.dtype
    try:
        layers, *both = read_plan(text)
        is_plan = bool(text) and in_dtype(plan_text(layers, *both), half) == text
    except (ValueError, TypeError):
        layers, both, is_plan = (), [], False
    weights = [layer.weight for layer in layers]
    wanted = tuple(ChainLayer(*x.layer, x.eps, w) for x, w in zip(span, weights, strict=False))
    is_plan = is_plan and len(layers) == len(span) and layers == wanted
    answer.expect(is_plan, f"{text!r} is no plan of {', '.join(str(x.layer) for x in span)}")
    known = (Granularity.NONE, *judge.weights)
    answer.expect(all(weight in known for weight in weights), f"weights are {weights}")
    for is_aligned, segments in zip((True, False), both, strict=True):
        starts, every = zip(*segments, strict=True)
        for steps, m in ends_of(list(starts), every, is_aligned, answer):
            chain = judge.chain(tuple(x.layer for x in span), m)
            checked_steps(chain, steps, answer)
            is_kept = all(s.weight in (Granularity.NONE, weights[s.place]) for s in steps)
            answer.expect(is_kept, f"weights of {steps} are not {weights}")
    return layers
