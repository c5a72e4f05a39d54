"""`DriftWatch` as a callback of Lightning; importing this imports Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

try:
    from lightning.pytorch import Callback
except ImportError:
    from pytorch_lightning import Callback

if TYPE_CHECKING:
    from lokakern.conversion.drift_watch import DriftWatch


def callback_of(watch: DriftWatch) -> Callback:
    """See `DriftWatch.lightning_callback`."""
    return _Watched(watch)


class _Watched(Callback):  # type: ignore[misc]
    def __init__(self, watch: DriftWatch) -> None:
        self._watch, self._told = watch, len(watch.events)

    def on_fit_start(self, *_: Any) -> None:
        self._watch.start()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self._log(trainer)

    def on_fit_end(self, trainer: Any, *_: Any) -> None:
        self._watch.stop()
        self._log(trainer)

    def on_exception(self, *_: Any) -> None:
        self._watch.stop(wait=False)

    def _log(self, trainer: Any) -> None:
        watch = self._watch
        if len(watch.events) > self._told and trainer.logger is not None:
            self._told = len(watch.events)
            numbers = {"lokakern/in_bf16": len(watch.in_bf16), "lokakern/events": self._told}
            trainer.logger.log_metrics(numbers, step=trainer.global_step)
