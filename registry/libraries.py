"""Libraries that may be installed, and plugins: whose kernels count here, and why others do not.

None is imported to find out. Its version is read from its metadata; whether it works was tried in
processes of their own (`bench/trials.py`), because an import or a first call may end a process.
What they found is kept beside the compiled programs and holds for one version of the library, of
torch and of Python, on one type of device: anything else is tried again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import platform
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import filelock
import torch
from packaging.specifiers import SpecifierSet

from lokakern.device import devices_here
from lokakern.nvrtc import cache_folder
from lokakern.types import Device

_log = logging.getLogger(__name__)
PLUGINS = "lokakern.kernels"  # the group of entry points
LARGEST_FILE_BYTES = 1 << 20
LONGEST_WHY = 500
CHECKOUT = "0+"  # begins the version of a folder on the path, as PEP 440 has it
TRY = "python -m lokakern.bench list libraries"


@dataclass(frozen=True)
class Package:
    """A distribution that brings a library, as its adapter is written for it.

    Attributes:
        name: As pip knows it.
        versions: Which of its versions, as PEP 440 says it; empty: any.
        modules: What is imported before its kernels are called.
    """

    name: str
    versions: str
    modules: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Library:
    """Somebody else's kernels.

    Attributes:
        name: First part of its kernels' names; a plugin's is that of its entry point.
        packages: What brings it; the first that is installed counts.
        install: How to get it, where no pip install of a package is it.
        is_plugin: Whether its kernels register when its modules are imported.
        never_run: Why no machine has run the adapter yet; empty once one has.
    """

    name: str
    packages: tuple[Package, ...]
    install: str = ""
    is_plugin: bool = False
    never_run: str = ""

    @property
    def here(self) -> tuple[Package, str] | None:
        """What is installed, and its version."""
        versions = ((p, _version_here(p.name, p.modules)) for p in self.packages)
        return next(((package, v) for package, v in versions if v is not None), None)

    @property
    def words(self) -> tuple[str, ...]:
        """What goes into the digests of its kernels; nothing where it is not installed."""
        return () if self.here is None else (f"package:{self.here[0].name}=={self.here[1]}",)

    def why_not_here(self) -> str | None:
        """Why what is installed is none that the adapter is written for, or None."""
        if self.here is None:
            names = " or ".join(package.name for package in self.packages)
            how = self.install or f"pip install {names}"
            return f"{self.name} is not installed ({how})"
        package, version = self.here
        if not version.startswith(CHECKOUT) and not SpecifierSet(package.versions).contains(
            version, prereleases=True
        ):
            return f"written for {package.name} {package.versions}; {version} is installed"
        return None


@dataclass(frozen=True)
class Trial:
    """How trying a library on a device ended.

    Attributes:
        why: What is wrong with the library; empty where it works.
        kernels: What is wrong with kernels of it, by name, where it works but for them.
        right: How many of its kernels were launched and right; others took none of the problems.
    """

    why: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict)
    right: int = 0


LIBRARIES: dict[str, Library] = {}
_may_import = True
trying = ""  # the library that this process tries: no trial is asked for it


def declare(library: Library) -> Library:
    """Enter a library.

    Raises:
        ValueError: The name is taken.
    """
    if library.name in LIBRARIES:
        raise ValueError(f"library {library.name!r} is declared twice")
    LIBRARIES[library.name] = library
    return library


def why_not(name: str, device: Device, kernel: str) -> str | None:
    """Why a library's kernel does not count on a device, or None.

    What is not installed here counts nowhere; of a device that is elsewhere nothing was tried.
    """
    library = LIBRARIES[name]
    reason = library.why_not_here()
    if reason is not None or name == trying or device not in devices_here():
        return reason
    return why_not_tried(library, device, kernel)


def why_not_tried(library: Library, device: Device, kernel: str = "") -> str | None:
    """What a trial says against a library that is here, or against a kernel of it, or None."""
    trial = trial_of(library, device)
    if trial is None:
        return f"{library.name} was never tried here: {TRY}"
    return trial.why or trial.kernels.get(kernel) or None


class NotImportedError(RuntimeError):
    """A library is wanted where none is to be imported."""


@contextmanager
def none_imported() -> Iterator[None]:
    """Launches inside that would import a library raise NotImportedError instead."""
    global _may_import
    _may_import = False
    try:
        yield
    finally:
        _may_import = True


def import_modules(library: Library) -> None:
    """Import what its kernels need; nothing where it is not installed.

    Raises:
        NotImportedError: Inside `none_imported`.
    """
    if not _may_import:
        raise NotImportedError(library.name)
    for module in library.here[0].modules if library.here is not None else ():
        importlib.import_module(module)


def is_of_another(word: str) -> bool:
    """Whether a row's word about a package names a version that is not the one installed here.

    Where it is not installed, the word stands: what was measured elsewhere holds there.
    """
    name, _, version = word.removeprefix("package:").partition("==")
    modules = (p.modules for library in LIBRARIES.values() for p in library.packages
               if p.name == name)  # fmt: skip
    return _version_here(name, next(modules, ())) not in (version, None)


@functools.cache
def _version_here(package: str, modules: tuple[str, ...]) -> str | None:
    """Of an installed package; of a module that lies on the path without one, of its source."""
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        pass
    if not modules:
        return None
    try:
        found = importlib.util.find_spec(modules[0].partition(".")[0])
    except (ImportError, ValueError):
        return None
    folder = next(iter(found.submodule_search_locations or ()), None) if found else None
    if folder is None:
        return None
    digest = hashlib.sha256()
    for path in sorted(Path(folder).rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return f"{CHECKOUT}{digest.hexdigest()[:12]}"


# --- plugins


@functools.cache
def plugins() -> dict[str, Library]:
    """The plugins that are installed, by name; those of equal names are left out, and said."""
    found: dict[str, Library] = {}
    for entry in importlib.metadata.entry_points(group=PLUGINS):
        name = entry.dist.name if entry.dist is not None else entry.name
        if entry.name in found or entry.name in LIBRARIES:
            _log.warning("plugin %s of %s is left out: the name is taken", entry.name, name)
            continue
        package = Package(name, "", (entry.module,))
        found[entry.name] = Library(name=entry.name, packages=(package,), is_plugin=True)
    return found


# --- trials


def trials_file() -> Path:
    return cache_folder().with_name("trials.json")


def trial_of(library: Library, device: Device) -> Trial | None:
    """How it ended when what is installed was tried on a device like this; None: never."""
    return _trials(trials_file(), _changed(trials_file())).get(_key(library, device))


def keep_trial(library: Library, device: Device, trial: Trial) -> None:
    """Write down how a trial ended, in the place of the one before."""
    path = trials_file()
    path.parent.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(f"{path}.lock"):
        entries = _read(path)
        entries[_key(library, device)] = {
            "why": trial.why, "kernels": dict(trial.kernels), "right": trial.right
        }  # fmt: skip
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"version": 1, "trials": entries}, indent=1))
        unfinished.replace(path)
    _trials.cache_clear()


def _key(library: Library, device: Device) -> str:
    words = (library.name, *library.words, f"torch {torch.__version__}",
             f"Python {platform.python_version()}", device.product, device.partition)  # fmt: skip
    return " | ".join(words)


def _changed(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


@functools.lru_cache(maxsize=4)
def _trials(path: Path, _changed_ns: int) -> dict[str, Trial]:
    return {key: Trial(**entry) for key, entry in _read(path).items()}


def _read(path: Path) -> dict[str, Any]:
    """Entries that are what `keep_trial` writes; whatever else is there was never tried."""
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST_FILE_BYTES + 1)
        content: Any = json.loads(text) if len(text) <= LARGEST_FILE_BYTES else None
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict) or content.get("version") != 1:
        return {}
    entries = content.get("trials")
    if not isinstance(entries, dict):
        return {}
    return {key: entry for key, entry in entries.items() if _is_entry(entry)}


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, dict) or set(entry) != {"why", "kernels", "right"}:
        return False
    kernels, right = entry["kernels"], entry["right"]
    if not isinstance(kernels, dict) or type(right) is not int:
        return False
    return all(
        isinstance(word, str) and len(word) <= LONGEST_WHY
        for word in (entry["why"], *kernels, *kernels.values())
    )
