"""Loading the kernel that takes samples of a watch, `lokakern.kernels.cuda.window_samples`."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch

from lokakern import nvrtc
from lokakern.device import current_device
from lokakern.errors import UnsupportedError
from lokakern.native import NATIVE

_LOG = logging.getLogger(__name__)
_LOADED: set[int] = set()  # GPUs, for good
FIRST_ARCHITECTURE = 90


class SampleKernel:
    """Loads the kernel for some devices once the C++ library is there, which launches it.

    Attributes:
        reasons: By index of a GPU, why torch takes the samples of its tensors.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self.reasons: dict[int, str] = {}
        self._devices = {device.index or 0 for device in devices if device.type == "cuda"}
        self._waiting = set(self._devices)
        self._code: dict[int, bytes] = {}

    def compile(self) -> None:
        """Compile it, which takes a second or two, unless it is in the cache."""
        for index in sorted(self._waiting - _LOADED - self._code.keys()):
            try:
                self._code[index] = _code_for(index)
            except Exception as error:  # torch can take samples, too
                self._refuse(index, error)

    def load(self) -> None:
        """Load it, also while a CUDA graph is captured elsewhere, or wait for the library."""
        if not self._waiting or NATIVE.module is None:
            return
        for index in sorted((self._waiting - _LOADED) & self._code.keys()):
            try:
                NATIVE.module.load_window_kernel(index, self._code[index], sizes())
                _LOADED.add(index)
            except Exception as error:
                self._refuse(index, error)
        self._waiting.clear()

    def status(self) -> str:
        """Whether it takes the samples, or why not."""
        reasons, native = dict(self.reasons), NATIVE.module
        for index in self._devices or {-1} if native is not None else ():
            failure = native.window_kernel_failure(index)
            reasons |= {index: failure} if failure else {}
        if reasons:
            return "; ".join(f"GPU {index}: {why}" for index, why in reasons.items())
        is_there = bool(self._devices) and self._devices <= _LOADED
        return "loaded" if is_there and not self._waiting else "not loaded"

    def _refuse(self, index: int, error: Exception) -> None:
        self.reasons[index] = str(error)
        self._waiting.discard(index)
        _LOG.info("torch takes the samples of a watch on GPU %d: %s", index, error)


def forget() -> None:
    """Load it anew for the next watch."""
    _LOADED.clear()


def sizes() -> tuple[int, int, int, int]:
    """Those that the kernel is compiled for, as `KernelSizes` of window.h."""
    from lokakern.kernels.cuda import window_samples as kernel

    return kernel.TILE_ROWS, kernel.SPAN, kernel.MOST_KEPT, kernel.MOST_MATRICES


def _code_for(index: int) -> bytes:
    from lokakern.kernels.cuda import window_samples as kernel

    device = current_device("cuda", index)
    number = device.architecture.removeprefix("sm_")
    if torch.version.hip is not None or int(number) < FIRST_ARCHITECTURE:
        raise UnsupportedError(f"its kernel is for sm_90 and later, not {device.architecture}")
    missing = nvrtc.why_not(device)
    if missing:
        raise UnsupportedError(missing)
    return nvrtc.cubin(kernel.program(), device.architecture)
