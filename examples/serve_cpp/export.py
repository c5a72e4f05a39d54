"""Export a converted model for the C++ program in this folder; needs a GPU and a C++ compiler.

Writes model.pt2 (by AOTInductor), model.plans (the kernels of lokakern's ops), input.pt and
expected.pt (what the compiled model returns) into a folder. A package is for one batch size: the
kernels of a converted layer are chosen while it is traced.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import lokakern


def main(folder: Path, rows: int = 8192) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(2048, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 512)
    )
    model = model.to("cuda", torch.bfloat16).eval()
    x = torch.randn(rows, 2048, device="cuda", dtype=torch.bfloat16)
    lokakern.convert(model, 0.06, inference=True).table()

    with torch.no_grad():
        program = torch.export.export(model, (x,))
        torch._inductor.aoti_compile_and_package(program, package_path=str(folder / "model.pt2"))
        compiled = torch.compile(model)
        print(lokakern.save_plans(folder / "model.plans", compiled, x), "plans")
        torch.save(x.cpu(), folder / "input.pt")
        torch.save(compiled(x).cpu(), folder / "expected.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "build/serve"))
