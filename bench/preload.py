"""What the server that workers are forked from imports once: all that measuring needs.

Nothing here may touch a GPU: a context does not survive a fork.
"""

import lokakern.bench.worker  # noqa: F401
from lokakern.registry.register import load_kernels

load_kernels()
