"""How it is measured: the Timing contract and the Error contract."""
