"""Folders that look like adapters to a gateway, which reads no tensor."""

from __future__ import annotations

import json
from pathlib import Path


def write(folder: Path, content: str = "a", rank: object = 8, **config: object) -> Path:
    """Write an adapter whose tensors are the bytes of ``content``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, **config}))
    (folder / "adapter_model.safetensors").write_bytes(content.encode())
    return folder
