"""Probe a small model: where FP8 is safe, where it is fast, and what would change the verdict.

Trains for a few steps while `Probe` observes two linear layers, and judges their GEMMs by errors
replayed here and times of an H200. Prints a table of verdicts, the nearest distributions of the
second layer's operands, and the effect of one hazard: one huge column, which the weights of the
next layer compensate.
"""

import torch
from torch import nn

import lokakern


def probed(model: nn.Module, x: torch.Tensor) -> lokakern.ProbeReport:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with lokakern.Probe(model, every=1) as probe:  # every=100 in real training
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    return probe.report(device="NVIDIA H200", seeds=(0,))  # more seeds narrow the limits


def main() -> None:
    torch.manual_seed(0)
    x = torch.randn(512, 64)
    model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32))
    report = probed(model, x)
    report.table()
    print("the input of the second layer is like", report["2"].gemm("output"))

    with torch.no_grad():  # the same function, but beyond the range of rowwise scales
        model[0].weight[7] *= 3e5
        model[0].bias[7] *= 3e5
        model[2].weight[:, 7] /= 3e5
    for verdict in probed(model, x).verdicts:
        print(verdict.site, verdict.gemm, f"{verdict.safety}:", verdict.change or verdict.best)


if __name__ == "__main__":
    main()
