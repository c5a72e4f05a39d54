"""Staleness: whether a row of a database belongs to a kernel as it is now."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lokakern.registry import libraries
from lokakern.registry.digests import kernel_digest

if TYPE_CHECKING:
    from lokakern.registry.schema.records import KernelRow


def is_current(kernel: KernelRow) -> bool:
    """Whether a row describes a kernel as it is now, digest and attributes.

    A row of another version of a library than the installed one does not. Which package is of a
    library, and what a kernel is now, is known once kernels are imported, so that this imports
    them (0.5 s): the answer must not depend on what else a command imports.
    """
    from lokakern.registry.register import load_kernels

    load_kernels()
    return _belongs(kernel) and _has_its_digest(kernel)


def _belongs(kernel: KernelRow) -> bool:
    """Whether a row has the attributes of the registered kernel, which its digest leaves out.

    Scales and accumulation decide which errors belong to a kernel.
    """
    from lokakern.registry.register import KERNELS

    known = KERNELS.get(kernel.name)
    if known is None:
        return bool(kernel.modules)  # a digest of nothing would never change
    said = (kernel.op, kernel.granularity, kernel.b_granularity, kernel.accumulation)
    true = (known.op, str(known.granularity), str(known.b_granularity), known.accumulation)
    return said == true and _sources(kernel.modules) == _sources(known.modules)


def _sources(modules: Iterable[str]) -> list[str]:
    """The modules without libraries, whose versions may differ here."""
    return [module for module in modules if not module.startswith("package:")]


@functools.lru_cache(maxsize=4096)
def _has_its_digest(kernel: KernelRow) -> bool:
    packages = [module for module in kernel.modules if module.startswith("package:")]
    if any(map(libraries.is_of_another, packages)):
        return False
    try:
        return kernel_digest(kernel.name, kernel.modules) == kernel.digest
    except (OSError, ValueError, SyntaxError):  # no such file, or none that is a kernel's
        return False
