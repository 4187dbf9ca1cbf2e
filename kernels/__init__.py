"""Tensor operations: one contract, a torch reference, and a backend for each device."""
