"""Probe a small model: where FP8 is safe, where it is fast, and what would change that.

Trains for a few steps while `Probe` watches two linear layers, and judges their GEMMs by errors
replayed here and times of an H200. Prints a table of verdicts, what the second layer's input is
like, and what one hazard does: one column made huge, and taken back by the next layer's weights.
"""

import torch
from torch import nn

import lokakern


def probed(model: nn.Module, x: torch.Tensor) -> lokakern.ProbeReport:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with lokakern.Probe(model, every=1) as probe:  # in earnest every=100
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return probe.report(device="NVIDIA H200", seeds=(0,))  # more seeds, narrower limits


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    report = probed(model, x)
    report.table()
    print("the input of the second layer is like", report["2"].gemm("output"))

    with torch.no_grad():  # the same function, and nothing that scales of rows can hold
        model[0].weight[7] *= 3e5
        model[0].bias[7] *= 3e5
        model[2].weight[:, 7] /= 3e5
    for verdict in probed(model, x).verdicts:
        print(verdict.site, verdict.gemm, f"{verdict.safety}:", verdict.change or verdict.best)


if __name__ == "__main__":
    main()
