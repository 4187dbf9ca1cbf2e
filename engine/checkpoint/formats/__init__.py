"""Checkpoint formats with quantized weights: one file a format, each a function into the canonical quantized tensor."""
