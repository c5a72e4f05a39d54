"""Run a GEMM with an error budget: the fastest kernel whose error is within the budget.

Multiplies within a row error of 6 %, with the weight quantized once, and looks up the choice for a
larger product on an H200. Prints the measured error, and dispatch's choices with their times: at a
budget of 0.03, nothing in FP8 is accurate enough.
"""

import torch

import lokakern

BUDGET = 0.06  # the largest accepted row error


def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(512, 256, dtype=torch.bfloat16, device=device)
    w = torch.randn(128, 256, dtype=torch.bfloat16, device=device)
    exact = x.double() @ w.t().double()

    y = lokakern.gemm(x, w.t(), budget=BUDGET)  # bfloat16 and a warning if unmeasured
    prepared = lokakern.prepare_weight(w, BUDGET, (256, 4096))  # for this range of m
    z = lokakern.gemm(x, prepared)
    # The error of quantization here, whether or not FP8 is faster:
    a, b = lokakern.quantize(x, "row"), lokakern.quantize(w, "row")
    quantized = lokakern.scaled_gemm(a, b.t())
    for name, out in (("gemm", y), ("gemm, prepared", z), ("scaled_gemm", quantized)):
        errors = (out.double() - exact).norm(dim=1) / exact.norm(dim=1)
        print(f"{name}: row error {errors.square().mean().sqrt():.4f}")

    for budget in (0.03, BUDGET):  # from the shipped measurements, on any machine
        choice = lokakern.dispatch("gemm", (32768, 2048, 2048), budget, device="NVIDIA H200")
        print(f"H200 within {budget}: {choice.kernel}, {choice.latency_us:.0f} us")


if __name__ == "__main__":
    main()
