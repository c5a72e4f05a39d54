"""A watch follows a fit of Lightning, and its numbers reach the logger."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lokakern
from lokakern.conversion.drift_watch import STAYS

pytestmark = pytest.mark.rest  # imports Lightning: 5 s


def test_a_fit_is_watched_and_logged(tmp_path: Path) -> None:
    from pytorch_lightning import LightningModule, Trainer
    from pytorch_lightning.loggers import CSVLogger
    from torch.utils.data import DataLoader

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 16)).bfloat16()

        def training_step(self, x: Tensor, _: int) -> Tensor:
            return self.layers(x).float().square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-6)

    x = torch.randn(8 * 256, 64, generator=torch.Generator().manual_seed(0))
    x[::2] *= 1e-5  # of which a tensorwise scale leaves nothing
    module, logger = Module(), CSVLogger(str(tmp_path))
    watch = lokakern.convert(module, kernels="tensor").watch(budget=0.06, every=2)
    trainer = Trainer(
        accelerator="cpu", max_epochs=1, logger=logger, callbacks=[watch.lightning_callback()],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(x.bfloat16(), batch_size=256))
    assert watch.steps == 8
    assert "layers.0/output" in watch.in_bf16
    assert {e.action for e in watch.events} > {STAYS}
    logger.save()
    written = (Path(logger.log_dir) / "metrics.csv").read_text()
    assert "lokakern/in_bf16" in written.splitlines()[0]
    assert any(str(len(watch.in_bf16)) in line.split(",") for line in written.splitlines()[1:])
    with lokakern.Probe(module, every=1):  # no hook of the watch is left
        pass
    assert not module.layers[0]._forward_hooks
