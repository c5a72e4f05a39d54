"""`freeze`: write the choices of this process to a file that replaces the database."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any
from uuid import uuid4

from lokakern.device import devices_here
from lokakern.errors import ChoicesError
from lokakern.registry.register import KERNELS
from lokakern.registry.schema.records import now_utc_ms
from lokakern.selection import dispatcher
from lokakern.selection.frozen.file_format import (
    FORMAT,
    LARGEST_FILE_BYTES,
    VERSION,
    answer_row,
    digest_of,
    parse,
    table_row,
    weight_row,
)
from lokakern.selection.frozen.lookup import Key
from lokakern.types import Device
from lokakern.version import __version__


def freeze(path: str | os.PathLike[str]) -> None:
    """Write the choices that this process has made to a file that replaces the database.

    With ``LOKAKERN_CHOICES=FILE``, or after `lokakern.selection.dispatcher.use_choices`, dispatch
    answers from the file and reads no database. Run the model once, or `dispatch` its problems,
    then freeze. A choice holds for every m with the same largest power-of-two divisor up to 16:
    where m varies, run once with an odd m, and with multiples of 2, 4, 8 and 16.

    A problem or budget that is not in the file is a miss: the unquantized kernel is used, and a
    warning is logged once. The file is refused on another type of device, and if the digest of a
    kernel that it names has changed, which covers its source and the versions of its libraries.
    The file has the choices for the local device, with those of `prepare_weight`, of
    `dispatch_chain` for each m that was asked, and of `convert`: routes and chains of layers, for
    the same arguments of `convert`, and for layers of the same sizes. What it chooses for gradients
    behind DCN's crosses is not among them.

    Args:
        path: The file, which is replaced atomically.

    Raises:
        ChoicesError: There are no choices, they are for more than one type of GPU, they come from
            a frozen file themselves, or the file cannot be written.
    """
    shown = os.fspath(path)
    held = dispatcher.choices()
    if held is not None:
        raise ChoicesError(
            f"freeze {shown}: answers are those of {held.origin} already; copy that file, or unset "
            "LOKAKERN_CHOICES and run the model with the database"
        )
    chosen = [table for table in dispatcher.chosen() if table.callable_here]
    kept = dispatcher.kept_answers()
    here = devices_here()
    devices = {table.device for table in chosen} | {where for where, _ in kept if where in here}
    device = _device(devices, shown)
    tables = {Key.of(table): table for table in chosen if table.device == device}
    forms = {
        asked: form for (where, asked), form in dispatcher.CHOSEN_FORMS.items() if where == device
    }
    answers = {asked: answer for (where, asked), answer in kept.items() if where == device}
    of_answers = (answer.kernels for answer in answers.values())
    names = {name for table in tables.values() for name in table.winners if name}.union(*of_answers)

    whole: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "lokakern": __version__,
        "frozen_utc_ms": now_utc_ms(),
        "device": asdict(device),
        "snapshot": dispatcher.snapshot().digest,
        "unverified": sum(table.rests_on_imports for table in tables.values()),
        "kernels": {name: _digest(name, shown) for name in sorted(names)},
        "tables": sorted((table_row(key, table) for key, table in tables.items()), key=json.dumps),
        "weights": sorted((weight_row(*pair) for pair in forms.items()), key=json.dumps),
        "answers": [answer_row(asked, answers[asked].texts) for asked in sorted(answers)],
    }
    whole["digest"] = digest_of(whole)
    content = _text_of(whole).encode()
    if len(content) > LARGEST_FILE_BYTES:
        raise ChoicesError(
            f"freeze {shown}: {len(tables)} choices take {len(content) >> 20} MiB, and at most "
            f"{LARGEST_FILE_BYTES >> 20} are read; freeze in a process that only runs the model"
        )
    parse(content, shown)  # a file that would be refused is not written
    write_atomically(Path(path), content, "freeze")


def _device(found: set[Device], path: str) -> Device:
    """The GPU of the choices, or the CPU if there is none."""
    devices = [device for device in found if device.is_gpu] or list(found)
    if not devices:
        raise ChoicesError(
            f"freeze {path}: no choice was made here yet that it writes. Run the model once, or "
            "`dispatch` its problems, or `convert` it, and then freeze (without a budget `gemm` "
            "chooses nothing, and `convert` chooses no kernel where none is faster)"
        )
    if len(devices) > 1:
        names = " and ".join(sorted(device.product for device in devices))
        raise ChoicesError(
            f"freeze {path}: choices are for {names}; freeze in one process per GPU type"
        )
    return devices[0]


def _digest(name: str, path: str) -> str:
    try:
        return KERNELS[name].digest
    except (OSError, ValueError, SyntaxError) as error:
        raise ChoicesError(
            f"freeze {path}: the source of kernel {name} cannot be read ({error}), so that "
            "changes could not be detected; put it in a file"
        ) from None


def _text_of(whole: dict[str, Any]) -> str:
    """JSON with a line for each table, weight and answer, so that files can be compared by line."""
    lines = []
    for name, value in whole.items():
        if name in ("tables", "weights", "answers") and value:
            rows = ",\n".join(f"  {json.dumps(row)}" for row in value)
            lines.append(f" {json.dumps(name)}: [\n{rows}\n ]")
        else:
            lines.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_atomically(path: Path, content: bytes, what: str) -> None:
    """Write a temporary file beside the path, sync it to disk and rename it.

    Raises:
        ChoicesError: It cannot be written; the message begins with ``what``.
    """
    from lokakern.registry.storage.writer import synchronize  # which imports SQLite

    unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
    try:
        try:
            unfinished.write_bytes(content)
            synchronize(unfinished)
            unfinished.replace(path)
            synchronize(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)
    except (OSError, ValueError) as error:
        raise ChoicesError(f"{what} {path}: it cannot be written: {error}") from None
