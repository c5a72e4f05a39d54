"""Fitting of the model that predicts times at sizes without measurements."""
