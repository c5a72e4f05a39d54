"""Whether what a database says of a kernel is said of the kernel as it is now."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from lokakern.registry import libraries
from lokakern.registry.digests import kernel_digest

if TYPE_CHECKING:
    from lokakern.registry.records import KernelRow


@functools.lru_cache(maxsize=4096)
def is_current(kernel: KernelRow) -> bool:
    """Whether a stored digest is that of the kernel's files as they are now.

    A row of another version of a library than the one that is installed is none.
    """
    packages = [module for module in kernel.modules if module.startswith("package:")]
    if any(map(libraries.is_of_another, packages)):
        return False
    try:
        return kernel_digest(kernel.name, kernel.modules) == kernel.digest
    except (OSError, ValueError, SyntaxError):  # no such file, or none that is a kernel's
        return False
