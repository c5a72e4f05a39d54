"""What the server that workers are forked from imports once: all that measuring needs.

Nothing here may touch a GPU: a context does not survive a fork. Plugins, which might, come later.
"""

import lokakern.sweep.worker  # noqa: F401
from lokakern.registry.register import load_own

load_own()
