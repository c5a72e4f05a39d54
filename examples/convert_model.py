"""Convert a model: apply Mods that make FP8 safe, then choose kernels for each linear layer.

Applies three Mods, converts within a row error of 6 % for an H200, runs a training step and undoes
everything. Prints the changes of the Mods, the kernel of each product with the reason, and the loss
before and after conversion. On a CPU, kernels are emulated with the same scales.
"""

import torch
from torch import nn

import lokakern
from lokakern import mods


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return model(x).float().square().mean()


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(479, 1024), nn.LayerNorm(1024), nn.SiLU(), nn.Linear(1024, 1024), nn.ReLU(),
        nn.Linear(1024, 1),
    )  # fmt: skip
    x = torch.randn(512, 479)

    changes = mods.apply(model, [mods.NoBias(), mods.BlockNorm(256), mods.HardSwish()])
    changes.table()
    before = loss_of(model, x)

    handle = lokakern.convert(model, 0.06, device="NVIDIA H200")  # or pass a report of Probe
    handle.table()
    after = loss_of(model, x)
    after.backward()  # gradients use their own kernels
    print(f"loss {before.item():.6f}, converted {after.item():.6f}")
    # Unmeasured products run in bfloat16. This suite measures them, with
    # python -m lokakern.bench sweep --suite FILE.toml
    print(handle.suite([512]))

    handle.undo()
    assert type(model[0]) is nn.Linear
    changes.undo()


if __name__ == "__main__":
    main()
