"""Files of Medusa heads: what is read, and what is refused in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from diptych.engine.heads.head_files import BadHeads
from diptych.engine.heads.medusa import PICKLED, WEIGHTS, is_medusa, read_medusa

HIDDEN, VOCABULARY, HEADS, LAYERS = 12, 31, 3, 2


class Block(nn.Module):
    """A residual block as the authors' checkpoints name it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.silu(self.linear(x))


def authors_heads() -> nn.ModuleList:
    torch.manual_seed(5)
    of_one = lambda: [*(Block() for _ in range(LAYERS)), nn.Linear(HIDDEN, VOCABULARY, bias=False)]  # noqa: E731
    return nn.ModuleList([nn.Sequential(*of_one()) for _ in range(HEADS)])


def write(folder: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    fields = {"medusa_num_heads": HEADS, "medusa_num_layers": LAYERS, "base_model_name_or_path": "x"} | config
    (folder / "config.json").write_text(json.dumps(fields))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


@pytest.mark.parametrize("prefix", ["", "medusa_head."])
def test_heads_compute_what_the_modules_they_were_saved_from_do(tmp_path: Path, prefix: str) -> None:
    modules = authors_heads()
    path = write(tmp_path / "heads", {prefix + name: one for name, one in modules.state_dict().items()})
    assert is_medusa(path)
    heads = read_medusa(path, HIDDEN, VOCABULARY, torch.float32)
    rows = torch.randn(4, HIDDEN)
    expected = torch.stack([module(rows) for module in modules])
    assert len(heads) == HEADS
    torch.testing.assert_close(heads.logits(rows, HEADS), expected)
    torch.testing.assert_close(heads.logits(rows, 1), expected[:1])
    assert read_medusa(path, HIDDEN, VOCABULARY, torch.bfloat16).logits(rows, 2).dtype == torch.float32


def test_broken_missing_and_other_heads_are_refused_in_words(tmp_path: Path) -> None:
    tensors = authors_heads().state_dict()

    def refused(words: str, path: Path, hidden: int = HIDDEN, vocab: int = VOCABULARY) -> None:
        with pytest.raises(BadHeads, match=words):
            read_medusa(path, hidden, vocab, torch.float32)

    path = write(tmp_path / "heads", tensors)
    refused(
        "12 x 12, for this model it would be|31 x 12, for this model it would be 31 x 16", path, hidden=16
    )
    refused("heads of another model", path, vocab=32)
    refused("has 3 heads, its config.json says 4", write(tmp_path / "few", tensors, medusa_num_heads=4))
    refused("medusa_num_heads 0", write(tmp_path / "none", tensors, medusa_num_heads=0))
    lacking = {name: one for name, one in tensors.items() if name != "1.0.linear.weight"}
    refused("lacks 1.0.linear.weight", write(tmp_path / "lacking", lacking))
    bad = tensors | {"2.2.weight": tensors["2.2.weight"] / 0}
    refused("2.2.weight has numbers that are not finite", write(tmp_path / "bad", bad))
    whole = path / WEIGHTS
    whole.write_bytes(whole.read_bytes()[:200])
    refused("broken or incomplete", path)
    whole.unlink()
    refused(f"no {WEIGHTS}", path)
    (path / PICKLED).write_bytes(b"x")
    refused("is a pickle", path)
    (path / "config.json").write_text("[]")
    refused("holds no JSON object", path)
    assert not is_medusa(path)
    assert not is_medusa(tmp_path / "nothing")
