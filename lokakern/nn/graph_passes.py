"""What a converted model's graph is given before Inductor generates its code.

The passes change a graph of inference that has a product of `lokakern.convert` in it, and no other:
they save memory traffic around such products, which Inductor does not see. They run after
Inductor's own passes, behind those of the user that were set before. What is compiled for programs
without Python stays as it is. Without Inductor's interface for passes, products are right, but
nothing is saved.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lokakern.nn.concatenated_tokens import multiply_parts, write_terms
from lokakern.nn.summed_norm import norm_sums

try:
    from torch._inductor import config, custom_graph_pass
    from torch._inductor.virtualized import V
except ImportError:
    config = custom_graph_pass = V = None  # type: ignore[assignment]

PASSES: tuple[Callable[[fx.Graph], None], ...] = (multiply_parts, norm_sums, write_terms)
PRODUCTS = ("routed_gemm", "activated_gemm", "routed_chain")
_FILES = ("graph_passes.py", "concatenated_tokens.py", "summed_norm.py", "graph_edit.py")
# A pass of this class is told whether a graph is of inference; earlier torch has none.
_TOLD: Any = getattr(custom_graph_pass, "CustomInferenceAwareGraphPass", None)
_BASE: Any = _TOLD or getattr(custom_graph_pass, "CustomGraphPass", object)


def is_converted(graph: fx.Graph) -> bool:
    """Whether a graph has a product by the kernels of `lokakern.convert`."""
    products = {getattr(torch.ops.lokakern, name).default for name in PRODUCTS}
    return any(node.target in products for node in graph.nodes)


def run_passes(graph: fx.Graph) -> None:
    """Apply all passes to the graph of a converted model."""
    if is_converted(graph):
        for run in PASSES:
            run(graph)


class Passes(_BASE):  # type: ignore[misc]
    """Those of the user, then ours."""

    def __init__(self, before: Any) -> None:
        several = isinstance(before, list | tuple)
        self.before = tuple(before) if several else () if before is None else (before,)

    def __call__(self, graph: fx.Graph, is_inference: bool = True) -> None:
        """Change a graph."""
        for run in self.before:
            is_told = _TOLD is not None and isinstance(run, _TOLD)
            _ = run(graph, is_inference) if is_told else run(graph)
        for_python = not config.cpp_wrapper and getattr(V, "aot_compilation", False) is not True
        if is_inference and for_python:
            run_passes(graph)

    def uuid(self) -> Any:
        """Of the sources, and of the user's passes; None, which caches nothing, without one."""
        theirs = [run.uuid() if hasattr(run, "uuid") else None for run in self.before]
        files = tuple(str(Path(__file__).with_name(name)) for name in _FILES)
        if None in theirs:
            return None
        return custom_graph_pass.get_hash_for_files(files), *theirs


def install_passes() -> None:
    """Let Inductor run the passes, from the next graph on that this thread compiles."""
    before = getattr(config, "post_grad_custom_post_pass", config)  # None without Inductor
    if before is not config and not isinstance(before, Passes):
        config.post_grad_custom_post_pass = Passes(before)
