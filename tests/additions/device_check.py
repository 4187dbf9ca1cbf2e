"""A device whose every operation is the oracle's runs whole models: the contract is all that a new one has to bring."""

from itertools import product
from pathlib import Path

from tests.engine.parity import generate, load_engine
from tests.engine.tiny_models import build_tiny_model

SHARED = [(7 * i + 3) % 390 for i in range(70)]
PROMPTS = [[*SHARED, *range(5, 5 + n)] for n in (1, 2, 5, 9, 3, 7)] + [[11, 12, 13], [17]]
OPTIONS = [
    {},
    {"kv_dtype": "fp8"},
    {"quantization": "int4"},
    {"quantization": "int8"},
    {"quantization": "fp8"},
]

for architecture, options in product(["qwen2", "qwen3"], OPTIONS):
    model = str(build_tiny_model(Path(architecture), architecture))
    engine = load_engine(model, device="oracle", max_num_batched_tokens=48, **options)
    assert engine.info.cpu_kernels == "reference"
    expected = generate(load_engine(model, **options), PROMPTS, 6)
    assert generate(engine, PROMPTS, 6, preempt=True) == expected, (architecture, options)
