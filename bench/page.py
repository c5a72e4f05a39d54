"""Pages of HTML that need nothing else: no network, no other file."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

FOLDER = Path(__file__).parent


def rendered(
    template: str, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any
) -> str:
    """A template of this folder with the look that all pages share, as ``style``.

    Values are anybody's: all are escaped.
    """
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= filters or {}
    style = Markup(text_of("page.css"))
    return environment.from_string(text_of(template)).render(style=style, **values)


def text_of(name: str) -> str:
    """Text of a file of this folder."""
    return (FOLDER / name).read_text(encoding="utf-8")


def script_of(text: str) -> Markup:
    """Our own script, as the content of an element: nothing in it ends that."""
    return Markup(text.replace("</script", r"<\/script").replace("<!--", r"<\!--"))


def json_of(value: Any) -> Markup:
    """JSON as the content of a script element: whatever is in the data, nothing in it ends that."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c"))


def hash_of(script: str) -> str:
    """By which a page's Content-Security-Policy knows a script that may run."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
