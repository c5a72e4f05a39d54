"""A parsed HTML page, and names that would break an unescaped one."""

from __future__ import annotations

from html.parser import HTMLParser

HOSTILE = """<script>alert("x")</script>' onload='y' {{ 7 * 7 }}"""


class Page(HTMLParser):
    """Elements with their attributes, and the text of cells."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag == "option" or self.open[-1] == tag:
            assert self.open.pop() == tag
        else:
            raise AssertionError(f"</{tag}> closes {self.open[-1]}")

    def handle_data(self, data: str) -> None:
        self.text.append(data)
