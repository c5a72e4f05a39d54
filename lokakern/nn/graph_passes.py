"""What a converted model's graph is given before Inductor generates its code.

The passes change a graph that has a product of `lokakern.convert` in it, and no other: they save
memory traffic around such products, which Inductor does not see. They run after Inductor's own
passes, behind a pass of the user's, if there is one. Without Inductor's interface for passes,
products are right, but nothing is saved.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import fx

from lokakern.nn.concatenated_tokens import multiply_parts, write_terms
from lokakern.nn.summed_norm import norm_sums

PASSES: tuple[Callable[[fx.Graph], None], ...] = (multiply_parts, norm_sums, write_terms)
PRODUCTS = ("routed_gemm", "activated_gemm", "routed_chain")
_FILES = ("graph_passes.py", "concatenated_tokens.py", "summed_norm.py", "graph_edit.py")


def is_converted(graph: fx.Graph) -> bool:
    """Whether a graph has a product by the kernels of `lokakern.convert`."""
    products = {getattr(torch.ops.lokakern, name).default for name in PRODUCTS}
    return any(node.target in products for node in graph.nodes)


def run_passes(graph: fx.Graph) -> None:
    """Apply all passes to the graph of a converted model."""
    if is_converted(graph):
        for run in PASSES:
            run(graph)


@functools.cache
def install_passes() -> None:
    """Let Inductor run the passes; once, when a compiler first traces a product."""
    try:
        from torch._inductor import config
        from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    except ImportError:
        return
    if not hasattr(config, "post_grad_custom_post_pass"):
        return
    before: Any = config.post_grad_custom_post_pass
    files = tuple(str(Path(__file__).with_name(name)) for name in _FILES)

    class Passes(CustomGraphPass):
        """Those of the user, then ours."""

        def __call__(self, graph: fx.Graph) -> None:
            for run in _each(before):
                run(graph)
            run_passes(graph)

        def uuid(self) -> Any:
            """Of the sources, and of the user's passes; None, which caches nothing, without one."""
            theirs = []
            for run in _each(before):
                theirs.append(run.uuid() if isinstance(run, CustomGraphPass) else None)
            return None if None in theirs else (get_hash_for_files(files), *theirs)

    config.post_grad_custom_post_pass = Passes()


def _each(passes: Any) -> tuple[Any, ...]:
    if passes is None:
        return ()
    return tuple(passes) if isinstance(passes, list | tuple) else (passes,)
