"""Comparisons, timed now: against baselines, libraries, compiled bf16."""
