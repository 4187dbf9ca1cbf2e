"""Weights into codes: the methods of `gristmill quantize`, and rounding at load."""
