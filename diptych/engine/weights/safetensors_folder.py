"""Weights from a Hugging Face folder: config.json and one or more safetensors files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from diptych.engine.dtype import PLAIN, Precision
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.block_quantised import (
    blocks_in_precision,
    in_precision,
    is_matrix,
    multiplied_together,
)
from diptych.engine.weights.canonical import BadModelFile, Checkpoint, Matrix, assemble
from diptych.engine.weights.hf_config import read_config, shape_from_config
from diptych.engine.weights.kv_scales import is_kv_scale, read_kv_scales
from diptych.engine.weights.quantised import Codes, Scheme, scheme_of
from diptych.engine.weights.unexpected_tensors import refuse_quantised, refuse_unexpected_tensors

_MODEL_NAMES = {
    "embed": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "head": "lm_head.weight",
}
_LAYER_NAMES = {
    "input_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "o_bias": "self_attn.o_proj.bias",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "post_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "gate_bias": "mlp.gate_proj.bias",
    "up_bias": "mlp.up_proj.bias",
    "down_bias": "mlp.down_proj.bias",
}
_LAYER_PREFIX = "model.layers."
_MATRICES = tuple(
    name.removesuffix(".weight")
    for field, name in {**_MODEL_NAMES, **_LAYER_NAMES}.items()
    if is_matrix(field)
)


def keeps_blocks(folder: Path) -> bool:
    """Return whether a folder's matrices can be kept in quantised blocks.

    Raises UnsupportedModel or BadModelFile.
    """
    scheme = scheme_of(_json_object(folder / "config.json"))
    return scheme is not None and scheme.keeps_codes


def weight_bytes(folder: Path) -> int:
    """Return the size of the files that hold a folder's weights."""
    return sum(path.stat().st_size for path in _weight_files(folder) if path.exists())


def read_folder(folder: Path, precision: Precision) -> Checkpoint:
    """Read a model folder. Raises UnsupportedModel or BadModelFile; only safetensors are read, never a
    pickle.
    """
    config = read_config(folder)
    scheme = scheme_of(config)
    if precision == "gguf" and (scheme is None or not scheme.keeps_codes):
        raise UnsupportedModel("dtype gguf keeps a file's own quantised blocks; this folder has none")
    tensors = _TensorFiles(folder)
    dtypes = tensors.dtypes()
    refuse_quantised(_json_object(folder / "hf_quant_config.json"), dtypes, scheme, tensors)
    tied = bool(config.get("tie_word_embeddings")) and not _own_head(tensors, scheme)
    shape = shape_from_config(config, tied=tied)
    names = dtypes if scheme is None else _of_full_numbers(dtypes, scheme, tensors)
    refuse_unexpected_tensors(filter(_only_shape_decides, names), shape, _LAYER_PREFIX, _LAYER_NAMES)
    matrices = _Matrices(tensors, scheme, precision, tied=tied)

    def read(name: str) -> Matrix:
        if is_matrix(name) and (quantised := matrices.read(name)) is not None:
            return quantised
        stored = "embed" if name == "head" and tied else name
        return in_precision(name, tensors.read(_stored_name(stored)), precision)

    own_head = not tied or precision not in PLAIN
    weights = assemble(shape, read, own_head=own_head)
    return Checkpoint(shape, weights, read_kv_scales(shape, tensors.has, tensors.read))


def _only_shape_decides(name: str) -> bool:
    """Return whether only the shape can say that a tensor is read.

    Angles are computed here, and tensors beside the model (a value head, say) are no part of it.
    """
    if not name.startswith(("model.", "lm_head.")) or name in _MODEL_NAMES.values():
        return False
    return not name.endswith("rotary_emb.inv_freq") and not is_kv_scale(name)


def _of_full_numbers(names: Iterable[str], scheme: Scheme, tensors: _TensorFiles) -> Iterator[str]:
    """Yield the tensors that the folder would have if it were not quantised."""
    for name in names:
        matrix = scheme.matrix_of(name)
        if matrix is not None and matrix.endswith(_MATRICES):
            yield f"{matrix}.weight"
        # Old exports give every matrix a bias, and those that had none get zeros.
        elif not (name.endswith(".bias") and not bool(tensors.read(name).any())):
            yield name


class _Matrices:
    """A folder's quantised matrices by canonical name."""

    def __init__(
        self, tensors: _TensorFiles, scheme: Scheme | None, precision: Precision, *, tied: bool
    ) -> None:
        self._tensors, self._scheme, self._precision, self._tied = tensors, scheme, precision, tied

    def read(self, name: str) -> Matrix | None:
        """Read a matrix as the precision stores it; None if it is not quantised."""
        if self._scheme is None or not self._is_quantised(name, self._scheme):
            return None
        matrix = _matrix_of(name)
        try:
            found = self._scheme.read(matrix, self._tensors)
        except BadModelFile as error:
            raise BadModelFile(f"{matrix}: {error}") from error
        if isinstance(found, Codes):
            return self._kept(name, found, self._scheme) or in_precision(
                name, found.numbers(), self._precision
            )
        return in_precision(name, found, self._precision)

    def _kept(self, name: str, codes: Codes, scheme: Scheme) -> Matrix | None:
        """Return the file's own codes, if the precision has them and all that is multiplied together can."""
        if self._precision in PLAIN or not scheme.keeps_codes:
            return None
        if not all(self._is_quantised(other, scheme) for other in multiplied_together(name)):
            return None
        return blocks_in_precision(codes.in_blocks(), self._precision)

    def _is_quantised(self, name: str, scheme: Scheme) -> bool:
        tied_head = name == "head" and self._tied
        return not tied_head and scheme.is_quantised(_matrix_of(name), self._tensors)


def _own_head(tensors: _TensorFiles, scheme: Scheme | None) -> bool:
    """Return whether there is an output matrix that is not the embedding once more.

    It counts then, as it does for transformers, though the config ties them.
    """
    head, embed = _MODEL_NAMES["head"], _MODEL_NAMES["embed"]
    if scheme is not None and scheme.is_quantised(_matrix_of("head"), tensors):
        return True
    if not tensors.has(head):
        return False
    own, tied = tensors.read(head), tensors.read(embed)
    return own.dtype != tied.dtype or not torch.equal(own, tied)


def _stored_name(name: str) -> str:
    if name in _MODEL_NAMES:
        return _MODEL_NAMES[name]
    _, layer, field = name.split(".")
    return f"{_LAYER_PREFIX}{layer}.{_LAYER_NAMES[field]}"


def _matrix_of(name: str) -> str:
    return _stored_name(name).removesuffix(".weight")


class _TensorFiles:
    """The tensors of a folder by name, each read when asked for."""

    def __init__(self, folder: Path) -> None:
        self._files: dict[str, Any] = {}
        for path in _weight_files(folder):
            try:
                handle: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise BadModelFile(f"{path.name}: {error}") from error
            self._files |= dict.fromkeys(handle.keys(), handle)

    def dtypes(self) -> dict[str, str]:
        """Return the type of each tensor, as safetensors names it, from the headers alone."""
        return {name: handle.get_slice(name).get_dtype() for name, handle in self._files.items()}

    def has(self, name: str) -> bool:
        return name in self._files

    def read(self, name: str) -> torch.Tensor:
        if name not in self._files:
            raise BadModelFile(f"tensor {name} is missing")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor


def _weight_files(folder: Path) -> list[Path]:
    """Return the files with weights; one file precedes an index, which an earlier model may have left."""
    whole, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if whole.exists() or not index.exists():
        return [whole]
    names = set(_json_object(index).get("weight_map", {}).values())
    for name in names:
        # A name with a separator could reach outside of the folder.
        if not isinstance(name, str) or Path(name).name != name:
            raise BadModelFile("the weight index names a file outside of its folder")
    return [folder / name for name in sorted(names)]


def _json_object(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise BadModelFile(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise BadModelFile(f"{path.name} is not an object")
    return value
