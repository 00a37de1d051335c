"""`python -m lab.peers.w8a8_folder SOURCE TARGET`: a bf16 folder with int8 weights, for vLLM.

The format is compressed-tensors' "int-quantized" (what llm-compressor writes): every linear layer has
int8 weights with one symmetric scale an output channel, rounded to nearest; activations are quantised while
running, one scale a token. The head shares its weights with the embedding and stays bf16.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_WEIGHTS, _CONFIG = "model.safetensors", "config.json"
_QUANTISATION = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False,
            },
            "input_activations": {
                "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
            },
        }
    },
}  # fmt: skip


def main(source: Path, target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.name not in (_WEIGHTS, _CONFIG):
            shutil.copy(file, target / file.name)
    config = json.loads((source / _CONFIG).read_text())
    (target / _CONFIG).write_text(json.dumps({**config, "quantization_config": _QUANTISATION}, indent=2))
    quantised: dict[str, torch.Tensor] = {}
    for name, weight in load_file(source / _WEIGHTS).items():
        if name.endswith("_proj.weight"):
            quantised[name], quantised[f"{name}_scale"] = quantise(weight)
        else:
            quantised[name] = weight
    save_file(quantised, target / _WEIGHTS, metadata={"format": "pt"})


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [out, in] as int8 [out, in] and scales [out, 1] in its own type."""
    scales = (weight.float().abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-8).to(weight.dtype)
    rounded = (weight.float() / scales.float()).round().clamp(-127, 127)
    return rounded.to(torch.int8), scales


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
