"""Count the plausible layers and quantizers of MLPs for which dispatch has a number.

    python scripts/count_answers.py [--device NAME]

Twelve widths for n and for k at three m, with eight questions each. Prints, for each question, how
many are measured, predicted, and neither, and why these are not. Set LOKAKERN_DB to a file that
does not exist to count the shipped files alone.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import lokakern
from lokakern.types import Format, Granularity, Operand

WIDTHS = (128, 256, 384, 512, 768, 1024, 1280, 1536, 2048, 2560, 3072, 4096)
ROWS = (512, 2048, 8192)
QUESTIONS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "gemm": ("gemm", 0.06, {}),
    "gemm, prepared, bias": ("gemm", 0.06, {"prepared": True, "epilogue": "bias"}),
    "scaled_gemm": ("scaled_gemm", 0.06, {}),
    "scaled_gemm, 1x128": (
        "scaled_gemm", 0.06, {"a": Operand(Format.E4M3FN, Granularity.GROUP)},
    ),
    "gemm_norm, bias": ("gemm_norm", None, {"epilogue": "bias+layer+affine"}),
    "gemm_norm, budget": ("gemm_norm", 0.06, {"epilogue": "layer+affine"}),
    "quantize, budget": ("quantize", 0.06, {}),
    "norm_quantize, budget": ("norm_quantize", 0.06, {"epilogue": "layer+affine"}),
}  # fmt: skip


def answers(
    device: str, pairs: Sequence[tuple[int, int]], why: Counter[str] | None = None
) -> dict[str, list[str]]:
    """For each question "measured", "predicted" or "none", at each m, n and k."""
    found: dict[str, list[str]] = {}
    for name, (op, budget, fields) in QUESTIONS.items():
        for m, (n, k) in itertools.product(ROWS, pairs):
            shape = (m, n, k) if "gemm" in op else (m, k)
            choice = lokakern.dispatch(op, shape, budget, device=device, **fields)
            how = "measured" if not choice.is_miss else "predicted" if choice.predicted else "none"
            found.setdefault(name, []).append(how)
            if how == "none" and why is not None:
                why[f"{name}: {re.sub('[0-9]+', '#', choice.pick.note)}"] += 1
    return found


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="NVIDIA H200")
    device = parser.parse_args().device
    why: Counter[str] = Counter()
    found = answers(device, list(itertools.product(WIDTHS, WIDTHS)), why)
    found["all"] = list(itertools.chain.from_iterable(found.values()))
    for name, ways in found.items():
        count = Counter(ways)
        words = ", ".join(f"{count[how]} {how}" for how in ("measured", "predicted", "none"))
        print(f"{name:24s} {len(ways):5d}: {words} ({count['none'] / len(ways):.1%})")
    for words, times in why.most_common():
        print(f"{times:5d} x {words}")


if __name__ == "__main__":
    main()
