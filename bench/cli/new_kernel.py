"""The command `new-kernel`: writes a package with a kernel of the user's own."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from lokakern.bench.cli.options import say, says_errors


class NewOp(StrEnum):
    """Ops with a template: `lokakern.bench.new_kernel.write.OPS`."""

    SCALED_GEMM = "scaled_gemm"
    QUANTIZE = "quantize"


@says_errors
def new_kernel(
    name: Annotated[str, typer.Argument(help="Name of the plugin, such as acme.")],
    op: Annotated[NewOp, typer.Option(help="Op of the kernel.")] = NewOp.SCALED_GEMM,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to. Default: the plugin's name.")
    ] = None,
) -> None:
    """Write a package with a Triton kernel that works, to be changed: see docs/kernels.md.

    The kernel has rowwise scales. It passes the trial of `list libraries` on a GPU, and on a CPU
    under TRITON_INTERPRET=1.
    """
    from lokakern.bench.new_kernel.write import write_package

    folder = Path(name) if out is None else out.expanduser()
    if folder.exists():
        raise typer.BadParameter(f"{str(folder)!r} is there already", param_hint="--out")
    for path in write_package(name, op.value, folder):
        print(path)
    say(f"now: pip install -e {folder}")
    trial = f"lokakern list libraries --only {name}"
    say(f"try it on a GPU: {trial}")
    say(f"or on a CPU: pip install triton && TRITON_INTERPRET=1 {trial}")
