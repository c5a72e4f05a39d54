"""The known name that an unknown one is likely meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def did_you_mean(asked: str, known: Iterable[str], but: str = "") -> str:
    """The nearest of some names, in any case, as "did you mean 'NAME'? " for an error; or "".

    The shortest of those that begin with it counts, then the one most like it, then the first that
    contains it.

    Args:
        asked: The unknown name.
        known: The names.
        but: Pattern, in lower case, of a beginning that makes no names alike, such as a vendor's.
    """
    names = {re.sub(f"^({but})", "", name.lower()): name for name in known}
    word = re.sub(f"^({but})", "", asked.lower())
    near = (
        sorted((name for name in names if word and name.startswith(word)), key=len)
        or difflib.get_close_matches(word, names, 1)
        or [name for name in names if word and word in name]
    )
    return f"did you mean {names[near[0]]!r}? " if near else ""
