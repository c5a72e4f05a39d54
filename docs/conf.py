"""Sphinx: `make docs` builds these pages, and those files of the repository that they include."""

import os
import re
from pathlib import Path
from typing import Any

from lokakern import __version__

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent

project = "lokakern"
copyright = "the lokakern authors"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"lokakern {version}"
html_copy_source = False
highlight_language = "none"  # of what a command prints
default_role = "literal"  # docstrings write names in single backticks
myst_heading_anchors = 3
autodoc_default_options = {"members": True, "show-inheritance": True}
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"

# Which page shows which file of the repository.
PAGES = {
    "README.md": "start.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "DESIGN.md": "design.md",
    "registry/README.md": "database.md",
    "kernels/adapters/README.md": "libraries.md",
    "kernels/cuda/README.md": "cuda.md",
    "kernels/hip/README.md": "hip.md",
}
LINK = re.compile(r"\[(?P<text>[^]\n]+)\]\((?P<path>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")


def relinked(text: str, folder: Path) -> str:
    """Links of a file in `folder` to other files, as links of a page to pages.

    The site stands alone: of a file that no page shows the path is left, as text.

    Raises:
        FileNotFoundError: A link leads nowhere.
    """

    def replaced(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link["path"]))
        if not target.exists():
            raise FileNotFoundError(f"{link[0]} in {folder.name}/ leads nowhere")
        path = str(target.relative_to(ROOT))
        page = DOCS / PAGES[path] if path in PAGES else target
        if page.is_relative_to(DOCS):
            shown_in = folder if folder.is_relative_to(DOCS) else DOCS
            return f"[{link['text']}]({os.path.relpath(page, shown_in)}{link['anchor'] or ''})"
        return link["text"] if path in link["text"] else f"{link['text']} (`{path}`)"

    return LINK.sub(replaced, text)


def _relink_page(_app: Any, name: str, source: list[str]) -> None:
    source[0] = relinked(source[0], (DOCS / name).parent)


def _relink_file(_app: Any, path: Path, _parent: str, source: list[str]) -> None:
    source[0] = relinked(source[0], (DOCS / path).resolve().parent)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _relink_page)
    app.connect("include-read", _relink_file)
