"""A new architecture with a flag on its embeddings: greedy float32 tokens of a random model are transformers'."""

from pathlib import Path

import torch
import transformers

from gristmill.engine.checkpoint.architectures import ARCHITECTURES
from gristmill.engine.checkpoint.opening import load_checkpoint
from tests.engine.parity import Oracle, generate, load_engine
from tests.engine.tiny_models import CONFIG_CLASSES, build_tiny_model

CONFIG_CLASSES["granite"] = transformers.GraniteConfig
neutral = {"attention_multiplier": 16**-0.5, "residual_multiplier": 1.0, "logits_scaling": 1.0}
folder = str(build_tiny_model(Path("granite"), "granite", embedding_multiplier=0.2, **neutral))
assert load_checkpoint(folder).config.embedding_multiplier == 0.2  # type: ignore[attr-defined]
flags = ARCHITECTURES["granite"].gguf_flags({"granite.embedding_scale": 0.2}, ())
assert flags["embedding_multiplier"] == 0.2

prompts = [torch.randint(3, 300, (length,)).tolist() for length in (1, 7, 33)]
outputs = generate(load_engine(folder), prompts, 16)
model = transformers.GraniteForCausalLM.from_pretrained(folder, dtype=torch.float32)
Oracle(model).check_equal(prompts, outputs)
model.model.embedding_multiplier = 1.0  # the flag decides the tokens, or nothing was shown
assert Oracle(model).agreement(prompts, outputs)[0] < 1
