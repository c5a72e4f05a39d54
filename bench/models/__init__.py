"""Recommendation models as published, in plain PyTorch, and a click log to train them on."""
