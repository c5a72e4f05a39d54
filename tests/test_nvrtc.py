"""CUDA programs: what is compiled when, a disk cache that many processes hammer, and launches."""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import pickle
import random
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import filelock
import pytest
import torch

from lokakern import driver, jit, nvrtc
from lokakern.driver import CudaLaunch, TensorMap, tensor_map
from lokakern.errors import CompilationError, LaunchError
from lokakern.kernels.cuda import quantize
from lokakern.nvrtc import Program
from lokakern.registry.register import KERNELS
from lokakern.types import Device, Granularity

FEATURES = str(Path(__file__).with_name("fixtures") / "cuda_features.cu")
BOX = (("ROWS", 16), ("COLUMNS", 32))
H200 = Device("nvidia", "NVIDIA H200", "sm_90", 132, 140)
SOURCE = '#include "step.cuh"\nextern "C" __global__ void add(float* x) { x[0] += STEP * SCALE; }\n'
STEP = '#include "unit.cuh"\n#define STEP (2 * UNIT)\n'
UNIT = "#pragma once\n#define UNIT 1.0f\n"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own; none of the user's is touched."""
    monkeypatch.setenv("LOKAKERN_CACHE", str(tmp_path / "cache"))
    nvrtc._warn_once.cache_clear()
    yield tmp_path / "cache" / "cubin"
    nvrtc._warn_once.cache_clear()


@pytest.fixture
def program(tmp_path: Path) -> Program:
    for name, text in (("add.cu", SOURCE), ("step.cuh", STEP), ("unit.cuh", UNIT)):
        (tmp_path / name).write_text(text, encoding="utf-8")
    return Program(str(tmp_path / "add.cu"), "add", (("SCALE", 3),))


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.cubin"))


# --- compiling


def test_a_program_compiles_without_a_gpu_and_once(
    program: Program, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = nvrtc.cubin(program, "sm_90")
    assert made.startswith(b"\x7fELF")
    assert len(entries(cache)) == 1
    monkeypatch.setattr(nvrtc, "_compile", None)
    assert nvrtc.cubin(program, "sm_90") == made


def test_the_key_has_everything_that_determines_the_code(program: Program, cache: Path) -> None:
    nvrtc.cubin(program, "sm_90")
    folder = Path(program.source).parent
    variants = [
        (Program(program.source, "add", (("SCALE", 4),)), "sm_90"),
        (Program(program.source, "add", program.macros, ("--use_fast_math",)), "sm_90"),
        (program, "sm_100"),
    ]
    for count, (variant, architecture) in enumerate(variants, 2):
        nvrtc.cubin(variant, architecture)
        assert len(entries(cache)) == count
    (folder / "unit.cuh").write_text(UNIT.replace("1.0f", "1.5f"), encoding="utf-8")
    nvrtc.cubin(program, "sm_90")
    assert len(entries(cache)) == len(variants) + 2


def test_the_version_of_nvrtc_is_in_the_key(
    program: Program, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvrtc.cubin(program, "sm_90")
    monkeypatch.setattr(nvrtc, "version", lambda: "13.0 other")
    nvrtc.cubin(program, "sm_90")
    assert len(entries(cache)) == 2


def test_an_error_of_the_source_shows_the_log(program: Program, cache: Path) -> None:
    Path(program.source).write_text(SOURCE.replace("STEP *", "MISSING *"), encoding="utf-8")
    with pytest.raises(CompilationError, match=r'SCALE=3 for .*sm_90a.*\n.*"MISSING" is undefined'):
        nvrtc.cubin(program, "sm_90")
    assert not entries(cache)


def test_a_missing_include_is_named(program: Program) -> None:
    Path(program.source).with_name("unit.cuh").unlink()
    with pytest.raises(CompilationError, match=r"add\.cu: cannot read .*unit\.cuh: No such file"):
        nvrtc.cubin(program, "sm_90")


def test_two_includes_with_one_name_raise(program: Program, tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "other.cuh").write_text('#include "unit.cuh"\n', encoding="utf-8")
    (tmp_path / "deep" / "unit.cuh").write_text(UNIT, encoding="utf-8")
    Path(program.source).write_text('#include "deep/other.cuh"\n' + SOURCE, encoding="utf-8")
    with pytest.raises(CompilationError, match="rename one"):
        nvrtc.cubin(program, "sm_90")


def test_other_vendors_of_gpus_raise(program: Program) -> None:
    for other in ("gfx942", "sm_90a", "sm_", "sm_x"):
        with pytest.raises(CompilationError, match=f"not {other}"):
            nvrtc.cubin(program, other)


def test_a_program_can_be_pickled(program: Program, cache: Path) -> None:
    """A worker with no GPU compiles what was recorded, and the real run finds it."""
    travelled = pickle.loads(pickle.dumps(program))
    assert travelled == program and hash(travelled.key) == hash(program.key)
    assert travelled.compile(H200) is False
    (entry,) = entries(cache)
    assert nvrtc.cubin(program, "sm_90") == entry.read_bytes()[:-32]
    assert travelled.compile(H200) is True


@pytest.mark.rest
def test_kernels_are_listed_without_a_compiler() -> None:
    """They raise an error with the reason when they compile."""
    code = (
        "import sys\n"
        "sys.modules['cuda'] = sys.modules['cuda.bindings'] = None\n"
        "from lokakern import nvrtc\n"
        "from lokakern.device import current_device\n"
        "from lokakern.registry.register import kernel_named\n"
        "assert kernel_named('cuda.quantize_row').digest\n"
        "print(nvrtc.why_not(current_device('cpu')))\n"
        f"try:\n    nvrtc.cubin(nvrtc.Program({FEATURES!r}, 'add_late'), 'sm_90')\n"
        "except nvrtc.CompilationError as error:\n    print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(nvrtc.__file__).parent.parent,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    here, error = ran.stdout.splitlines()
    assert here == f"needs the package cuda-bindings ({nvrtc.INSTALL})"
    assert error.startswith("CUDA kernels need cuda-bindings (") and nvrtc.INSTALL in error


def test_missing_libraries_here_do_not_affect_other_devices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvrtc, "_missing_package", lambda: "missing")
    assert nvrtc.why_not(H200) is None


def test_bindings_without_nvrtc_itself_are_not_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise CompilationError("CUDA kernels need NVRTC")

    monkeypatch.setattr(nvrtc, "version", missing)
    monkeypatch.setattr(nvrtc, "devices_here", lambda: [H200])
    nvrtc._missing_package.cache_clear()
    assert nvrtc.why_not(H200) == "CUDA kernels need NVRTC"
    nvrtc._missing_package.cache_clear()


# --- the disk cache

KEYS = [f"{number:064x}" for number in range(1, 9)]
PROCESSES = 10


def content_of(key: str) -> bytes:
    return key.encode() * 500


def hammer(seed: int, log: Path, corrupts: bool, wrong: Any) -> None:
    """Ask for every key many times; some processes tear entries apart meanwhile."""
    chance = random.Random(seed)

    def make(key: str) -> bytes:
        with log.open("a") as file:
            file.write(f"{key}\n")
        time.sleep(0.01)
        return content_of(key)

    for key in chance.choices(KEYS, k=60) + KEYS:
        if nvrtc._cached(key, lambda key=key: make(key)) != content_of(key):  # type: ignore[misc]
            wrong.value = 1
        path = nvrtc.cache_folder() / f"{key}.cubin"
        if corrupts and chance.random() < 0.3:
            if chance.random() < 0.5:
                os.truncate(path, chance.randrange(100))
            else:
                path.write_bytes(b"not ours")


@pytest.mark.parametrize("corrupts", [False, True], ids=["whole", "torn"])
def test_many_processes_share_one_cache(
    tmp_path: Path, cache: Path, corrupts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a wrong byte nor a crash; one process compiles, the others read."""
    monkeypatch.setattr(nvrtc, "_LOCK_TIMEOUT_S", 1800.0)  # however busy the machine is
    log = tmp_path / "made"
    processes = multiprocessing.get_context("fork")
    wrong = processes.Value("i", 0)
    started = [
        processes.Process(target=hammer, args=(seed, log, corrupts and seed % 3 == 0, wrong))
        for seed in range(PROCESSES)
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(1800)
    assert [process.exitcode for process in started] == [0] * PROCESSES
    assert not wrong.value
    made = Counter(log.read_text().split())
    assert made.keys() == set(KEYS)
    if corrupts:
        for key in KEYS:
            assert nvrtc._cached(key, lambda key=key: content_of(key)) == content_of(key)  # type: ignore[misc]
    else:
        assert set(made.values()) == {1}
    assert {path.name for path in entries(cache)} == {f"{key}.cubin" for key in KEYS}
    strays = [p.name for p in cache.iterdir() if p.suffix not in (".cubin", ".lock")]
    assert not strays


@pytest.mark.parametrize("torn", [b"", b"x", b"\x7fELF" + b"\0" * 400], ids=len)
def test_a_broken_entry_is_a_miss_and_is_replaced(cache: Path, torn: bytes) -> None:
    path = cache / f"{KEYS[0]}.cubin"
    cache.mkdir(parents=True)
    path.write_bytes(torn)
    assert nvrtc._cached(KEYS[0], lambda: b"right") == b"right"
    assert nvrtc._read(path) == b"right"


def test_a_failure_keeps_neither_an_entry_nor_the_lock(cache: Path) -> None:
    def fail() -> bytes:
        raise CompilationError("no")

    for _ in range(2):
        with pytest.raises(CompilationError, match="no"):
            nvrtc._cached(KEYS[0], fail)
    lock = filelock.FileLock(cache / f".{KEYS[0][: nvrtc._LOCK_DIGITS]}.lock")
    lock.acquire(timeout=0)  # nobody holds it
    lock.release()
    assert nvrtc._cached(KEYS[0], lambda: b"right") == b"right"


def test_a_stuck_process_delays_but_does_not_stop(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nvrtc, "_LOCK_TIMEOUT_S", 0.05)
    with nvrtc._locked(cache, KEYS[0]):
        found = []
        other = threading.Thread(target=lambda: found.append(nvrtc._cached(KEYS[0], lambda: b"x")))
        other.start()
        other.join(10)
    assert found == [b"x"]
    assert "another process" in caplog.text


def test_without_a_cache_folder_it_compiles_and_warns_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOKAKERN_CACHE", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        for key in KEYS[:3]:
            assert nvrtc._cached(key, lambda: b"right") == b"right"
    assert caplog.text.count("cannot write") == 1


def test_a_full_disk_disables_only_the_cache(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: Any, **__: Any) -> Any:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(nvrtc.tempfile, "NamedTemporaryFile", full)
    for key in KEYS[:2]:
        assert nvrtc._cached(key, lambda: b"right") == b"right"
    assert not entries(cache)
    assert caplog.text.count("No space left") == 1


# --- launching, with a driver that writes down what it was given

LAUNCH = Program(FEATURES, "add_late", BOX)


class Operand:
    """The attributes of a tensor that a launch reads."""

    is_meta = False
    device = torch.device("cpu")

    def __init__(self, address: int, device: int = 0) -> None:
        self._address = address
        self._device = device

    def get_device(self) -> int:
        return self._device

    def data_ptr(self) -> int:
        return self._address


class RecordingDriver:
    """Stands in for libcuda: reads the memory of a launch as the driver would."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.limits: list[tuple[int, int]] = []
        self.contexts = 0
        self.capture_mode = 0
        self.codes: list[int] = []
        self.parameters = "PPiq"
        self.encoded: list[Any] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, table: Any, _extra: None) -> int:
        read = struct.unpack("@7IPPI", ctypes.string_at(config.value, struct.calcsize("@7IPPI")))
        attributes = ctypes.string_at(read[8], 72 * read[9])
        addresses = struct.unpack(
            f"{len(self.parameters)}P", ctypes.string_at(table.value, 8 * len(self.parameters))
        )
        time.sleep(0)  # lets other threads run, as a foreign call does
        values = [
            struct.unpack(code, ctypes.string_at(address, struct.calcsize(code)))[0]
            if code != "T" else ctypes.string_at(address, 128)
            for code, address in zip(self.parameters, addresses, strict=True)
        ]  # fmt: skip
        self.launches.append((read[:8], attributes, values))
        return self.codes.pop(0) if self.codes else 0

    def cuLibraryLoadData(self, library: Any, *_: Any) -> int:
        library._obj.value = 1
        return 0

    def cuLibraryGetKernel(self, kernel: Any, *_: Any) -> int:
        kernel._obj.value = 2
        return 0

    def cuKernelGetFunction(self, function: Any, *_: Any) -> int:
        function._obj.value = 3
        return 0

    def cuKernelSetAttribute(self, limit: int, value: int, *_: Any) -> int:
        self.limits.append((limit, value))
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.capture_mode = self.capture_mode, mode._obj.value
        return 0

    def cuCtxGetCurrent(self, _context: Any) -> int:
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, _device: int) -> int:
        context._obj.value = 4
        return 0

    def cuCtxSetCurrent(self, _context: Any) -> int:
        self.contexts += 1
        return 0

    def cuTensorMapEncodeTiled(self, target: Any, dtype: int, rank: int, *rest: Any) -> int:
        address, sizes, strides, box, _, _, swizzle, _, _ = rest
        assert target.value % 64 == 0
        ctypes.memset(target.value, 7, 128)
        self.encoded.append(
            (dtype, address.value, list(sizes), list(strides)[: rank - 1], list(box), swizzle)
        )
        return self.codes.pop(0) if self.codes else 0

    def cuGetErrorName(self, _code: int, text: Any) -> int:
        text._obj.value = b"CUDA_ERROR_INVALID_VALUE"
        return 0

    def cuGetErrorString(self, _code: int, text: Any) -> int:
        text._obj.value = b"invalid argument"
        return 0


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> RecordingDriver:
    made = RecordingDriver()
    monkeypatch.setattr(driver, "_driver", lambda: made)
    monkeypatch.setattr(driver, "cubin", lambda program, architecture: b"code")
    monkeypatch.setattr(driver, "current_device", lambda kind, index: H200)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 77, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(driver, "_maps", {})
    return made


def test_the_driver_gets_grid_stream_and_arguments(fake: RecordingDriver) -> None:
    launch = CudaLaunch(LAUNCH, pointers=2, scalars="iq", threads=96)
    big = 2**48 + 5
    for rows in (3, 2**31 - 1):
        launch((rows, 2, 1), (Operand(big), Operand(9)), (-rows, 2**40))  # type: ignore[arg-type]
        config, attributes, values = fake.launches[-1]
        assert config == (rows, 2, 1, 96, 1, 1, 0, 77)
        assert not attributes
        assert values == [big, 9, -rows, 2**40]
    assert not fake.limits
    assert fake.capture_mode == 0


def test_clusters_programmatic_launches_and_shared_memory_are_asked_for(
    fake: RecordingDriver,
) -> None:
    fake.parameters = "P"
    launch = CudaLaunch(
        LAUNCH, pointers=1, threads=32, shared_bytes=100_000, cluster=16, programmatic=True
    )
    launch((16, 1, 1), (Operand(1),))  # type: ignore[arg-type]
    config, attributes, _ = fake.launches[0]
    assert config[6] == 100_000
    assert struct.unpack_from("@i4x3I", attributes) == (4, 16, 1, 1)
    assert struct.unpack_from("@i4xi", attributes, 72) == (6, 1)
    assert fake.limits == [(8, 100_000), (14, 1)]


def test_tensor_maps_are_passed_by_value(fake: RecordingDriver) -> None:
    fake.parameters = "PfTT"
    launch = CudaLaunch(LAUNCH, pointers=1, scalars="f", tensor_maps=2, threads=32)
    maps = (TensorMap(), TensorMap())
    for number, made in enumerate(maps):
        ctypes.memset(made.address, number + 1, 128)
    launch((1, 1, 1), (Operand(5),), (0.5,), maps)  # type: ignore[arg-type]
    assert fake.launches[0][2] == [5, 0.5, b"\1" * 128, b"\2" * 128]


def test_threads_that_share_a_launch_keep_their_arguments_apart(fake: RecordingDriver) -> None:
    launch = CudaLaunch(LAUNCH, pointers=2, scalars="iq", threads=32)

    def run(number: int) -> None:
        for _ in range(200):
            operands = (Operand(number), Operand(number))
            launch((number, 1, 1), operands, (number, number))  # type: ignore[arg-type]

    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(number,)) for number in range(1, 9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(switch)
    assert len(fake.launches) == 8 * 200
    assert all(values == [config[0]] * 4 for config, _, values in fake.launches)
    assert len(launch._spare) <= 8


def test_an_error_names_the_launch_and_the_drivers_reason(fake: RecordingDriver) -> None:
    fake.codes = [1]
    launch = CudaLaunch(LAUNCH, pointers=2, scalars="iq", threads=2048)
    with pytest.raises(
        LaunchError, match=r"add_late .*: grid \(1, 1, 1\), 2048 threads.*INVALID_VAL"
    ):
        launch((1, 1, 1), (Operand(1), Operand(2)), (3, 4))  # type: ignore[arg-type]


def test_a_thread_new_to_cuda_gets_torchs_context(fake: RecordingDriver) -> None:
    launch = CudaLaunch(LAUNCH, pointers=2, scalars="iq", threads=32)
    launch((1, 1, 1), (Operand(1), Operand(2)), (3, 4))  # type: ignore[arg-type]
    before = fake.contexts
    fake.codes = [201, 0]
    launch((1, 1, 1), (Operand(1), Operand(2)), (3, 4))  # type: ignore[arg-type]
    assert (fake.contexts, len(fake.launches)) == (before + 1, 3)


def test_invalid_arguments_raise_before_anything_is_loaded(fake: RecordingDriver) -> None:
    launch = CudaLaunch(LAUNCH, pointers=2, scalars="iq", threads=32)
    with pytest.raises(LaunchError, match=r"given \(2, 1, 0\) .* bound for \(2, 2, 0\)"):
        launch((1, 1, 1), (Operand(1), Operand(2)), (3,))  # type: ignore[arg-type]
    with pytest.raises(LaunchError, match="on cpu; pass CUDA tensors"):
        launch((1, 1, 1), (torch.ones(1), torch.ones(1)), (3, 4))


def test_invalid_arguments_raise_in_warm_calls(fake: RecordingDriver) -> None:
    """A tensor map too few would be read where one of a launch before was."""
    fake.parameters = "PT"
    launch = CudaLaunch(LAUNCH, pointers=1, tensor_maps=1, threads=32)
    launch((1, 1, 1), (Operand(1),), (), (TensorMap(),))  # type: ignore[arg-type]
    for pointers, scalars, maps in [(1, 0, 0), (1, 1, 0), (2, 0, 1), (1, 0, 2)]:
        with pytest.raises(LaunchError, match=r"bound for \(1, 0, 1\)"):
            launch(
                (1, 1, 1), (Operand(1),) * pointers, (5,) * scalars, (TensorMap(),) * maps,
            )  # type: ignore[arg-type]  # fmt: skip
    assert len(fake.launches) == 1


def test_a_cooperative_launch_is_asked_for(fake: RecordingDriver) -> None:
    fake.parameters = "P"
    CudaLaunch(LAUNCH, pointers=1, threads=32, cooperative=True)((1, 1, 1), (Operand(1),))  # type: ignore[arg-type]
    assert struct.unpack_from("@i4xi", fake.launches[0][1]) == (2, 1)


def test_a_recorded_launch_contains_its_program(
    fake: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs: list[Any] = []
    recording = SimpleNamespace(device=H200, add=jobs.append)
    monkeypatch.setattr(jit, "recording", recording, raising=False)
    x = torch.empty(4, device="meta")
    CudaLaunch(LAUNCH, pointers=1, scalars="I", threads=32)((1, 1, 1), (x,), (1,))
    assert jobs == [LAUNCH]
    assert not fake.launches
    jobs[0].compile(H200)
    assert len(entries(nvrtc.cache_folder())) == 1


def test_recorded_kernels_equal_launched_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs: list[Any] = []
    recording = SimpleNamespace(device=H200, add=jobs.append)
    monkeypatch.setattr(jit, "recording", recording, raising=False)
    x = torch.empty(64, 1000, dtype=torch.bfloat16, device="meta")
    data = torch.empty(64, 1000, dtype=torch.float8_e4m3fn, device="meta")
    for granularity, span in ((Granularity.ROW, 1000), (Granularity.GROUP, 128)):
        launch = KERNELS[f"cuda.quantize_{granularity.suffix}"].launch
        launch(x, data, granularity.empty_scale(64, 1000, x.device), ())
        real = quantize.bind(1000, span, True, True, x.dtype, data.dtype)
        assert jobs.pop() == real.launch.program
    assert not jobs


def test_tensor_maps_are_cached_and_evicted(
    fake: RecordingDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.empty(64, 128, dtype=torch.bfloat16)
    first = tensor_map(x[:, 8:72], (16, 64))
    assert fake.encoded == [(1, x.data_ptr() + 16, [64, 64], [256], [64, 16], 3)]
    assert tensor_map(x[:, 8:72], (16, 64)) is first
    others = [
        tensor_map(x, (16, 64)),
        tensor_map(x, (32, 64)),
        tensor_map(x, (32, 64), 0),
        tensor_map(x.view(torch.int16), (32, 64)),
        tensor_map(x[:32], (16, 64)),
    ]
    assert len({made.address for made in (first, *others)}) == len(others) + 1
    monkeypatch.setattr(driver, "_MOST_MAPS", 8)
    for box in range(1, 20):
        tensor_map(x, (box, 64))
        assert len(driver._maps) <= 8
    assert ctypes.string_at(first.address, 128) == b"\7" * 128


def test_invalid_tensor_maps_raise_with_a_reason(fake: RecordingDriver) -> None:
    x = torch.empty(64, 128)
    for wrong in (lambda: tensor_map(x, (16,)), lambda: tensor_map(x, (16, 32), 48),
                  lambda: tensor_map(x.double(), (16, 32))):  # fmt: skip
        with pytest.raises(LaunchError, match="expected elements of 1, 2 or 4 bytes"):
            wrong()
    with pytest.raises(LaunchError, match="the last must be 1"):
        tensor_map(x.t(), (16, 32))
    fake.codes = [1]
    with pytest.raises(LaunchError, match=r"cuTensorMapEncodeTiled of \[64, 128\].*INVALID_VALUE"):
        tensor_map(x, (16, 512))


# --- on a GPU


def test_the_feature_kernels_compile() -> None:
    for entry in ("copy_box", "swap_in_cluster", "add_late"):
        assert entry.encode() in nvrtc.cubin(Program(FEATURES, entry, BOX), "sm_90")


def hopper() -> None:
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs a GPU of sm_90 or later")


@pytest.mark.gpu
@pytest.mark.parametrize("corner", [(0, 0), (48, 64), (56, 112)], ids=str)
def test_a_tensor_map_copies_a_box(corner: tuple[int, int]) -> None:
    """Into shared memory beyond 48 KiB; what lies outside of the tensor is 0."""
    hopper()
    x = torch.arange(64 * 128, dtype=torch.int32, device="cuda").reshape(64, 128)
    launch = CudaLaunch(
        Program(FEATURES, "copy_box", BOX), pointers=1, scalars="ii", tensor_maps=1, threads=128,
        shared_bytes=64 * 1024,
    )  # fmt: skip
    out = torch.full((16, 32), -1, dtype=torch.int32, device="cuda")
    launch((1, 1, 1), (out,), corner, (tensor_map(x, (16, 32), 0),))
    padded = torch.nn.functional.pad(x, (0, 32, 0, 16))
    row, column = corner
    assert torch.equal(out, padded[row : row + 16, column : column + 32])


@pytest.mark.gpu
def test_blocks_of_a_cluster_read_each_others_memory() -> None:
    hopper()
    out = torch.zeros(8, dtype=torch.int32, device="cuda")
    program = Program(FEATURES, "swap_in_cluster", BOX)
    CudaLaunch(program, pointers=1, threads=32, cluster=2)((8, 1, 1), (out,))
    assert out.tolist() == [101, 100, 103, 102, 105, 104, 107, 106]


def adder() -> CudaLaunch:
    program = Program(FEATURES, "add_late", BOX)
    return CudaLaunch(program, pointers=1, scalars="I", threads=128, programmatic=True)


@pytest.mark.gpu
def test_programmatic_launches_wait_for_each_other_in_a_graph() -> None:
    hopper()
    total = torch.zeros(4 * 128, dtype=torch.int32, device="cuda")
    launch = adder()  # whose first launch, which loads it, is captured too
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(10):
            launch((4, 1, 1), (total,), (1,))
    for _ in range(3):
        graph.replay()
    assert total.tolist() == [30] * (4 * 128)


@pytest.mark.gpu
def test_the_first_cuda_call_of_a_thread_may_be_a_launch() -> None:
    hopper()
    launch = adder()
    total = torch.zeros(128, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    threads = [threading.Thread(target=launch, args=((1, 1, 1), (total,), (1,))) for _ in range(3)]
    for thread in threads:
        thread.start()
        thread.join()
    assert total.tolist() == [3] * 128


@pytest.mark.gpu
def test_launches_go_to_the_current_stream() -> None:
    hopper()
    launch = adder()
    total = torch.zeros(128, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launch((1, 1, 1), (total,), (5,))
    stream.synchronize()
    assert total.tolist() == [5] * 128


@pytest.mark.gpu
def test_a_rejected_launch_raises_with_a_reason() -> None:
    hopper()
    total = torch.zeros(128, dtype=torch.int32, device="cuda")
    program = Program(FEATURES, "add_late", BOX)
    launch = CudaLaunch(program, pointers=1, scalars="I", threads=4096)
    with pytest.raises(LaunchError, match="CUDA_ERROR_INVALID_VALUE"):
        launch((1, 1, 1), (total,), (1,))
