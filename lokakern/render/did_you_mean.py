"""The known name that an unknown one is likely meant to be."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


def did_you_mean(asked: str, known: Iterable[str], but: str = "") -> str:
    """The nearest of some names, in any case, as "did you mean 'NAME'? " for an error; or "".

    Of names that are all unlike it, the first that contains it counts.

    Args:
        asked: The unknown name.
        known: The names.
        but: Pattern, in lower case, of a beginning that makes no names alike, such as a vendor's.
    """
    names = {re.sub(f"^({but})", "", name.lower()): name for name in known}
    word = re.sub(f"^({but})", "", asked.lower())
    near = difflib.get_close_matches(word, names, 1) or [n for n in names if word and word in n]
    return f"did you mean {names[near[0]]!r}? " if near else ""
