"""Scales of an FP8 KV cache: measured ones leave room and cost nothing, a checkpoint's are read or refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gristmill.engine.batch.scheduler import Scheduler
from gristmill.engine.config import BLOCK_SIZE
from gristmill.engine.engine import Engine
from gristmill.engine.errors import ModelRefused
from gristmill.engine.model.kv_scales import (
    HEADROOM,
    MAX_CODE,
    TEXT,
    calibrate_kv_scales,
    is_kv_scale,
    measure_kv,
    to_kv_scales,
)
from gristmill.engine.model.runner import ModelRunner
from gristmill.engine.text.tokenizer import NullTokenizer
from gristmill.kernels.contract import AttentionBatch, RopeTables
from gristmill.kernels.reference import round_kv
from tests.engine.parity import generate, load_engine
from tests.engine.tiny_models import build_tiny_model

PROMPTS = [[5, 9, 33, 7] * n + [n] for n in (1, 3, 8, 12)]
LAYER = "model.layers.{}.self_attn."


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def engine(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / request.param
    return load_engine(str(build_tiny_model(folder, request.param)), num_kv_blocks=128)


@pytest.fixture(scope="module", params=["compiled", "torch"])
def either(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny") / "model"
    settings = {} if request.param == "compiled" else {"cpu_kernels": "none"}
    return load_engine(str(build_tiny_model(folder, "llama")), num_kv_blocks=128, **settings)


@pytest.fixture
def config(engine):
    return engine.runner.model.config


def with_fp8(engine, num_blocks=64, chunk=256):
    """The same weights with an FP8 cache of measured scales."""
    model = engine.runner.model
    scales = calibrate_kv_scales(model, engine.tokenizer)
    cache = model.backend.kv_cache(model.kv_spec(torch.float8_e4m3fn, scales), num_blocks)
    limit = min(model.config.context_size, num_blocks * BLOCK_SIZE)
    return Engine(
        ModelRunner(model, cache),
        Scheduler(num_blocks, min(32, chunk), chunk, True, limit),
        engine.tokenizer,
        engine.info,
    )


@torch.inference_mode()
def logits(model, cache, ids, padding=0):
    """[num_tokens, vocab_size] of one sequence in the cache's first blocks; padding: the operations run one by one."""
    n = len(ids)
    blocks = np.arange(-(-n // BLOCK_SIZE), dtype=np.int32)[None]
    batch = AttentionBatch(np.array([0, n]), np.array([n]), blocks)
    step = cache.build_input(ids, batch, model.padded_rows(n + padding))
    return model.logits(model.forward(step, cache))


def test_measured_scales_are_powers_of_two_with_room_over_the_largest_keys(engine):
    model = engine.runner.model
    scales = calibrate_kv_scales(model, engine.tokenizer)
    chat = engine.tokenizer.render_chat([{"role": "user", "content": TEXT}])
    largest = measure_kv(model, list(engine.tokenizer.encode_batch([chat])[0])[:256])
    for side, scale in zip(largest, scales, strict=True):
        assert scale.shape == (2, 2) and scale.dtype == torch.float32
        assert (scale.log2() % 1 == 0).all()
        room = MAX_CODE * scale / side
        assert (room >= HEADROOM).all() and (room < 2 * HEADROOM).all()
    again = calibrate_kv_scales(model, engine.tokenizer)
    assert all(map(torch.equal, scales, again))


def test_the_largest_keys_are_those_of_the_model(either):
    """Against keys and values computed from the weights of the first layer's linear."""
    model, ids = either.runner.model, [7, 300, 12, 12, 45]
    c = model.config
    x = model.embedding[torch.tensor(ids)].float()
    qkv = model.layers[0].qkv(model.backend.rms_norm(x, model.layers[0].input_norm, c.rms_norm_eps))
    heads = qkv.view(len(ids), -1, c.head_dim)
    value = heads[:, c.num_heads + c.num_kv_heads :].abs().amax((0, 2))
    key_norms = heads[:, c.num_heads : c.num_heads + c.num_kv_heads].norm(dim=2).amax(0)  # turning keeps them
    largest = measure_kv(model, ids)
    torch.testing.assert_close(largest[1, 0], value)
    assert (largest[0, 0] <= key_norms * 1.0001).all()
    assert (largest[0, 0] >= key_norms / c.head_dim**0.5).all()


def test_text_by_an_fp8_cache_does_not_depend_on_the_batch(either):
    outputs = generate(with_fp8(either), PROMPTS, 8, alone=True)
    assert generate(with_fp8(either, chunk=16), PROMPTS, 8, preempt=True) == outputs


def make_rounding(cache, scales):
    """Lets a float32 cache keep the numbers that torch makes of keys and values in FP8."""
    append, num_heads, size = cache.append, cache.spec.num_heads, cache.spec.num_kv_heads

    def append_rounded(layer, qkv, rope, positions, slot_mapping, norms=None):
        append(layer, qkv, rope, positions, slot_mapping, norms)
        heads = qkv.unflatten(1, (num_heads + 2 * size, -1))
        sides = heads[:, num_heads:].split(size, 1)
        rounded = [round_kv(side, scale[layer]) for side, scale in zip(sides, scales, strict=True)]
        qkv = torch.cat([heads[:, :num_heads], *rounded], 1).flatten(1)
        half = heads.shape[2] // 2
        no_turn = RopeTables(torch.ones(1, half), torch.zeros(1, half))
        append(layer, qkv, no_turn, torch.zeros_like(positions), slot_mapping)

    cache.append = append_rounded
    return cache


def test_logits_over_an_fp8_cache_are_those_over_rounded_keys_and_values(either):
    model, ids, fp8 = either.runner.model, np.arange(200) * 7 % 390, with_fp8(either).runner.cache
    rounding = make_rounding(either.runner.cache.like(13), calibrate_kv_scales(model, either.tokenizer))
    plain, got = (logits(model, cache, ids) for cache in (either.runner.cache, fp8))
    rounded = logits(model, rounding, ids, padding=1)
    torch.testing.assert_close(got, rounded, atol=1e-3, rtol=1e-3)
    error = (got - plain).norm() / (plain - plain.mean(1, keepdim=True)).norm()
    assert 0.01 < error < 0.2


def test_a_tokenizer_without_a_chat_template_does_too(engine):
    scales = calibrate_kv_scales(engine.runner.model, NullTokenizer())
    assert all((scale > 0).all() for scale in scales)


def test_keys_that_are_not_finite_are_refused_by_layer_and_head(tmp_path):
    broken = load_engine(str(build_tiny_model(tmp_path / "model", "llama")), num_kv_blocks=64)
    broken.runner.model.layers[1].input_norm[3] = float("inf")
    with pytest.raises(
        ModelRefused, match="the keys of layer 1, head 0 are not finite numbers.*--kv-dtype fp8"
    ):
        calibrate_kv_scales(broken.runner.model, broken.tokenizer)


NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "compressed-tensors, older": ("k_proj.output_scale", "v_proj.output_scale"),
    "ModelOpt": ("k_proj.k_scale", "v_proj.v_scale"),
    "one for both": ("kv_scale", "kv_scale"),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=list(NAMES))
def test_a_checkpoints_scales_are_taken_as_they_are(config, names):
    tensors = {"model.layers.0.mlp.up_proj.weight": torch.ones(2, 2)}
    for layer in range(2):
        for name, value in zip(
            names, (0.5 + layer, 0.25 if names[0] != names[1] else 0.5 + layer), strict=True
        ):
            tensors[LAYER.format(layer) + name] = torch.tensor(value, dtype=torch.bfloat16)
    assert [is_kv_scale(name) for name in tensors] == [False] + [True] * (len(tensors) - 1)
    scales = to_kv_scales(tensors, config, "here")
    assert scales.keys.tolist() == [[0.5, 0.5], [1.5, 1.5]]
    assert scales.values.tolist() == (
        [[0.5, 0.5], [1.5, 1.5]] if names[0] == names[1] else [[0.25, 0.25]] * 2
    )


def test_a_scale_may_be_one_for_each_head(config):
    tensors = {LAYER.format(i) + f"{s}_scale": torch.tensor([1.0, 2.0]) for i in range(2) for s in "kv"}
    assert to_kv_scales(tensors, config, "here").keys.tolist() == [[1.0, 2.0]] * 2


def test_a_checkpoint_without_scales_brings_none(config):
    assert to_kv_scales({"model.layers.0.self_attn.k_proj.weight": torch.ones(1)}, config, "here") is None


@pytest.mark.parametrize(
    "value, message",
    [
        (torch.tensor(float("nan")), r"layers.1.self_attn.v_scale holds \[nan\]"),
        (torch.tensor(0.0), r"layers.1.self_attn.v_scale holds \[0.0\]"),
        (torch.ones(3), r"layers.1.self_attn.v_scale has shape \[3\]"),
        (None, "layers.1.self_attn.v_scale is missing"),
    ],
    ids=["not a number", "zero", "another shape", "missing"],
)
def test_a_checkpoints_scales_that_are_none_are_refused_by_name(config, value, message):
    tensors = {LAYER.format(i) + f"{s}_scale": torch.tensor(1.0) for i in range(2) for s in "kv"}
    tensors[LAYER.format(1) + "v_scale"] = value
    if value is None:
        del tensors[LAYER.format(1) + "v_scale"]
    with pytest.raises(ModelRefused, match=f"^here: tensor model.{message}"):
        to_kv_scales(tensors, config, "here")
