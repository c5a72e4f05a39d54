"""The end of a process whose parent ended, however that ended: SIGKILL included."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from multiprocessing import connection


def end_with(sentinel: int, end: Callable[[], None] = lambda: os._exit(1)) -> None:
    """End this process when its parent does, even while a kernel hangs.

    Args:
        sentinel: Descriptor for reading of a pipe whose other end only the parent holds.
        end: What ends it, called in a thread.
    """

    def watch() -> None:
        connection.wait([sentinel])
        end()

    threading.Thread(target=watch, daemon=True).start()
