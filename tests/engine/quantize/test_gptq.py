"""GPTQ against rounding to nearest, and where its Hessian is no help."""

from __future__ import annotations

import pytest
import torch

from gristmill.engine.quantize.gptq import quantize_gptq
from gristmill.engine.quantize.rtn import error_scales, quantize_rtn, quantize_with
from gristmill.kernels.quantized import QuantizedTensor


def _inputs(num_tokens: int, num_columns: int) -> torch.Tensor:
    """Correlated, some columns much larger than others."""
    source = torch.Generator().manual_seed(3)
    mixing = torch.randn(num_columns, num_columns, generator=source) / num_columns**0.5
    mixing += torch.diag(torch.linspace(0.2, 3, num_columns))
    return torch.randn(num_tokens, num_columns, generator=source) @ mixing


def _weight(num_rows: int, num_columns: int) -> torch.Tensor:
    return torch.randn(num_rows, num_columns, generator=torch.Generator().manual_seed(4))


def _loss(found: QuantizedTensor, weight: torch.Tensor, inputs: torch.Tensor) -> float:
    return float((inputs @ (found.dequantize() - weight).T).pow(2).mean())


@pytest.mark.parametrize("num_columns", [64, 192])  # within a block of columns, and over its end
def test_the_outputs_are_nearer_than_after_rounding(num_columns: int) -> None:
    weight, inputs = _weight(24, num_columns), _inputs(2000, num_columns)
    gram = inputs.T @ inputs / len(inputs)
    found = quantize_gptq(weight, gram, 32)
    assert _loss(found, weight, inputs) < 0.6 * _loss(quantize_rtn(weight, "int4", 32), weight, inputs)


def test_inputs_that_are_not_correlated_leave_nothing_to_make_up_for() -> None:
    weight, gram = _weight(8, 160), torch.eye(160)
    expected = quantize_with(weight, error_scales(weight, "int4", 32, gram, None), "int4")
    found = quantize_gptq(weight, gram, 32)
    assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)


@pytest.mark.parametrize("num_tokens", [0, 1, 20])
def test_fewer_inputs_than_columns_still_give_a_matrix_near_the_weight(num_tokens: int) -> None:
    weight, inputs = _weight(8, 64), _inputs(num_tokens, 64)
    found = quantize_gptq(weight, inputs.T @ inputs / max(1, num_tokens), 32).dequantize()
    assert torch.isfinite(found).all()
    assert (found - weight).abs().max() < 2.5 * weight.abs().max()


def test_rows_do_not_depend_on_one_another() -> None:
    weight, inputs = _weight(10, 64), _inputs(300, 64)
    gram = inputs.T @ inputs / 300
    whole, alone = quantize_gptq(weight, gram, 32), quantize_gptq(weight[3:6], gram, 32)
    assert torch.equal(whole.codes[3:6], alone.codes) and torch.equal(whole.scales[:, 3:6], alone.scales)
