"""`freeze`: what this process chose, in a file that another answers from without a database."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from lokakern.errors import ChoicesError
from lokakern.registry.register import KERNELS
from lokakern.registry.schema.records import now_utc_ms
from lokakern.selection import dispatcher
from lokakern.selection.frozen.file_format import (
    FORMAT,
    LARGEST_FILE_BYTES,
    VERSION,
    digest_of,
    parse,
    rows_of,
    weight_row,
)
from lokakern.selection.frozen.lookup import Key
from lokakern.types import Device
from lokakern.version import __version__


def freeze(path: str | os.PathLike[str]) -> None:
    """Write the choices that this process made so far to a file that needs no database.

    With ``LOKAKERN_CHOICES=FILE``, or after `lokakern.selection.dispatcher.use_choices`, everything
    that chooses a kernel answers from the file and reads no database. So run the model once, or
    `dispatch` its problems, then freeze. A choice holds for every m that the same powers of two up
    to 16 divide: let m be odd once where it may be, and a multiple of 2, of 4, of 8 and of 16.

    What is not in the file, and a budget that is another one, is a miss: the unquantized kernel,
    logged once. The file is refused on another type of device, and where a kernel that it names is
    not what it was: its digest covers its source and the versions of libraries. Kept are choices
    for the device here, with those of `prepare_weight`, and none of `dispatch_chain`, which under
    frozen choices gives the unquantized chain.

    Args:
        path: The file, which is replaced as a whole.

    Raises:
        ChoicesError: Nothing was chosen yet, choices are for more than one type of GPU, answers are
            frozen already, or the file cannot be written.
    """
    shown = os.fspath(path)
    held = dispatcher.choices()
    if held is not None:
        raise ChoicesError(
            f"freeze {shown}: answers are those of {held.origin} already; copy that file, or unset "
            "LOKAKERN_CHOICES and run the model with the database"
        )
    chosen = [table for table in dispatcher.chosen() if table.callable_here]
    device = _device({table.device for table in chosen}, shown)
    tables = {Key.of(table): table for table in chosen if table.device == device}
    forms = {
        asked: form for (where, asked), form in dispatcher.CHOSEN_FORMS.items() if where == device
    }
    names = sorted({name for table in tables.values() for name in table.winners if name})

    whole: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "lokakern": __version__,
        "frozen_utc_ms": now_utc_ms(),
        "device": asdict(device),
        "snapshot": dispatcher.snapshot().digest,
        "unverified": sum(table.rests_on_imports for table in tables.values()),
        "kernels": {name: _digest(name, shown) for name in names},
        "tables": sorted((rows_of(key, table) for key, table in tables.items()), key=json.dumps),
        "weights": sorted((weight_row(*pair) for pair in forms.items()), key=json.dumps),
    }
    whole["digest"] = digest_of(whole)
    content = _text_of(whole).encode()
    if len(content) > LARGEST_FILE_BYTES:
        raise ChoicesError(
            f"freeze {shown}: {len(tables)} choices take {len(content) >> 20} MiB, and at most "
            f"{LARGEST_FILE_BYTES >> 20} are read; freeze in a process that does nothing but run "
            "the model"
        )
    parse(content, shown)  # what would be refused is not written
    _write(Path(path), content)


def _device(found: set[Device], path: str) -> Device:
    """The GPU that choices are for; without one, the CPU."""
    devices = [device for device in found if device.is_gpu] or list(found)
    if not devices:
        raise ChoicesError(
            f"freeze {path}: nothing was chosen here yet; run the model once, or `dispatch` its "
            "problems, and then freeze (without a budget `gemm` chooses nothing)"
        )
    if len(devices) > 1:
        names = " and ".join(sorted(device.product for device in devices))
        raise ChoicesError(
            f"freeze {path}: choices are for {names}; freeze in a process for each, which sees one"
        )
    return devices[0]


def _digest(name: str, path: str) -> str:
    try:
        return KERNELS[name].digest
    except (OSError, ValueError, SyntaxError) as error:
        raise ChoicesError(
            f"freeze {path}: the source of kernel {name} cannot be read ({error}), so that nobody "
            "could say whether it is the same; put it in a file"
        ) from None


def _text_of(whole: dict[str, Any]) -> str:
    """JSON with a table a line, for whoever compares two files."""
    lines = []
    for name, value in whole.items():
        if name in ("tables", "weights") and value:
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _write(path: Path, content: bytes) -> None:
    """All or nothing: a temporary file beside it, to the disk, renamed."""
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        try:
            with unfinished.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            unfinished.replace(path)
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        finally:
            unfinished.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise ChoicesError(f"freeze {path}: it cannot be written: {error}") from None
