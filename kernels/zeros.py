"""Large tensors of zeros of which only a part may ever be used."""

from __future__ import annotations

import mmap
from math import prod

import numpy as np
import torch
from torch import Tensor


def zeros_on_use(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros that take memory when they are first written or read; torch.zeros writes them all at once."""
    size = prod(shape) * dtype.itemsize
    memory = mmap.mmap(-1, max(size, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.from_numpy(np.frombuffer(memory, np.uint8, size)).view(dtype).view(shape)
