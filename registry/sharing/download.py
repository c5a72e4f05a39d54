"""Download of foreign files by URL, with a required checksum."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from lokakern.errors import DatabaseError

SILENCE_S = 30.0  # of a server, after which the download ends
LONGEST_S = 600.0  # a server that sends a byte now and then is never silent
DIGEST = re.compile(r"(sha256:)?[0-9a-f]{64}")


def is_url(source: str) -> bool:
    """Whether a source is a URL to download."""
    return source.lower().startswith(("http://", "https://"))


def download(url: str, sha256: str | None, folder: Path, *, largest_bytes: int) -> Path:
    """Fetch a file.

    Args:
        url: Of http or https.
        sha256: That the file has to have, in hex.
        folder: A private folder for it.
        largest_bytes: Of the file.

    Raises:
        DatabaseError: No checksum was given, pooch is not installed, or what came is larger, has
            another checksum, or did not come.
    """
    name = _without_secrets(url)
    if sha256 is None or not DIGEST.fullmatch(sha256.lower()):
        raise DatabaseError(
            f"import {name!r}: the checksum is {sha256!r}; expected --sha256 with the 64 hex "
            "digits that its manifest has (`sha256`): an attack in transit "
            "can change a manifest beside the file, too, so get it from a source that you trust"
        )
    try:
        import pooch
        from pooch.downloaders import HTTPDownloader
    except ImportError:
        raise DatabaseError(
            f"import {name!r}: pooch is not installed; pip install '.[exchange]' in a clone of "
            "lokakern, or download the file yourself and import it with --sha256"
        ) from None

    def fetch(where: str, output: Any, cache: Any) -> None:
        with open(output, "wb") as file:
            HTTPDownloader(timeout=SILENCE_S, chunk_size=1 << 16)(
                where, _Limited(file, largest_bytes), cache
            )

    pooch.get_logger().setLevel("WARNING")
    digest = sha256.lower().removeprefix("sha256:")
    try:
        found = pooch.retrieve(
            url, known_hash=f"sha256:{digest}", fname="download.sqlite", path=folder,
            downloader=fetch,
        )  # fmt: skip
    except (OSError, ValueError) as error:  # requests' errors are OSErrors
        raise DatabaseError(
            f"import {name!r}: {_reason(error)}; check the address and the checksum, or download "
            "it yourself"
        ) from None
    return Path(found)


def _reason(error: Exception) -> str:
    """The reason of a failure without the URL, which libraries repeat with its password."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return f"the server answered {status}"
    words = str(error).splitlines()[0][:300] if str(error) else ""
    return type(error).__name__ if "://" in words or "url:" in words else words


class _Limited:
    """A file with limits of size and time; compressed data counts unpacked."""

    def __init__(self, file: IO[bytes], largest_bytes: int) -> None:
        self._file, self._left = file, largest_bytes
        self._deadline = time.monotonic() + LONGEST_S

    def write(self, content: bytes) -> int:
        self._left -= len(content)
        if self._left < 0:
            raise ValueError("the file is larger than a file of others may be")
        if time.monotonic() > self._deadline:
            raise ValueError(f"not done after {LONGEST_S:.0f} s")
        return self._file.write(content)

    def flush(self) -> None:
        self._file.flush()


def _without_secrets(url: str) -> str:
    """A URL for a message: without a password, and without what follows the path."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return url.split("://")[0] + "://..."
    return f"{parts.scheme}://{parts.hostname or ''}{parts.path}"
