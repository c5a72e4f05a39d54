"""Replay recorded calls in C++: a warm call costs the host little more than its launches.

`replayed` wraps a public function, `recorded_op` an op of ``torch.ops.lokakern``, and
``NATIVE.call_layer`` and ``NATIVE.call_chain`` make the eager calls of converted layers and of
their chains (``layer.h``), ``NATIVE.call_sequence`` those of their sequences (``sequence.h``),
which need no recording. The first call with a signature runs in Python; the second is recorded
(`lokakern.native.record`); later ones are replayed by the library in this folder (``plan.h``). Both
ways launch the same kernels with the same arguments, so that results are equal to the bit. Calls
that cannot be recorded stay in Python, as do all calls where there is no C++ compiler. The library
also takes the samples of a watch (``window.h``).

LOKAKERN_NATIVE: "off" disables the library; "wait" builds it before the first call; by default a
thread builds it at the first call on a GPU, and calls stay in Python until it is there.
"""

from lokakern.native.replay import (
    NATIVE,
    forget,
    is_keeping,
    plain_op,
    recorded_op,
    replayed,
    status,
    wait,
)

__all__ = [
    "NATIVE",
    "forget",
    "is_keeping",
    "plain_op",
    "recorded_op",
    "replayed",
    "status",
    "wait",
]
