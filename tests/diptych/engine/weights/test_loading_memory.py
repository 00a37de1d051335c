"""Pages of mapped files are given back while weights are read, and read again where they are used."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from diptych.engine.weights.loading_memory import LoadingMemory, mapped_at

SIZE = 1 << 20


def resident(path: Path) -> int:
    """Return the KiB of a mapped file that this process holds."""
    ours, held = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            ours = words[-1] == str(path)
        elif ours and words[0] == "Rss:":
            held += int(words[1])
    return held


@pytest.mark.parametrize("kind", ["safetensors", "memmap"])
def test_pages_that_were_read_are_given_back_and_stay_readable(kind: str, tmp_path: Path) -> None:
    path, numbers = (tmp_path / "model").resolve(), torch.arange(SIZE, dtype=torch.int32)
    if kind == "safetensors":
        save_file({"t": numbers}, path)
        tensor = safe_open(path, framework="pt").get_tensor("t")
    else:
        numbers.numpy().tofile(path)
        tensor = torch.from_numpy(np.memmap(path, dtype=np.int32, mode="c"))
    assert torch.equal(tensor, numbers)
    assert resident(path) >= SIZE * 4 // 1024
    assert [end - begin >= SIZE * 4 for begin, end in mapped_at([path])] == [True]
    memory = LoadingMemory([path])
    memory.took(SIZE)
    assert resident(path) >= SIZE * 4 // 1024  # not after each small tensor
    memory.took(16 << 20)
    assert resident(path) == 0
    assert torch.equal(tensor, numbers)


def test_files_that_are_not_mapped_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(b"x")
    assert not list(mapped_at([tmp_path / "other"]))
    LoadingMemory([tmp_path / "other"]).give_back()
