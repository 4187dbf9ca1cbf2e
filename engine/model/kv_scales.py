"""Scales of an FP8 KV cache, one per layer and KV head, keys and values apart.

They come from a run of the model on a built-in text when it is loaded, or from a checkpoint that brings them. A code
is a floating-point number, so a scale only has to keep large keys from being cut off: measured scales are powers of
two with room to spare, which makes scaling exact.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from gristmill.engine.config import BLOCK_SIZE, ModelConfig
from gristmill.engine.errors import ChatTemplateError, ModelRefused
from gristmill.engine.model.decoder import Model
from gristmill.engine.text.tokenizer import Tokenizer
from gristmill.kernels.contract import AttentionBatch, KVScales

logger = logging.getLogger(__name__)

HEADROOM = 2.0  # a key may be so many times as large as any in the run before it is cut off
MAX_CODE = 448.0
MAX_TOKENS = 384  # of the run
# Of short pieces: where a tokenizer makes more than MAX_TOKENS of it, the first ones are still of many kinds.
TEXT = """Sum up the ticket below in one sentence, then answer the questions.
Đơn hàng số 48213 bị trễ ba ngày, tôi muốn hoàn lại 1.250.000 đồng.
def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs) if xs else 0.0
17 * 23 = 391; 0.1 + 0.2 != 0.3; 2026-03-14T09:26:53Z
{"id": 7, "tags": ["a", "b"], "price": 19.99, "ok": true}
La reunión empieza mañana a las nueve; ¿puedes traer el informe?
我们下周二上午十点开会，请准备好季度报告。
Der Vertrag endet am 31. Dezember, sofern er nicht verlängert wird.
Встреча перенесена на пятницу, ответьте до конца дня.
The theorem holds because every bounded sequence of real numbers has a convergent subsequence.
SELECT name, COUNT(*) FROM orders WHERE total > 100 GROUP BY name ORDER BY 2 DESC;
يرجى تأكيد العنوان قبل إرسال الطرد.
本日の会議は中止になりました。
<p class="note">See https://example.com/docs?page=2#top &amp; reply.</p>
| city | 2023 | 2024 |
| Hà Nội | 8,435 | 8,587 |
Once upon a time, an old fisherman found a bottle on the shore, and inside it there was a letter...
"""

_SCALE_NAME = re.compile(
    r"model\.layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?P<side>[kv])_scale|(?P<projection>[kv])_proj\.(?:[kv]_scale|output_scale)|kv_scale)"
)


def calibrate_kv_scales(model: Model, tokenizer: Tokenizer) -> KVScales:
    """Scales from one run on TEXT with a float32 cache, the same each time. Raises ModelRefused for keys not finite."""
    start = time.monotonic()
    token_ids = _encode(tokenizer)[: min(MAX_TOKENS, len(model.rope.cos))]
    largest = measure_kv(model, token_ids)
    for side, name in enumerate(("keys", "values")):
        for layer, head in (~largest[side].isfinite()).nonzero().tolist():
            raise ModelRefused(
                f"the {name} of layer {layer}, head {head} are not finite numbers on a plain text, so an FP8 cache"
                " can't be scaled; the weights are damaged, or run without --kv-dtype fp8"
            )
    extra = {"tokens": len(token_ids), "seconds": round(time.monotonic() - start, 2)}
    logger.info("measured the scales of the FP8 KV cache", extra=extra)
    return KVScales(*(_power_of_two(side) for side in largest))


def measure_kv(model: Model, token_ids: list[int]) -> Tensor:
    """The largest size of any key and any value of these tokens: [2, num_layers, num_kv_heads] float32."""
    num_tokens, num_blocks = len(token_ids), -(-len(token_ids) // BLOCK_SIZE)
    cache = model.backend.kv_cache(model.kv_spec(torch.float32), num_blocks)
    batch = AttentionBatch(
        np.array([0, num_tokens], dtype=np.int64),
        np.array([num_tokens], dtype=np.int64),
        np.arange(num_blocks, dtype=np.int32)[None],
        sliding_window=model.config.sliding_window,
    )
    with torch.inference_mode():
        model.forward(model.build_input(np.array(token_ids), batch, cache), cache)
    return cache.largest()


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint's tensor of this name is a scale for an FP8 KV cache."""
    return _SCALE_NAME.fullmatch(name) is not None


def to_kv_scales(tensors: Mapping[str, Tensor], config: ModelConfig, path: str) -> KVScales | None:
    """The scales among a checkpoint's tensors, of one number or one per KV head each; None: there are none.

    Names: self_attn.k_scale, self_attn.k_proj.k_scale or .output_scale, the same with v, or one kv_scale for both.
    Raises ModelRefused for a layer without one and for what is no scale.
    """
    found: dict[tuple[str, int], Tensor] = {}
    for name, tensor in tensors.items():
        match = _SCALE_NAME.fullmatch(name)
        if match is None:
            continue
        for side in match["side"] or match["projection"] or "kv":
            found[side, int(match["layer"])] = _check_scale(name, tensor, config, path)
    if not found:
        return None
    for layer in range(config.num_layers):
        for side in "kv":
            if (side, layer) not in found:
                raise ModelRefused(
                    f"{path}: tensor model.layers.{layer}.self_attn.{side}_scale is missing, though other layers have"
                    " scales of an FP8 KV cache; get the checkpoint again"
                )
    return KVScales(
        *(torch.stack([found[side, layer] for layer in range(config.num_layers)]) for side in "kv")
    )


def _check_scale(name: str, tensor: Tensor, config: ModelConfig, path: str) -> Tensor:
    """[num_kv_heads] float32."""
    scale = tensor.float().flatten()
    if len(scale) not in (1, config.num_kv_heads):
        raise ModelRefused(
            f"{path}: tensor {name} has shape {list(tensor.shape)}; a KV scale is one number or one for each of"
            f" {config.num_kv_heads} heads"
        )
    if not (scale.isfinite() & (scale > 0)).all():
        raise ModelRefused(
            f"{path}: tensor {name} holds {scale.tolist()}, but a scale is a finite number above 0;"
            " get the checkpoint again"
        )
    return scale.expand(config.num_kv_heads)


def _encode(tokenizer: Tokenizer) -> list[int]:
    """TEXT as a user's message where the model is one for chats: its control tokens have the largest keys."""
    text = tokenizer.render_text(TEXT)
    if tokenizer.has_chat_template:
        try:
            text = tokenizer.render_chat([{"role": "user", "content": TEXT}])
        except ChatTemplateError:
            logger.debug("the chat template refused the calibration's text; it is run without the template")
    return list(tokenizer.encode_batch([text])[0])


def _power_of_two(largest: Tensor) -> Tensor:
    """The lowest powers of two that keep HEADROOM times the largest within MAX_CODE; 1 for a head of zeros."""
    mantissa, exponent = torch.frexp(largest * HEADROOM / MAX_CODE)
    exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(-100, 100))
    return torch.where(largest > 0, scale, 1.0)
