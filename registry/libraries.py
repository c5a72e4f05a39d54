"""Libraries that may be installed, and plugins: whose kernels count here, and why others do not.

None is imported to find out. Its version is read from its metadata; whether it works was tried in
processes of their own (`bench/report/library_smoke.py`), because an import or a first call may end
a process. What they found is kept beside the compiled programs and holds for one state of the
library and of its adapter, one version of torch and of Python, on one type of device: anything else
is tried again.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from lokakern.device import current_device
from lokakern.registry import digests
from lokakern.registry.locks import Lock
from lokakern.triton_interpreter import is_interpreted
from lokakern.types import Device

_log = logging.getLogger(__name__)
PLUGINS = "lokakern.kernels"  # the group of entry points
FOLDER = "0+"  # begins the version of a folder that nobody installed, as PEP 440 has it
SOURCES = {".py", ".cu", ".cuh", ".h", ".hpp", ".so"}
LOCK_TIMEOUT_S = 60.0
LARGEST_FILE_BYTES = 1 << 20
LONGEST_WHY = 500
OURS = frozenset({"torch", "triton", "cuda", "hip"})  # folders of kernels, no names of plugins
TRY = "python -m lokakern.bench list libraries"
INTERPRET = "set TRITON_INTERPRET=1"


@dataclass(frozen=True)
class Package:
    """A distribution that brings a library, as its adapter is written for it.

    Attributes:
        name: As pip knows it.
        versions: Which of its versions, as PEP 440 says it; empty: any.
        modules: What is imported before its kernels are called.
        or_folder: Whether a folder on the path serves, which nobody installed.
    """

    name: str
    versions: str
    modules: tuple[str, ...]
    or_folder: bool = False

    @property
    def version_here(self) -> str | None:
        """Of a folder, of what is in it."""
        version = _version_here(self.name)
        if version is None and self.or_folder:
            return _folder_version(self.modules[0])
        return version

    def takes(self, version: str) -> bool:
        if not self.versions or (self.or_folder and version.startswith(FOLDER)):
            return True
        return _contains(self.versions, version)


@dataclass(frozen=True, kw_only=True)
class Library:
    """Somebody else's kernels.

    Attributes:
        name: First part of its kernels' names; a plugin's is that of its entry point.
        packages: What brings it; the first that is installed in a version that is taken counts.
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
        found = [(p, version) for p in self.packages if (version := p.version_here) is not None]
        suitable = (pair for pair in found if pair[0].takes(pair[1]))
        return next(suitable, found[0] if found else None)

    @property
    def words(self) -> tuple[str, ...]:
        """What goes into the digests of its kernels; nothing where it is not installed."""
        return () if self.here is None else (f"package:{self.here[0].name}=={self.here[1]}",)

    def why_not_here(self) -> str | None:
        """Why what is installed is none that the adapter is written for, or None."""
        if self.here is None:
            names = " or ".join(package.name for package in self.packages)
            return f"{self.name} is not installed ({self.install or f'pip install {names}'})"
        package, version = self.here
        if not package.takes(version):
            return f"written for {package.name} {package.versions}; {version} is installed"
        return None

    @property
    def state(self) -> str:
        """A digest of the adapter; for a plugin, of its files' sizes and times."""
        return _state_of(self)


@dataclass(frozen=True)
class Trial:
    """How trying a library on a device ended.

    Attributes:
        why: What is wrong with the library; empty where it works.
        kernels: What is wrong with kernels of it, by name, where it works but for them.
        right: How many of its kernels were launched and right.
        idle: Why the others took none of the problems, by name.
        sizes: Of kernels of a plugin that were right, up to which sizes, as words by name.
    """

    why: str = ""
    kernels: Mapping[str, str] = field(default_factory=dict)
    right: int = 0
    idle: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)


LIBRARIES: dict[str, Library] = {}  # of adapters
trying = ""  # the library that this process tries: no trial is asked for it


def declare(library: Library) -> Library:
    """Enter a library that has an adapter.

    Raises:
        ValueError: The name is taken.
    """
    if library.name in LIBRARIES:
        raise ValueError(f"library {library.name!r} is declared twice")
    LIBRARIES[library.name] = library
    return library


def named(name: str) -> Library:
    """An adapter's library, or a plugin."""
    return LIBRARIES.get(name) or plugins()[name]


def import_modules(library: Library) -> None:
    """Import what its kernels need; nothing where it is not installed."""
    for module in library.here[0].modules if library.here is not None else ():
        importlib.import_module(module)


def why_not(name: str, device: Device, kernel: str) -> str | None:
    """Why a library's kernel does not count on a device, or None.

    What is not installed here counts nowhere; on another device than the one here nothing was
    tried.
    """
    library = named(name)
    reason = library.why_not_here()
    if reason is not None or name == trying or device != current_device():
        return reason
    return why_not_tried(library, device, kernel)


def why_not_tried(library: Library, device: Device, kernel: str = "") -> str | None:
    """What a trial says against a library that is here, or against a kernel of it, or None."""
    trial = trial_of(library, device)
    if trial is None:
        return f"{library.name} {why_no_trial(library, device)}"
    return trial.why or trial.kernels.get(kernel) or None


def why_no_trial(library: Library, device: Device) -> str:
    """Why no trial of a library holds here, and what to do, such as "was never tried here: ..."."""
    if is_changed(library, device):
        as_here = device.is_gpu or _was_tried(library, device, is_interpreted())
        return f"changed since it was tried: {'' if as_here else 'TRITON_INTERPRET=1 '}{TRY}"
    if is_interpreted() or _key(library, device, interpreted=True) not in _known():
        return f"was never tried here: {TRY}"
    return f"was tried in the interpreter only: {TRY if device.is_gpu else INTERPRET}"


def words_of(error: BaseException | str) -> str:
    """What went wrong, short and in characters that any terminal takes."""
    text = error if isinstance(error, str) else f"{type(error).__name__}: {error}"
    return "".join(c if c.isprintable() else " " for c in text[:LONGEST_WHY])


# --- versions


def is_of_another(word: str) -> bool:
    """Whether a row's word about a package names another than what its library calls here.

    Where nothing of the library is installed, the word stands: it was true elsewhere.
    """
    name = word.removeprefix("package:").partition("==")[0]
    for library in (*LIBRARIES.values(), *plugins().values()):
        if any(package.name == name for package in library.packages):
            return library.words not in ((), (word,))
    return False


@functools.cache
def _contains(versions: str, version: str) -> bool:
    """What `Package.takes` asks at every problem: parsing takes longer than a launch."""
    from packaging.specifiers import SpecifierSet  # rarely needed, and slow to import

    return SpecifierSet(versions).contains(version, prereleases=True)


@functools.cache
def _version_here(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return None


@functools.cache
def _folder_version(module: str) -> str | None:
    """Of a module that lies on the path: what its sources say."""
    files = sorted(_files_of(module))
    if not files:
        return None
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0".encode() + path.read_bytes())
    return f"{FOLDER}{digest.hexdigest()[:12]}"


def _files_of(module: str) -> Iterator[Path]:
    """Sources and libraries of a module that is in no package, without importing it."""
    try:
        found = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return
    if found is None:
        return
    places: Iterable[Path] = map(Path, found.submodule_search_locations or ())
    yield from (
        path
        for place in places
        for path in place.rglob("*")
        if path.suffix in SOURCES and path.is_file()
    )
    if not found.submodule_search_locations and found.origin and Path(found.origin).is_file():
        yield Path(found.origin)


@functools.cache
def _state_of(library: Library) -> str:
    if not library.is_plugin:
        return digests.kernel_digest(library.name, (f"adapters/{library.name}",))
    modules = {name.partition(".")[0] for package in library.packages for name in package.modules}
    files = sorted(path for module in modules for path in _files_of(module))
    facts = [(str(path), path.stat()) for path in files]
    words = [f"{path} {found.st_size} {found.st_mtime_ns}" for path, found in facts]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()


# --- plugins


@functools.cache
def plugins() -> dict[str, Library]:
    """The plugins that are installed, by name; those of equal names are left out, and said."""
    found: dict[str, Library] = {}
    for entry in importlib.metadata.entry_points(group=PLUGINS):
        # A package whose metadata are damaged has no name.
        name = (entry.dist.name if entry.dist is not None else None) or entry.name
        if entry.name in found or entry.name in LIBRARIES or entry.name in OURS:
            _log.warning("plugin %s of %s is left out: the name is taken", entry.name, name)
            continue
        module = entry.value.partition(":")[0].strip()  # what is none fails when it is tried
        package = Package(name, "", (module,))
        found[entry.name] = Library(name=entry.name, packages=(package,), is_plugin=True)
    return found


def plugin_of(module: str) -> Library | None:
    """The plugin that a module belongs to, by its name, however it was imported."""
    every = plugins().values()
    modules = [(name, plugin) for plugin in every for p in plugin.packages for name in p.modules]
    inside = [(name, p) for name, p in modules if f"{module}.".startswith(f"{name}.")]
    top = module.partition(".")[0]
    beside = [(name, p) for name, p in modules if name.partition(".")[0] == top]
    if inside:
        return max(inside, key=lambda pair: len(pair[0]))[1]
    return beside[0][1] if beside else None


def plugin_meant(word: str) -> Library | None:
    """The plugin whose kernels a word of their names means: its own, a module's, or part of one."""
    top = word.lower().partition(".")[0]
    exact = plugins().get(top) or plugin_of(top)
    if exact is not None or not top:
        return exact
    modules = ((m, plugin) for plugin in plugins().values() for p in plugin.packages
               for m in p.modules)  # fmt: skip
    return next((plugin for module, plugin in modules if top in module.lower()), None)


# --- trials

_unkept: dict[str, Trial] = {}  # where the file cannot be written


def trials_file() -> Path:
    return _file_beside(os.environ.get("LOKAKERN_CACHE"))


@functools.cache
def _file_beside(_cache: str | None) -> Path:
    """Asked at every problem: to find a user's folder takes longer than all else."""
    from lokakern.nvrtc import cache_folder  # whose filelock takes time at every import

    return cache_folder().with_name("trials.json")


def trial_of(library: Library, device: Device, interpreted: bool | None = None) -> Trial | None:
    """How it ended when what is installed was tried on a device like this; None: never.

    In Triton's interpreter or not; None: as this process runs.
    """
    key = _key(library, device, interpreted)
    path = trials_file()
    return _unkept.get(key) or _trials(path, _changed(path)).get(key)


def is_changed(library: Library, device: Device) -> bool:
    """Whether it was tried here in another version or state only, be it in the interpreter."""
    known, ways = _known(), {is_interpreted(), True}
    if any(_key(library, device, way) in known for way in ways):
        return False
    return any(_was_tried(library, device, way) for way in ways)


def _was_tried(library: Library, device: Device, interpreted: bool) -> bool:
    """Whether it was tried here in any version or state."""
    begin, end = f"{library.name} | ", f" | {_here(device, interpreted)}"
    return any(key.startswith(begin) and key.endswith(end) for key in _known())


def _known() -> set[str]:
    path = trials_file()
    return _trials(path, _changed(path)).keys() | _unkept.keys()


def keep_trial(library: Library, device: Device, trial: Trial) -> None:
    """Write down how a trial ended, in the place of the one before."""
    path, key = trials_file(), _key(library, device)
    lock = Lock(path.with_name(f"{path.name}.lock"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not lock.acquire(LOCK_TIMEOUT_S):
            raise TimeoutError(f"its lock was held for {LOCK_TIMEOUT_S:.0f} s")
        entries = _read(path)
        entries[key] = {
            "why": trial.why, "kernels": dict(trial.kernels), "right": trial.right,
            "idle": dict(trial.idle), "sizes": dict(trial.sizes),
        }  # fmt: skip
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text(json.dumps({"version": 1, "trials": entries}, indent=1))
        unfinished.replace(path)
    except OSError as error:
        _log.warning("%s cannot be written (%s): libraries are tried again next time", path, error)
        _unkept[key] = trial
    finally:
        lock.release()
    _trials.cache_clear()


def _key(library: Library, device: Device, interpreted: bool | None = None) -> str:
    here = _here(device, is_interpreted() if interpreted is None else interpreted)
    return " | ".join((library.name, *library.words, library.state[:16], here))


def _here(device: Device, interpreted: bool) -> str:
    """What a trial holds for besides the state of the library."""
    words = [f"torch {torch.__version__}", f"Python {platform.python_version()}",
             device.product, device.partition]  # fmt: skip
    return " | ".join([*words, "interpreted"] if interpreted else words)


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
    known, later = {"why", "kernels", "right"}, {"idle", "sizes"}  # earlier trials lack the latter
    if not isinstance(entry, dict) or set(entry) | later != known | later:
        return False
    by_name = [entry["kernels"], *(entry.get(name, {}) for name in later)]
    if not all(isinstance(words, dict) for words in by_name) or type(entry["right"]) is not int:
        return False
    return all(
        isinstance(word, str) and len(word) <= LONGEST_WHY
        for word in (entry["why"], *(x for words in by_name for x in (*words, *words.values())))
    )
