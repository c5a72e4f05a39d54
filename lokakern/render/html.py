"""Self-contained HTML pages, without network and other files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup


def rendered(
    template: Path, filters: Mapping[str, Callable[..., Any]] | None = None, **values: Any
) -> str:
    """Render a template; the common style sheet is ``style``, and all values are escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= filters or {}
    style = Markup(Path(__file__).with_name("page.css").read_text("utf-8"))
    return environment.from_string(template.read_text("utf-8")).render(style=style, **values)


def script_of(text: str) -> Markup:
    """A script of lokakern, escaped as the content of a script element."""
    return Markup(text.replace("</script", r"<\/script").replace("<!--", r"<\!--"))


def json_of(value: Any) -> Markup:
    """JSON as the content of a script element, escaped so that no data can close the element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("<", r"\u003c"))


def hash_of(script: str) -> str:
    """The hash that allows a script in a page's Content-Security-Policy."""
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
