"""Places of the canonical tensors of one model in its Hugging Face folder."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from diptych.engine.models.family import Family, Stored, stored_at
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.weights.block_quantised import is_matrix, multiplied_together
from diptych.engine.weights.canonical import field_of, layer_shapes
from diptych.engine.weights.kv_scales import is_kv_scale
from diptych.engine.weights.rows import Rows, rows_of

LAYER_PREFIX = "model.layers."


def _endings(names: Iterable[str]) -> re.Pattern[str]:
    """Return the pattern of names that end so; `{}` stands for an expert's number."""
    patterns = (re.escape(name).replace(r"\{\}", "[0-9]+") for name in sorted(names))
    return re.compile(f".*(?:{'|'.join(patterns) or '(?!)'})")


class Places:
    """Places of the canonical tensors of one model in its folder."""

    def __init__(self, family: Family, shape: ModelShape, layers_behind: int = 0) -> None:
        self._family, self.shape = family, shape
        self._behind = tuple(f"{LAYER_PREFIX}{shape.num_layers + number}." for number in range(layers_behind))
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
            stored, prefix = stored_at(self._family.layer, field_of(name)), f"{LAYER_PREFIX}{layer}."
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
        return [other for other in multiplied_together(name) if field_of(other) in known]

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
