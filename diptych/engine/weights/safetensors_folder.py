"""Weights from a Hugging Face folder: config.json and one or more safetensors files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from diptych.engine.dtype import Precision, plain_dtype
from diptych.engine.models.family import Family, Stored, stored_at
from diptych.engine.models.registry import family_of
from diptych.engine.models.shape import UnsupportedModel
from diptych.engine.weights.block_quantised import ROUNDED, in_precision, is_matrix
from diptych.engine.weights.canonical import Matrix, field_of
from diptych.engine.weights.folder_places import LAYER_PREFIX, Places
from diptych.engine.weights.hf_config import read_config, shape_from_config
from diptych.engine.weights.kv_scales import read_kv_scales
from diptych.engine.weights.quantised import Scheme, scheme_of
from diptych.engine.weights.quantised_matrices import QuantisedMatrices
from diptych.engine.weights.reader import (
    WHOLE,
    Cut,
    OpenCheckpoint,
    check_columns,
    rows_to_read,
    source_of,
)
from diptych.engine.weights.tensor_files import TensorFiles, json_object, weight_files
from diptych.engine.weights.unexpected_tensors import refuse_quantised, refuse_unexpected_tensors
from diptych.model_families import WRAPPERS


def keeps_blocks(folder: Path) -> bool:
    """Return whether a folder's matrices can be kept in quantised blocks.

    Raises UnsupportedModel or BadModelFile.
    """
    scheme = _scheme_of_folder(folder)
    return scheme is not None and scheme.keeps_codes


def has_tables(folder: Path) -> bool:
    """Return whether a folder's codes are places in a table, which int8 does not keep.

    Raises UnsupportedModel or BadModelFile.
    """
    scheme = _scheme_of_folder(folder)
    return scheme is not None and scheme.has_tables


def packs(folder: Path) -> bool:
    """Return whether a GPU step can keep matrices of a folder in its codes.

    Raises UnsupportedModel or BadModelFile.
    """
    scheme = _scheme_of_folder(folder)
    return scheme is not None and scheme.packs


def _scheme_of_folder(folder: Path) -> Scheme | None:
    return scheme_of(json_object(folder / "config.json"), json_object(folder / "hf_quant_config.json"))


def weight_bytes(folder: Path) -> int:
    """Return the size of the files that hold a folder's weights."""
    return sum(path.stat().st_size for path in weight_files(folder) if path.exists())


def open_folder(folder: Path, precision: Precision, *, behind_too: bool = False) -> OpenCheckpoint:
    """Open a model folder. Raises UnsupportedModel or BadModelFile, as its reader does; only safetensors are
    read, never a pickle.

    With `behind_too` the layers behind the model's, which draft (`Family.layers_behind`), count as layers.
    """
    config = read_config(folder)
    modelopt = json_object(folder / "hf_quant_config.json")
    scheme = scheme_of(config, modelopt)
    if precision in ROUNDED and scheme is not None:
        raise UnsupportedModel(f"dtype {precision} rounds full numbers; this folder is quantised already")
    if precision == "gguf" and (scheme is None or not scheme.keeps_codes):
        raise UnsupportedModel("dtype gguf keeps a file's own quantised blocks; this folder has none")
    family = family_of(config["model_type"])
    wrapped = json_object(folder / "config.json").get("model_type") in WRAPPERS
    tensors = TensorFiles(folder, wrapped=wrapped)
    dtypes = tensors.dtypes()
    family = family.of_files(lambda end: any(name.endswith(f".{end}") for name in dtypes))
    refuse_quantised(modelopt, dtypes, scheme, tensors)
    tied = bool(config.get("tie_word_embeddings")) and not _own_head(family, tensors, scheme)
    behind = config.get(family.layers_behind, 0) if family.layers_behind is not None else 0
    if behind_too:
        config["num_hidden_layers"] += behind
    shape = shape_from_config(config, tied=tied)
    places = Places(family, shape, behind)
    if not behind_too:  # those layers have more tensors than the model's
        names = dtypes if scheme is None else _of_full_numbers(dtypes, scheme, tensors, places)
        read_here = filter(places.only_shape_decides, names)
        refuse_unexpected_tensors(read_here, shape, LAYER_PREFIX, family.layer)
    matrices = QuantisedMatrices(tensors, scheme, precision, places, tied=tied)

    def read(name: str, cut: Cut = WHOLE) -> Matrix:
        if is_matrix(name) and (quantised := matrices.read(name, cut)) is not None:
            return quantised
        stored = places.of("embed" if name == "head" and tied else name)
        if cut == WHOLE:
            tensor = tensors.read(stored.name, stored.expert)
            if (rows := places.rows(name, stored, tuple(tensor.shape))) is not None:
                tensor = tensor[rows]
        else:
            tensor = _read_cut(tensors, places, name, stored, cut)
        if stored.make is not None:
            tensor = stored.make(tensor, field_of(name), shape)
        if stored.plus:
            tensor = tensor.float() + stored.plus
        return in_precision(name, tensor, precision, float32=bool(stored.plus) or stored.float32)

    own_head = not tied or plain_dtype(precision) is None
    kv_scales = read_kv_scales(shape, tensors.has, tensors.read)
    return OpenCheckpoint(shape, read, own_head, kv_scales, tensors.paths)


def _of_full_numbers(
    names: Iterable[str], scheme: Scheme, tensors: TensorFiles, places: Places
) -> Iterator[str]:
    """Yield the tensors that the folder would have if it were not quantised."""
    for name in names:
        matrix = scheme.matrix_of(name)
        full = None if matrix is None else places.of_full_numbers(matrix)
        if full is not None:
            yield full
        # Old exports give every matrix a bias, and those that had none get zeros.
        elif not (name.endswith(".bias") and not bool(tensors.read(name).any())):
            yield name


def _own_head(family: Family, tensors: TensorFiles, scheme: Scheme | None) -> bool:
    """Return whether there is an output matrix that is not the embedding once more.

    It counts then, as it does for transformers, though the config ties them.
    """
    places = (stored_at(family.model, field) for field in ("head", "embed"))
    head, embed = (place.name for place in places if place is not None)
    if scheme is not None and scheme.is_quantised(head.removesuffix(".weight"), tensors):
        return True
    if not tensors.has(head):
        return False
    own, tied = tensors.read(head), tensors.read(embed)
    return own.dtype != tied.dtype or not torch.equal(own, tied)


def _read_cut(tensors: TensorFiles, places: Places, name: str, stored: Stored, cut: Cut) -> torch.Tensor:
    """Read what a part of a canonical tensor is made of. Raises BadModelFile, UnsupportedModel."""
    size = tensors.size(stored.name)
    if stored.expert is not None:
        size = size[1:]
    source = source_of(stored, name, cut, places.shape)
    check_columns(stored.name, size, source)
    rows, order = rows_to_read(places.rows(name, stored, size), source)
    columns = slice(None) if source.columns is None else slice(source.columns.start, source.columns.stop)
    tensor = tensors.read_slice(stored.name, rows, columns, stored.expert)
    return tensor if order is None else tensor[order]
