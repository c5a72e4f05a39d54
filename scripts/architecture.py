"""Print the layers of lokakern: flat modules, import circles, hidden circles, upward imports.

    python scripts/architecture.py

Exits with 1 where a limit is broken. The order of layers is that of import-linter's contracts in
pyproject.toml.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parent.parent
FLAT_LIMITS = {"lokakern": 26, "lokakern.bench": 12, "lokakern.registry": 14}


def layers() -> list[tuple[str, list[set[str]]]]:
    """The package of each layers contract, and the names in its layers, the highest first."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return [
        (contract["containers"][0], [set(layer.replace("|", ":").replace(" ", "").split(":"))
                                     for layer in contract["layers"]])
        for contract in table["tool"]["importlinter"]["contracts"]
        if contract["type"] == "layers"
    ]  # fmt: skip


def layer_of(module: str, container: str, order: list[set[str]]) -> int | None:
    """Place of the layer of a package that holds a module; None for one outside."""
    if not module.startswith(f"{container}."):
        return None
    name = module.removeprefix(f"{container}.").split(".")[0]
    return next((place for place, names in enumerate(order) if name in names), None)


def circles(graph: grimp.ImportGraph) -> list[list[str]]:
    """Groups of modules that import each other, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        index[module] = low[module] = len(index)
        stack.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in index:
                visit(imported)
                low[module] = min(low[module], low[imported])
            elif imported in stack:
                low[module] = min(low[module], index[imported])
        if low[module] == index[module]:
            place = stack.index(module)
            if len(stack) - place > 1:
                found.append(sorted(stack[place:]))
            del stack[place:]

    for module in sorted(graph.modules):
        if module not in index:
            visit(module)
    return found


def upward(graph: grimp.ImportGraph) -> Iterator[tuple[str, str]]:
    """Imports of a module in a higher layer."""
    for container, order in layers():
        for module in sorted(graph.modules):
            own = layer_of(module, container, order)
            for imported in sorted(graph.find_modules_directly_imported_by(module)):
                other = layer_of(imported, container, order)
                if own is not None and other is not None and other < own:
                    yield module, imported


def main() -> int:
    """Print each figure, and return whether one is beyond its limit."""
    sys.setrecursionlimit(10_000)
    graph = grimp.build_graph(
        "lokakern", "lokakern.kernels", exclude_type_checking_imports=True, cache_dir=None
    )
    failed = False
    for package, limit in FLAT_LIMITS.items():
        flat = [m for m in graph.find_children(package) if not graph.find_children(m)]
        packages = len(graph.find_children(package)) - len(flat)
        count = len(flat) + 1  # __init__.py
        print(f"{package}: {count} flat modules (limit {limit}), {packages} packages")
        failed |= count > limit
    rings = circles(graph)
    print(f"import circles, imports inside functions included: {len(rings)}")
    for ring in rings:
        print("   ", " <-> ".join(ring))
    arrows = list(upward(graph))
    print(f"upward imports: {len(arrows)}")
    for module, imported in arrows:
        print(f"    {module} -> {imported}")
    return int(failed or bool(rings) or bool(arrows))


if __name__ == "__main__":
    sys.exit(main())
