"""Makes the folder that the peers load: prepare_model.py GGUF FOLDER.

transformers and the gguf package dequantize the file to float32; the weights are then rounded to bfloat16
and saved in Hugging Face layout: all peers start from the same numbers. Gristmill reads the GGUF itself.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def prepare_model(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and bfloat16 weights of the GGUF file into the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    config = dequantized.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype, config.architectures = "bfloat16", [type(dequantized).__name__]
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {name: tensor.to(torch.bfloat16) for name, tensor in dequantized.state_dict().items()}
    model.load_state_dict(weights, strict=True)
    model.tie_weights()
    model.generation_config = dequantized.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: prepare_model.py GGUF FOLDER")
    prepare_model(Path(sys.argv[1]), Path(sys.argv[2]))
