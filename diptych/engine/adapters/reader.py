"""Reader of adapters of every format."""

from __future__ import annotations

from pathlib import Path

from diptych.engine.adapters.adapter import Adapter
from diptych.engine.models.shape import ModelShape


def read_adapter(path: Path, shape: ModelShape, max_rank: int) -> Adapter:
    """Read the adapter at `path`, a PEFT folder or a GGUF file, for a model of `shape`.

    Raises BadAdapter, naming what is at fault, for one that cannot be computed or has a rank above
    `max_rank`, and OSError.
    """
    if path.is_dir():
        from diptych.engine.adapters.peft_folder import read_peft_folder

        return read_peft_folder(path, shape, max_rank)
    from diptych.engine.adapters.gguf_adapter import read_gguf_adapter

    return read_gguf_adapter(path, shape, max_rank)
