"""Reader of checkpoints of every format: GGUF files and Hugging Face folders."""

from __future__ import annotations

from pathlib import Path

from diptych.engine.dtype import Precision
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.weights.canonical import Checkpoint
from diptych.engine.weights.gguf_parts import all_parts
from diptych.engine.weights.hf_config import read_config, shape_from_config
from diptych.engine.weights.reader import OpenCheckpoint


def is_quantised(path: Path) -> bool:
    """Return whether a model's matrices are in quantised blocks, or in codes that can be kept in such.

    Raises FileNotFoundError, UnsupportedModel or BadModelFile.
    """
    if path.is_dir():
        from diptych.engine.weights.safetensors_folder import keeps_blocks

        return keeps_blocks(path)
    if path.suffix.lower() != ".gguf":
        return False
    from diptych.engine.weights.gguf_file import has_quantised_matrices

    return has_quantised_matrices(path)


def packs(path: Path) -> bool:
    """Return whether a GPU step can keep a model's matrices in the file's own codes.

    Raises FileNotFoundError, UnsupportedModel or BadModelFile.
    """
    if path.is_dir():
        from diptych.engine.weights import safetensors_folder

        return safetensors_folder.packs(path)
    return is_quantised(path)


def has_kquants(path: Path) -> bool:
    """Return whether any matrix is a K-quant, or has codes in a table, that is computed in its blocks.

    Raises UnsupportedModel or BadModelFile.
    """
    if path.is_dir():
        from diptych.engine.weights.safetensors_folder import has_tables

        return has_tables(path)
    if path.suffix.lower() != ".gguf":
        return False
    from diptych.engine.weights.gguf_file import has_kept_kquants

    return has_kept_kquants(path)


def shape_of(path: Path) -> ModelShape:
    """Return the shape that a model's files describe, from their heads alone.

    Whether the output matrix is a tensor of its own is the config's word. Raises FileNotFoundError,
    UnsupportedModel or BadModelFile.
    """
    if path.is_dir():
        config = read_config(path)
        return shape_from_config(config, tied=bool(config.get("tie_word_embeddings")))
    from diptych.engine.weights.gguf_header import read_header
    from diptych.engine.weights.gguf_shape import shape_from_header

    return shape_from_header(read_header(path), {})[1]


def weight_bytes(path: Path) -> int:
    """Return the size in bytes of the files with a model's weights, 0 for none. Raises BadModelFile."""
    if path.is_dir():
        from diptych.engine.weights import safetensors_folder

        return safetensors_folder.weight_bytes(path)
    return sum(part.stat().st_size for part in all_parts(path) if part.is_file())


def read_checkpoint(path: Path, precision: Precision) -> Checkpoint:
    """Read a `.gguf` file or a Hugging Face folder, its tensors as `precision` stores them.

    Raises FileNotFoundError, UnsupportedModel or BadModelFile.
    """
    return open_checkpoint(path, precision).read_all()


def open_checkpoint(path: Path, precision: Precision) -> OpenCheckpoint:
    """Open such a file or folder, to be read in parts. Raises as `read_checkpoint` does."""
    if path.is_dir():
        from diptych.engine.weights.safetensors_folder import open_folder

        return open_folder(path, precision)
    if not path.exists():
        raise FileNotFoundError(f"no model at {path}")
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModel(f"{path.name}: a model is a .gguf file or a folder with config.json")
    from diptych.engine.weights.gguf_file import open_gguf

    return open_gguf(path, precision)
