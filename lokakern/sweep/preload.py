"""Imports of the fork server of the workers: everything that measuring needs.

Nothing here may use a GPU: a context does not survive a fork. Plugins, which may, are imported
later.
"""

import lokakern.sweep.worker  # noqa: F401
from lokakern.registry.register import load_own

load_own()
