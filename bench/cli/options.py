"""Options, output and database handling that the commands share.

Modules of commands import torch, and modules of lokakern that do, inside functions: parsing and
help take 0.2 s, and torch alone 2 s (tests/bench/cli/test_start.py).
"""

from __future__ import annotations

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum, StrEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import lokakern
from lokakern.errors import DatabaseError, LokakernError, ShapeError

if TYPE_CHECKING:
    from lokakern.types import Format
    from lokakern.workloads.gemm_cases import Case

MOST_ROWS = 50  # of a table; JSON and CSV contain all


class ExitCode(IntEnum):
    """Exit codes of all commands.

    0 to 2 say whether the command did its work: it did, it could not, or the command line is wrong.
    3 to 7 say that it did, and what it found.
    """

    DONE = 0
    FAILED = 1
    WRONG_USAGE = 2
    TIME_LIMIT = 3
    SLOWER = 4
    NOT_OK = 5
    WORSE = 6
    EDITED = 7
    INTERRUPTED = 130  # the convention of shells


EXIT_CODES = (
    "Exit codes: 0 done, 1 failed, 2 wrong usage, which includes names that nothing has; done, but "
    "3 not all before --time-limit (run again to resume), 4 slower than --fail-under allows (or "
    "beyond noise with --held-out), 5 some kernels or cells failed, 6 slower or less accurate "
    "(diff) or a file rejected (verify, contribute), 7 rows that both files have differ (diff); "
    "130 interrupted."
)


class OutputFormat(StrEnum):
    """Output formats."""

    TABLE = "table"
    JSON = "json"
    CSV = "csv"


class ChoiceRegime(StrEnum):
    """Regimes of choices: `lokakern.types.CHOICE_REGIMES`, which imports torch."""

    GRAPH_COLD = "graph-cold"
    GRAPH_HOT = "graph-hot"
    EAGER = "eager"
    COMPILED = "compiled"
    COMPILED_GRAPH = "compiled-graph"


class TimingRegime(StrEnum):
    """Timing regimes: `lokakern.types.REGIMES`."""

    GRAPH_COLD = "graph-cold"
    GRAPH_HOT = "graph-hot"
    EAGER = "eager"


Database = Annotated[
    str | None,
    typer.Option("--db", help="Database: a path or an SQLAlchemy URL. Default: $LOKAKERN_DB, "
                 "else a file in the user's data folder. Dispatch reads the shipped files, too."),
]  # fmt: skip
NoShipped = Annotated[bool, typer.Option("--no-shipped", help="Leave out the shipped files.")]
How = Annotated[OutputFormat, typer.Option("--format", help="Output format.")]
Json = Annotated[bool, typer.Option("--json", help="Same as --format json.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Show no progress.")]
Device = Annotated[
    str | None,
    typer.Option(help='GPU type with measurements, such as "NVIDIA H200". Default: the one here.'),
]
Where = Annotated[
    str | None,
    typer.Option(help="Only problems that meet a condition, such as 'm >= 8192 and prepared'."),
]
Shapes = Annotated[
    list[str] | None,
    typer.Option("--shape", help="m,n,k of a GEMM or m,k of a quantization; repeatable."),
]
Epilogue = Annotated[
    str | None,
    typer.Option(help="Measure gemm_norm (m,n,k) or norm_quantize (m,k) with this epilogue, such "
                 "as bias+layer+affine or block_rms(256)+hardswish."),
]  # fmt: skip
Regime = Annotated[
    TimingRegime | None,
    typer.Option(help="Timing regime. Default: graph-cold on a GPU, eager on a CPU."),
]
RegimeOfChoice = Annotated[
    ChoiceRegime | None,
    typer.Option(
        help="How the product runs: in a CUDA graph (graph-cold, graph-hot), eager, compiled, or "
        "compiled in a CUDA graph. In eager and compiled the cost of calls counts where `host` "
        "measured it. Default: that of convert, compiled, for many products; else graph-cold on a "
        "GPU, eager on a CPU."
    ),
]
Budget = Annotated[float, typer.Option(help="Largest accepted row error (0.06 admits E4M3 GEMMs).")]
Distribution = Annotated[
    str | None,
    typer.Option(help="Judge errors on this distribution. Default: all realistic ones."),
]


def say(words: str) -> None:
    """Print a line to stderr."""
    print(words, file=sys.stderr)


def says_errors(command: Callable[..., None]) -> Callable[..., None]:
    """Report expected errors of a command in one line, and add --json where --format is.

    Errors of what the command line says have exit code 2, like those that typer finds: they are
    ValueErrors, TypeErrors or KeyErrors. Others have exit code 1.
    """

    @wraps(command)
    def wrapped(*args: Any, as_json: bool = False, **kwargs: Any) -> None:
        if as_json:
            kwargs["how"] = OutputFormat.JSON
        try:
            with _showing_progress(quiet=bool(kwargs.get("quiet"))):
                command(*args, **kwargs)
        except LokakernError as error:
            say(f"{type(error).__name__}: {error}")
            wrong = isinstance(error, ValueError | TypeError | KeyError)
            raise typer.Exit(ExitCode.WRONG_USAGE if wrong else ExitCode.FAILED) from None
        except KeyboardInterrupt:
            say("stopped")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except BrokenPipeError:  # the reader closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        except OSError as error:  # a name that is too long, a folder without permission
            where = f": {error.filename!r}" if error.filename else ""
            say(f"{type(error).__name__}: {error.strerror or error}{where}")
            raise typer.Exit(ExitCode.FAILED) from None

    parameters = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        parameters.append(parameter)
        if parameter.name == "how":
            as_json = parameter.replace(name="as_json", default=False, annotation=Json)
            parameters.append(as_json)
    wrapped.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return wrapped


def _import_library() -> None:
    """Import torch and the library, whose objects live as long as the process.

    The garbage collector would walk them for 0.2 s meanwhile, and for 0.4 s when the process ends.
    """
    if "torch" in sys.modules:  # in a process with objects of others
        return lokakern._import_at_once()
    gc.disable()
    try:
        lokakern._import_at_once()
    finally:
        gc.enable()
        gc.freeze()


@contextmanager
def _showing_progress(*, quiet: bool) -> Iterator[None]:
    """Import the library, and show on a terminal that it takes time, and bars of long work."""
    if quiet or not sys.stderr.isatty():
        _import_library()
        yield
        return
    from rich.console import Console  # which takes time to import

    with Console(stderr=True).status("importing torch"):
        _import_library()
    from lokakern.render.terminal import TerminalProgress

    with TerminalProgress():
        yield


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Report a file that cannot be written as a `DatabaseError`."""
    try:
        yield
    except OSError as error:
        raise DatabaseError(f"{str(path)!r} cannot be written: {error.strerror}") from error


def shape_of(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(int(word) for word in text.replace("x", ",").split(","))
    except ValueError:
        sizes = ()
    if len(sizes) not in (2, 3) or any(size < 1 for size in sizes):
        raise ShapeError(f"--shape is {text!r}; expected m,n,k (or m,k), integers of at least 1")
    return sizes


def source_of(text: str) -> str | Path:
    """A database argument: a URL as text, or a path with `~` expanded."""
    return text if "://" in text else Path(text).expanduser()


def file_of(text: str, what: str) -> Path:
    """A database argument that must be a path."""
    found = source_of(text)
    if not isinstance(found, Path):
        raise DatabaseError(f"{what}: {text.split('://')[0]}://... is not a file; expected a path, "
                            "or for a server `merge --out`")  # fmt: skip
    return found


def cases_of(shapes: Sequence[str], epilogue: str | None, fp8: Format) -> list[Case]:
    """Cases of the shapes of ``--shape``, with the epilogue of ``--epilogue``."""
    from lokakern.workloads.norm_cases import epilogue_cases
    from lokakern.workloads.suites import shape_cases

    sizes = [shape_of(text) for text in shapes]
    return list(shape_cases(sizes, fp8) if epilogue is None
                else epilogue_cases(sizes, epilogue, fp8))  # fmt: skip


def with_shipped(user: Path) -> list[Path]:
    """The shipped databases, and this one if it exists."""
    from lokakern.registry.storage import paths

    return [*paths.shipped_databases(), *([user] if user.exists() else [])]


@contextmanager
def reading(database: str | None, *, no_shipped: bool = False) -> Iterator[None]:
    """Let dispatch read the shipped files, unless they are left out, and this database inside."""
    if database is None and no_shipped:
        from lokakern.registry.storage.paths import user_database

        database = str(user_database())
    if database is None:
        yield
        return
    from lokakern.registry.sharing.import_file import union_of
    from lokakern.registry.snapshot.snapshot import Snapshot
    from lokakern.registry.storage.paths import shipped_databases
    from lokakern.selection import dispatcher

    shipped, given = [] if no_shipped else shipped_databases(), source_of(database)
    rows = union_of(shipped, [given])
    dispatcher.use_snapshot(Snapshot(rows, [*map(str, shipped), database]))
    try:
        yield
    finally:
        dispatcher.use_snapshot(None)
