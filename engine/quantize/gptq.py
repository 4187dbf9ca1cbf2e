"""GPTQ (Frantar et al., arXiv 2210.17323): columns are rounded one by one, and those left make up for the error.

The columns whose inputs are largest go first (the paper's repository calls it act-order), with every group's scale
fixed before, so that the result has its columns in order and needs nothing special of a reader.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill.engine.quantize.rtn import build_tensor, error_scales, round_codes, to_codes
from gristmill.kernels.quantized import QuantizedTensor

DAMPING = 0.01  # of the mean of the Hessian's diagonal
_BLOCK_COLUMNS = 64
_MAX_TRIES = 6  # each with ten times the damping


def quantize_gptq(
    weight: Tensor,
    gram: Tensor,
    group_size: int,
    scale_type: torch.dtype | None = None,
    damping: float = DAMPING,
) -> QuantizedTensor:
    """int4 codes whose output errors, over the calibration inputs, are small.

    weight: [num_rows, num_columns] float32; gram: [num_columns, num_columns], the mean of x x^T over inputs x, which
    is the Hessian but for a factor. scale_type: what scales are rounded to; None: float16.
    """
    scales = error_scales(weight, "int4", group_size, gram, scale_type)
    order = torch.argsort(gram.diagonal(), descending=True, stable=True)
    factor = _inverse_factor(gram[order][:, order], damping)
    group = order // group_size
    rest = weight.T[order]  # [K, N]: a column of the weight is a row here
    column_scales = scales.T[group]
    codes = torch.empty_like(rest)
    for start in range(0, len(rest), _BLOCK_COLUMNS):
        end = min(start + _BLOCK_COLUMNS, len(rest))
        errors = _round_block(
            rest[start:end], column_scales[start:end], factor[start:end, start:end], codes[start:end]
        )
        rest[end:].addmm_(factor[start:end, end:].T, errors, alpha=-1)
    ordered = torch.empty_like(codes)
    ordered[order] = codes
    return build_tensor(to_codes(ordered.T.contiguous(), "int4"), scales, "int4")


def _round_block(rest: Tensor, scales: Tensor, factor: Tensor, codes: Tensor) -> Tensor:
    """Rounds each row of `rest` into `codes` and changes the rows after it. Returns the errors in the factor's units.

    rest, scales, codes: [block, num_rows]; factor: [block, block], upper triangular.
    """
    errors = torch.empty_like(rest)
    for index, scale in enumerate(scales):
        column = rest[index]
        codes[index] = round_codes(column / scale, "int4")
        torch.div(column - codes[index] * scale, factor[index, index], out=errors[index])
        rest[index + 1 :].addr_(factor[index, index + 1 :], errors[index], alpha=-1)
    return errors


def _inverse_factor(gram: Tensor, damping: float) -> Tensor:
    """The upper Cholesky factor of the damped Hessian's inverse (section 3.3, step 3)."""
    mean = float(gram.diagonal().mean())
    if not mean > 0:  # inputs that are all zero decide nothing
        return torch.eye(len(gram))
    for attempt in range(_MAX_TRIES):
        damped = gram.clone()
        damped.diagonal().add_(mean * damping * 10**attempt)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            continue
        upper: Tensor
        upper, failed = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
        if not failed:
            return upper
    return torch.eye(len(gram))
