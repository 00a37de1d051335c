"""Weights from a Hugging Face folder: config.json and one or more safetensors files."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from diptych.engine.dtype import PLAIN, Precision, plain_dtype
from diptych.engine.models.family import Family, Stored, stored_at
from diptych.engine.models.registry import family_of
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.weights.block_quantised import (
    ROUNDED,
    blocks_in_precision,
    in_precision,
    is_matrix,
    multiplied_together,
)
from diptych.engine.weights.canonical import BadModelFile, Matrix, layer_shapes
from diptych.engine.weights.hf_config import read_config, shape_from_config
from diptych.engine.weights.kv_scales import is_kv_scale, read_kv_scales
from diptych.engine.weights.quantised import Codes, Scheme, Tensors, scheme_of
from diptych.engine.weights.reader import WHOLE, Cut, OpenCheckpoint, check_columns, cut_from, rows_to_read
from diptych.engine.weights.rows import Rows, rows_of
from diptych.engine.weights.unexpected_tensors import refuse_quantised, refuse_unexpected_tensors
from diptych.model_families import WRAPPERS
from kernels.packed_matrix import PackedMatrix
from kernels.scaled_matrix import ScaledMatrix


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
    return scheme_of(_json_object(folder / "config.json"), _json_object(folder / "hf_quant_config.json"))


def weight_bytes(folder: Path) -> int:
    """Return the size of the files that hold a folder's weights."""
    return sum(path.stat().st_size for path in _weight_files(folder) if path.exists())


def open_folder(folder: Path, precision: Precision, *, behind_too: bool = False) -> OpenCheckpoint:
    """Open a model folder. Raises UnsupportedModel or BadModelFile, as its reader does; only safetensors are
    read, never a pickle.

    With `behind_too` the layers behind the model's, which draft (`Family.layers_behind`), count as layers.
    """
    config = read_config(folder)
    modelopt = _json_object(folder / "hf_quant_config.json")
    scheme = scheme_of(config, modelopt)
    if precision in ROUNDED and scheme is not None:
        raise UnsupportedModel(f"dtype {precision} rounds full numbers; this folder is quantised already")
    if precision == "gguf" and (scheme is None or not scheme.keeps_codes):
        raise UnsupportedModel("dtype gguf keeps a file's own quantised blocks; this folder has none")
    family = family_of(config["model_type"])
    wrapped = _json_object(folder / "config.json").get("model_type") in WRAPPERS
    tensors = TensorFiles(folder, wrapped=wrapped)
    dtypes = tensors.dtypes()
    refuse_quantised(modelopt, dtypes, scheme, tensors)
    tied = bool(config.get("tie_word_embeddings")) and not _own_head(family, tensors, scheme)
    behind = config.get(family.layers_behind, 0) if family.layers_behind is not None else 0
    if behind_too:
        config["num_hidden_layers"] += behind
    shape = shape_from_config(config, tied=tied)
    places = _Places(family, shape, behind)
    if not behind_too:  # those layers have more tensors than the model's
        names = dtypes if scheme is None else _of_full_numbers(dtypes, scheme, tensors, places)
        read_here = filter(places.only_shape_decides, names)
        refuse_unexpected_tensors(read_here, shape, _LAYER_PREFIX, family.layer)
    matrices = _Matrices(tensors, scheme, precision, places, tied=tied)

    def read(name: str, cut: Cut = WHOLE) -> Matrix:
        if is_matrix(name) and (quantised := matrices.read(name)) is not None:
            return quantised if cut == WHOLE else cut_from(quantised, name, cut)
        stored = places.of("embed" if name == "head" and tied else name)
        if cut != WHOLE and stored.make is not None:
            return cut_from(read(name), name, cut)
        if cut == WHOLE:
            tensor = _of_expert(tensors, stored).read(stored.name)
            if (rows := places.rows(name, stored, tuple(tensor.shape))) is not None:
                tensor = tensor[rows]
        else:
            tensor = _read_cut(tensors, places, name, stored, cut)
        if stored.make is not None:
            tensor = stored.make(tensor, _field(name), shape)
        if stored.plus:
            tensor = tensor.float() + stored.plus
        return in_precision(name, tensor, precision, float32=bool(stored.plus) or stored.float32)

    own_head = not tied or plain_dtype(precision) is None
    return OpenCheckpoint(shape, read, own_head, read_kv_scales(shape, tensors.has, tensors.read))


_LAYER_PREFIX = "model.layers."
_TEXT_PREFIXES = {
    "language_model.": "",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
    **{own: own for own in ("model.layers.", "model.embed_tokens.", "model.norm.")},
}
"""Beginnings of the names of a wrapper's text model, and what they are in the text model by itself."""


def _field(name: str) -> str:
    """Return a canonical name below its layer's."""
    return name.split(".", 2)[2] if name.startswith("layers.") else name


def _endings(names: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of names that end so; `{}` stands for an expert's number."""
    patterns = (re.escape(name).replace(r"\{\}", "[0-9]+") for name in sorted(names))
    return re.compile(f".*(?:{'|'.join(patterns) or '(?!)'})")


class _Places:
    """Places of the canonical tensors of one model in its folder."""

    def __init__(self, family: Family, shape: ModelShape, layers_behind: int = 0) -> None:
        self._family, self.shape = family, shape
        self._behind = tuple(
            f"{_LAYER_PREFIX}{shape.num_layers + number}." for number in range(layers_behind)
        )
        own = {
            field: at for field, at in family.model.items() if field != "final_norm_bias" or shape.norm_bias
        }
        self._model_names = {stored.name for field in own if (stored := stored_at(own, field)) is not None}
        names = {
            at if isinstance(at, str) else at.name
            for table in (own, family.layer)
            for field, at in table.items()
            if is_matrix(field)
        }
        self._matrices = _endings(name.removesuffix(".weight") for name in names)
        self._bare = _endings(name for name in names if not name.endswith(".weight"))

    def of(self, name: str) -> Stored:
        """Return the place of a canonical tensor, its whole name in the file."""
        if not name.startswith("layers."):
            stored, prefix = stored_at(self._family.model, name), ""
        else:
            layer = name.split(".", 2)[1]
            stored, prefix = stored_at(self._family.layer, _field(name)), f"{_LAYER_PREFIX}{layer}."
        if stored is None:
            raise UnsupportedModel(f"{name}: a {self._family.name} has no such tensor")
        return replace(stored, name=prefix + stored.name)

    def matrix(self, name: str) -> str:
        """Return the name of a canonical matrix in the file, without `.weight`."""
        return self.of(name).name.removesuffix(".weight")

    def of_full_numbers(self, matrix: str) -> str | None:
        """Return the tensor that a matrix would be if it were not quantised, None for a name of no matrix."""
        if self._matrices.fullmatch(matrix) is None:
            return None
        return matrix if self._bare.fullmatch(matrix) else f"{matrix}.weight"

    def together(self, name: str) -> list[str]:
        """Return all matrices of the model that one product joins with `name`, itself included."""
        if not name.startswith("layers."):
            return [name]
        known = dict(layer_shapes(self.shape, int(name.split(".", 2)[1])))
        return [other for other in multiplied_together(name) if _field(other) in known]

    def rows(self, name: str, stored: Stored, size: tuple[int, ...]) -> Rows:
        """Return the rows of the file's tensor, of `size`, that are the canonical one."""
        return rows_of(stored, name, self.shape, size, interleaved=self._family.interleaved)

    def only_shape_decides(self, name: str) -> bool:
        """Return whether only the shape can say that a tensor is read.

        Angles are computed here, and tensors beside the model (a value head, say) or behind it are no part of
        it.
        """
        if not name.startswith(("model.", "lm_head.")) or name in self._model_names:
            return False
        if name.startswith(self._behind):
            return False
        return not name.endswith("rotary_emb.inv_freq") and not is_kv_scale(name)


def _of_full_numbers(
    names: Iterable[str], scheme: Scheme, tensors: TensorFiles, places: _Places
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


class _Matrices:
    """A folder's quantised matrices by canonical name."""

    def __init__(
        self,
        tensors: TensorFiles,
        scheme: Scheme | None,
        precision: Precision,
        places: _Places,
        *,
        tied: bool,
    ) -> None:
        self._tensors, self._scheme, self._precision = tensors, scheme, precision
        self._places, self._shape, self._tied = places, places.shape, tied

    def read(self, name: str) -> Matrix | None:
        """Read a matrix as the precision stores it; None if it is not quantised."""
        if self._scheme is None or not self._is_quantised(name, self._scheme):
            return None
        stored, matrix = self._places.of(name), self._places.matrix(name)
        tensors = _of_expert(self._tensors, stored)
        try:
            if self._precision in ("gguf", "packed") and stored.block_rows is not None:
                blocks = self._scheme.read_blocks(matrix, tensors)
                if blocks is not None:
                    return blocks_in_precision(blocks.rows(stored.block_rows(_field(name))), self._precision)
            read = self._scheme.read_packed if self._precision == "packed" else self._scheme.read
            found = read(matrix, tensors)
        except BadModelFile as error:
            raise BadModelFile(f"{matrix}: {error}") from error
        size = tuple(found.codes.shape if isinstance(found, Codes) else found.shape)
        if (rows := self._places.rows(name, stored, size)) is not None:
            found = found[rows] if isinstance(found, torch.Tensor) else found.rows(rows)
        if stored.make is not None:
            if not isinstance(found, torch.Tensor):
                raise UnsupportedModel(f"{matrix}: matrices of this kind are read of full numbers only")
            found = stored.make(found, _field(name), self._shape)
        if isinstance(found, (PackedMatrix, ScaledMatrix)):
            return found
        if isinstance(found, Codes):
            return self._kept(name, found, self._scheme) or in_precision(
                name, found.numbers(), self._precision
            )
        return in_precision(name, found, self._precision)

    def _kept(self, name: str, codes: Codes, scheme: Scheme) -> Matrix | None:
        """Return the file's own codes, if the precision has them and all that is multiplied together can."""
        if self._precision == "packed":
            return codes.packed()
        if self._precision in PLAIN or not scheme.keeps_codes:
            return None
        if not all(self._is_quantised(other, scheme) for other in self._places.together(name)):
            return None
        return blocks_in_precision(codes.in_blocks(), self._precision)

    def _is_quantised(self, name: str, scheme: Scheme) -> bool:
        tied_head = name == "head" and self._tied
        return not tied_head and scheme.is_quantised(self._places.matrix(name), self._tensors)


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


class TensorFiles:
    """The tensors of a folder by name, each read when asked for."""

    def __init__(self, folder: Path, *, wrapped: bool = False) -> None:
        """Open the files; of a model that is `wrapped`, the text model's tensors, by its own names."""
        self._files: dict[str, tuple[Any, str]] = {}
        for path in _weight_files(folder):
            try:
                handle: Any = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise BadModelFile(f"{path.name}: {error}") from error
            for stored in handle.keys():  # noqa: SIM118 -- safetensors' handle is no dictionary
                if (name := _name_of_text(stored) if wrapped else stored) is not None:
                    self._files[name] = handle, stored

    def dtypes(self) -> dict[str, str]:
        """Return the type of each tensor, as safetensors names it, from the headers alone."""
        return {name: handle.get_slice(of).get_dtype() for name, (handle, of) in self._files.items()}

    def names(self) -> list[str]:
        """Return the names of all tensors, in order."""
        return sorted(self._files)

    def has(self, name: str) -> bool:
        return name in self._files

    def size(self, name: str) -> tuple[int, ...]:
        """Return the size of a tensor, from the header alone. Raises BadModelFile."""
        handle, stored = self._found(name)
        return tuple(handle.get_slice(stored).get_shape())

    def read_slice(self, name: str, rows: slice, columns: slice, expert: int | None = None) -> torch.Tensor:
        """Return these rows, and columns of them where there are such; no other bytes are read.

        With `expert` they are those of its part of a tensor of all experts. Raises BadModelFile.
        """
        handle, stored = self._found(name)
        part = handle.get_slice(stored)
        size = part.get_shape()
        if expert is None:
            found: torch.Tensor = part[rows] if len(size) == 1 else part[rows, columns]
            return found
        _check_expert(name, size, expert)
        one = slice(expert, expert + 1)
        of_one: torch.Tensor = part[one, rows] if len(size) == 2 else part[one, rows, columns]
        return of_one[0]

    def _found(self, name: str) -> tuple[Any, str]:
        if name not in self._files:
            raise BadModelFile(f"tensor {name} is missing")
        return self._files[name]

    def read(self, name: str, expert: int | None = None) -> torch.Tensor:
        """Return a tensor, or `expert`'s part of one of all experts. Raises BadModelFile."""
        handle, stored = self._found(name)
        if expert is None:
            tensor: torch.Tensor = handle.get_tensor(stored)
            return tensor
        part = handle.get_slice(stored)
        _check_expert(name, part.get_shape(), expert)
        one: torch.Tensor = part[expert : expert + 1]
        return one[0]


def _check_expert(name: str, size: Sequence[int], expert: int) -> None:
    if expert >= size[0]:
        raise BadModelFile(f"tensor {name} has {size[0]} experts")


@dataclass(frozen=True)
class _OfExpert:
    """Part of one expert in tensors of all experts."""

    tensors: TensorFiles
    expert: int

    def has(self, name: str) -> bool:
        return self.tensors.has(name)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors.read(name, self.expert)


def _of_expert(tensors: TensorFiles, stored: Stored) -> Tensors:
    """Return the tensors that `stored` is read from."""
    return tensors if stored.expert is None else _OfExpert(tensors, stored.expert)


def _read_cut(tensors: TensorFiles, places: _Places, name: str, stored: Stored, cut: Cut) -> torch.Tensor:
    """Read a part of a canonical tensor, whose rows are rows of the file's. Raises BadModelFile."""
    size = tensors.size(stored.name)
    if stored.expert is not None:
        size = size[1:]
    check_columns(stored.name, size, cut)
    rows, order = rows_to_read(places.rows(name, stored, size), cut)
    columns = slice(None) if cut.columns is None else slice(cut.columns.start, cut.columns.stop)
    tensor = tensors.read_slice(stored.name, rows, columns, stored.expert)
    return tensor if order is None else tensor[order]


def _name_of_text(stored: str) -> str | None:
    """Return the name that a wrapper's tensor has in its text model, None if it is not part of that."""
    for prefix, own in _TEXT_PREFIXES.items():
        if stored.startswith(prefix):
            return own + stored.removeprefix(prefix)
    return None


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
