"""What a converted model's graph is given before Inductor generates its code.

The passes change a graph that has an op of `lokakern.convert` in it, and no other: they save memory
traffic that Inductor does not see. They run after Inductor's own passes, behind those of the user
that were set before. `PASSES` are for inference, with ops of this library, so that what is compiled
for programs without Python stays as it is; `EXACT_PASSES` change no bit, and no graph is without
them. `JOINT_PASSES` change forward and backward pass together, before Inductor's own passes and
before it splits them. Without Inductor's interface for passes, results are right, but nothing is
saved.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lokakern.nn.added_products import add_in_products
from lokakern.nn.concatenated_tokens import multiply_parts, write_terms
from lokakern.nn.concatenated_weights import round_concatenated
from lokakern.nn.crossed_gradients import quantize_behind_crosses
from lokakern.nn.crossed_products import cross_in_products
from lokakern.nn.few_terms import sum_few_terms
from lokakern.nn.flat_sums import IS_NEEDED, sum_to_vectors
from lokakern.nn.late_taps import tap_at_the_end
from lokakern.nn.normalized_blocks import keep_blocks
from lokakern.nn.rectified_gradients import quantize_behind_relus
from lokakern.nn.rectified_products import rectify_in_products
from lokakern.nn.saved_inputs import quantize_in_products
from lokakern.nn.short_attention import (
    activate_in_attention,
    attend_at_once,
    attend_in_training,
)
from lokakern.nn.summed_norm import norm_sums
from lokakern.nn.wide_gradients import write_in_float32

try:
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.utils import get_donated_idxs
    from torch._inductor.virtualized import V
except ImportError:
    config = custom_graph_pass = get_donated_idxs = V = None  # type: ignore[assignment]

PASSES: tuple[Callable[[fx.Graph], None], ...] = (
    multiply_parts, norm_sums, write_terms, attend_at_once, activate_in_attention,
    rectify_in_products, sum_few_terms,
)  # fmt: skip
EXACT_PASSES: tuple[Callable[[fx.Graph], None], ...] = (
    quantize_in_products, keep_blocks, *([sum_to_vectors] if IS_NEEDED else []), tap_at_the_end,
)  # fmt: skip
JOINT_PASSES: tuple[Callable[[fx.Graph], None], ...] = (
    quantize_behind_crosses, attend_in_training, add_in_products, round_concatenated,
    cross_in_products, rectify_in_products, quantize_behind_relus, write_in_float32,
    sum_few_terms,
)  # fmt: skip
OPS = (
    "routed_gemm", "activated_gemm", "rectified_product", "crossed_product", "routed_chain",
    "weight_gradient", "wide_weight_gradient", "saved_weight_gradient", "norm_gradient",
    "bias_gradient", "logit",
)  # fmt: skip
# A pass of this class is told whether a graph is of inference; earlier torch has none.
_TOLD: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
_UNTOLD: Any = getattr(custom_graph_pass, "CustomGraphPass", object)
_BASE: Any = _TOLD or _UNTOLD


def is_converted(graph: fx.Graph) -> bool:
    """Whether a graph has an op of `lokakern.convert`."""
    ops = {getattr(torch.ops.lokakern, name).default for name in OPS}
    return any(node.target in ops for node in graph.nodes)


def run_passes(graph: fx.Graph, *, is_exact: bool) -> None:
    """Apply the passes to the graph of a converted model; if ``is_exact``, those in any graph."""
    if is_converted(graph):
        for run in EXACT_PASSES if is_exact else (*PASSES, *EXACT_PASSES):
            run(graph)


class Passes(_BASE):  # type: ignore[misc]
    """Those of the user, then ours."""

    def __init__(self, before: Any) -> None:
        self.before = _several(before)

    def __call__(self, graph: fx.Graph, is_inference: bool = True) -> None:
        """Change a graph."""
        for run in self.before:
            is_told = _TOLD is not None and isinstance(run, _TOLD)
            _ = run(graph, is_inference) if is_told else run(graph)
        for_python = not config.cpp_wrapper and getattr(V, "aot_compilation", False) is not True
        run_passes(graph, is_exact=not (is_inference and for_python))

    def uuid(self) -> Any:
        """Of all that Inductor's key omits, and of the user's passes; None caches nothing."""
        return _uuid(self.before)


class JointPasses(_UNTOLD):  # type: ignore[misc]
    """Those of the user, then ours, over forward and backward pass."""

    def __init__(self, before: Any) -> None:
        self.before = _several(before)

    def __call__(self, graph: fx.Graph) -> None:
        """Change a graph."""
        for run in self.before:
            run(graph)
        # Inductor calls this for graphs of inference, too.
        trains = any("tangents" in x.name for x in graph.find_nodes(op="placeholder"))
        if trains and is_converted(graph):
            for run in JOINT_PASSES:
                run(graph)

    def uuid(self) -> Any:
        """As of `Passes`."""
        return _uuid(self.before)


def _several(before: Any) -> tuple[Any, ...]:
    several = isinstance(before, list | tuple)
    return tuple(before) if several else () if before is None else (before,)


def _uuid(before: tuple[Any, ...]) -> Any:
    theirs = [run.uuid() if hasattr(run, "uuid") else None for run in before]
    if None in theirs:
        return None
    # The code of a backward pass that may be called once overwrites these saved tensors. Inductor's
    # key omits them, and gave that code to `retain_graph=True`: wrong gradients the second time.
    donated = tuple(get_donated_idxs() or ())
    return sources_digest(str(Path(__file__).parents[1])), *theirs, donated


@functools.cache
def sources_digest(package: str) -> str:
    """SHA-256 of all Python files of a package, in folders behind links, too.

    Of this one it stands for passes, lowerings, and the shapes and kernels of ops. 3 MB take 12 ms.
    """
    digest = hashlib.sha256()
    for folder, folders, names in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(names):
            if name.endswith(".py"):
                path = Path(folder, name)
                digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


def install_passes() -> None:
    """Let Inductor run the passes, from the next graph on that it compiles.

    From torch 2.12 on each thread has settings of its own, and reads defaults where it made none:
    one that runs a backward pass compiles that, too.
    """
    for name, kind in (
        ("post_grad_custom_post_pass", Passes), ("joint_custom_pre_pass", JointPasses),
    ):  # fmt: skip
        before = getattr(config, name, config)  # None without Inductor
        if before is not config and not isinstance(before, kind):
            setattr(config, name, kind(before))
        setting = getattr(config, "_config", {}).get(name)
        if setting is not None and not isinstance(setting.default, kind):
            setting.default = kind(setting.default)
