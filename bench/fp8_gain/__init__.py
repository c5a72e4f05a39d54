"""Gain of FP8 in the layers of a user's model."""
