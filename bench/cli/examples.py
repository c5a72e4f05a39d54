"""Examples at the end of each command's help, without the leading ``lokakern``."""

from __future__ import annotations

EXAMPLES = {
    "sweep": (
        "sweep --suite lrm --errors needed",
        "sweep --shape 32768,2048,2048 --shape 8192,512,1024",
        "sweep --suite my-model.toml --time-limit 600",
        "sweep --only-stale",
    ),
    "host": ("host", "host --regime compiled"),
    "fit": ("fit", "fit --device 'NVIDIA H200' --out model.json"),
    "explain": (
        "explain gemm --shape 32768,2048,2048 --device 'NVIDIA H200'",
        "explain --shapes shapes.csv --device 'NVIDIA H200' --budget 0.06",
        "explain --model my_package.model:build --training",
    ),
    "chain": ("chain --device 'NVIDIA H200'", "chain --budget 0.09 --rivals torch.compile"),
    "model": (
        "model wukong --train --size small --steps 100 --out build/wukong",
        "model dlrm --infer --arm lokakern --arm as-written",
        "model zoo --out build/zoo --time-limit 540",
        "model masknet --infer --batches 512,2048 --modes graph,eager",
    ),
    "tune": ("tune my_package.model:tuned --graph --out tuned.json",),
    "compare": (
        "compare --suite lrm",
        "compare --suite lrm --by-library --seed 7",
        "compare --op quantize --ours 'cuda.*' --rivals 'triton.*'",
    ),
    "report": ("report --probe my.probe --device 'NVIDIA H200' --out report.html",),
    "export": ("export h200.sqlite --device 'NVIDIA H200'",),
    "import": ("import h200.sqlite", "import https://example.org/h200.sqlite --sha256 HEX"),
    "verify": ("verify", "verify --count 48 --time-limit 300"),
    "contribute": ("contribute", "contribute --suite anchors --time-limit 600"),
    "merge": ("merge a.sqlite b.sqlite --out both.sqlite",),
    "diff": (
        "diff before.sqlite after.sqlite",
        "diff all.sqlite --before 2026-01-31",
        "diff all.sqlite --from-device 'NVIDIA H200' --to-device 'NVIDIA B200'",
    ),
    "describe": ("describe h200.sqlite", "describe h200.sqlite --json"),
    "explore": ("explore", "explore h200.sqlite --port 0"),
    "new-kernel": ("new-kernel acme", "new-kernel acme --op quantize --out build/acme"),
    "list": ("list", "list coverage --device 'NVIDIA H200'", "list libraries --format csv"),
}


def examples_of(command: str) -> str:
    """The end of a command's help, where a blank line starts a new line."""
    return "\n\n".join(
        ["Examples, after lokakern or python -m lokakern.bench:", *EXAMPLES[command]]
    )
