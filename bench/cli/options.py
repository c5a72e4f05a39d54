"""Options that commands share, and what they do with them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lokakern.errors import LokakernError, ShapeError
from lokakern.types import REGIMES, Format

if TYPE_CHECKING:
    from lokakern.workloads.gemm_cases import Case


INTERRUPTED_EXIT = 130  # as shells say it


class OutputFormat(StrEnum):
    """How data is printed."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class Regime(StrEnum):
    """Timing regimes."""

    GRAPH_COLD = REGIMES[0]
    GRAPH_HOT = REGIMES[1]
    EAGER = REGIMES[2]


DatabaseOption = Annotated[
    str | None,
    typer.Option("--db", help="Database: a path or an SQLAlchemy URL. Default: $LOKAKERN_DB, "
                 "else a file in the user's data folder."),
]  # fmt: skip
FormatOption = Annotated[OutputFormat, typer.Option("--format", help="How to print data.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Same as --format json.")]
WhereOption = Annotated[
    str | None,
    typer.Option(help="Only problems for which this holds, such as 'm >= 8192 and prepared'."),
]
ShapeOption = Annotated[
    list[str] | None,
    typer.Option("--shape", help="m,n,k of a GEMM or m,k of a quantization; may be repeated."),
]
EpilogueOption = Annotated[
    str | None,
    typer.Option(help="Shapes are of gemm_norm (m,n,k) or norm_quantize (m,k) with this epilogue, "
                 "such as bias+layer+affine or block_rms(256)+hardswish."),
]  # fmt: skip
RegimeOption = Annotated[
    Regime | None,
    typer.Option(help="Default: graph-cold on a GPU, eager on a CPU."),
]
BudgetOption = Annotated[
    float, typer.Option(help="Largest accepted row error (0.06 admits E4M3 GEMMs).")
]
DistributionOption = Annotated[
    str | None,
    typer.Option(help="Judge errors on this distribution only. Default: all realistic ones."),
]


def say(words: str) -> None:
    """A line for whoever waits."""
    print(words, file=sys.stderr)


def says_errors(command: Callable[..., None]) -> Callable[..., None]:
    @wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            with _showing_progress(quiet=bool(kwargs.get("quiet"))):
                command(*args, **kwargs)
        except LokakernError as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(INTERRUPTED_EXIT) from None
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:  # a name that is too long, a folder that may not be looked into
            where = f": {error.filename!r}" if error.filename else ""
            print(f"{type(error).__name__}: {error.strerror or error}{where}", file=sys.stderr)
            raise typer.Exit(1) from None

    return wrapped


@contextmanager
def _showing_progress(*, quiet: bool) -> Iterator[None]:
    """Show progress bars of long work on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield
        return
    from lokakern.render.terminal import TerminalProgress  # rich, which takes time to import

    with TerminalProgress():
        yield


def shape_of(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if len(sizes) not in (2, 3) or any(size < 1 for size in sizes):
        raise ShapeError(f"--shape is {text!r}; expected m,n,k (or m,k), integers of at least 1")
    return sizes


def source_of(text: str) -> str | Path:
    """A database as asked for: a URL stays text, a path gets its home folder."""
    return text if "://" in text else Path(text).expanduser()


def cases_of(shapes: Sequence[str], epilogue: str | None, fp8: Format) -> list[Case]:
    """Everything about the shapes of ``--shape``; with ``--epilogue`` the layers that end so."""
    from lokakern.workloads.norm_cases import epilogue_cases
    from lokakern.workloads.suites import shape_cases

    sizes = [shape_of(text) for text in shapes]
    return list(shape_cases(sizes, fp8) if epilogue is None
                else epilogue_cases(sizes, epilogue, fp8))  # fmt: skip


@contextmanager
def reading(database: str | None) -> Iterator[None]:
    """Answer from the shipped files and this database while inside."""
    if database is None:
        yield
        return
    from lokakern.registry.sharing.import_merge import union_of
    from lokakern.registry.snapshot.snapshot import Snapshot
    from lokakern.registry.storage.run_files import shipped_databases
    from lokakern.selection import dispatcher

    shipped, given = shipped_databases(), source_of(database)
    rows = union_of(shipped, [given])
    dispatcher.use_snapshot(Snapshot(rows, [*map(str, shipped), database]))
    try:
        yield
    finally:
        dispatcher.use_snapshot(None)
