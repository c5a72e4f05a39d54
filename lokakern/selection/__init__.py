"""Dispatch: the fastest kernel within an error budget, chosen from measurements."""
