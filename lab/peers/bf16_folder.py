"""`python -m lab.peers.bf16_folder SOURCE.gguf TARGET`: the bundled weights as a Hugging Face
folder.

vLLM's CPU build reads no GGUF. The weights are dequantised and rounded to bf16, which is what Diptych
computes with under `--dtype bf16`. Needs transformers and accelerate (`pip install 'diptych[dev]'`).
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig


def main(source: Path, target: Path) -> None:
    read = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    model = AutoModelForCausalLM.from_pretrained(
        **read, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(**read).save_pretrained(target)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
