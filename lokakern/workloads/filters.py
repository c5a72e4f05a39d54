"""Conditions on problems from the command line, such as ``n * k <= 2**18 and m >= 8192``."""

from __future__ import annotations

import ast
import itertools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lokakern.errors import SuiteError
from lokakern.types import Granularity, Problem

NAMES = ("m", "n", "k", "batch", "prepared", "bias", "epilogue", "scale", "out")
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.Pow: operator.pow,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge, ast.Not: operator.not_, ast.USub: operator.neg,
}  # fmt: skip
_WORDS: dict[str, int | str] = {"epilogue": "none", "scale": "row", "out": "bfloat16"}
_LARGEST_EXPONENT = 64  # a typing error must not run for an hour


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on a problem."""

    text: str
    tree: ast.expr

    def holds(self, problem: Problem) -> bool:
        return bool(_value(self.tree, facts_of(problem), self.text))

    def __str__(self) -> str:
        return self.text


def facts_of(problem: Problem) -> dict[str, int | str]:
    """Names and values in conditions.

    ``scale`` is the scaling granularity of a, of a quantizer's output, or of a prepared weight if a
    is not quantized.
    """
    quantizer = problem.op in ("quantize", "norm_quantize", "norm_backward")
    scale = problem.out_granularity if quantizer else problem.a.granularity
    if scale is Granularity.NONE and problem.prepared and problem.b is not None:
        scale = problem.b.granularity
    return {
        "m": problem.m, "n": problem.n, "k": problem.k, "batch": problem.batch,
        "prepared": int(problem.prepared), "bias": int("bias" in problem.epilogue),
        "epilogue": problem.epilogue, "scale": scale.value, "out": problem.out_format.value,
    }  # fmt: skip


def parse_condition(text: str) -> Condition:
    """Parse a condition.

    It has integers, quoted words, the names in `NAMES`, ``+ - * // % **``, comparisons, ``and``,
    ``or``, ``not`` and parentheses.

    Raises:
        SuiteError: The text is not a condition.
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        _value(tree, dict.fromkeys(NAMES, 1) | _WORDS, text)
    except (SyntaxError, ValueError, RecursionError):
        raise _refusal(text) from None
    return Condition(text.strip(), tree)


def _refusal(text: str) -> SuiteError:
    return SuiteError(
        f"condition {text!r} cannot be computed; expected a comparison of {', '.join(NAMES)}, "
        "such as 'n * k <= 2**18 and m >= 8192' or \"scale == 'row'\""
    )


def _value(tree: ast.expr, facts: Mapping[str, int | str], text: str) -> Any:
    def value(node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=int() | str() as constant):
                return constant
            case ast.Name(id=name) if name.lower() in facts:
                return facts[name.lower()]
            case ast.BoolOp(op=ast.And(), values=parts):
                return all([value(part) for part in parts])
            case ast.BoolOp(values=parts):
                return any([value(part) for part in parts])
            case ast.UnaryOp(op=sign, operand=part) if type(sign) in _OPERATORS:
                return _OPERATORS[type(sign)](value(part))
            case ast.BinOp(left=left, op=sign, right=right) if type(sign) in _OPERATORS:
                found = value(left), value(right)
                if not all(isinstance(x, int) for x in found):
                    raise TypeError
                if isinstance(sign, ast.Pow) and not 0 <= found[1] <= _LARGEST_EXPONENT:
                    raise ValueError
                return _OPERATORS[type(sign)](*found)
            case ast.Compare(left=left, ops=signs, comparators=rest):
                found_all = [value(part) for part in (left, *rest)]
                pairs = itertools.pairwise(found_all)
                return all(
                    _OPERATORS[type(sign)](*pair) for sign, pair in zip(signs, pairs, strict=True)
                )
        raise _refusal(text)

    try:
        return value(tree)
    except (KeyError, TypeError, ValueError, ArithmeticError):  # KeyError: an unknown operator
        raise _refusal(text) from None
