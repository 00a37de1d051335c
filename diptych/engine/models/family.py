"""The interface of model families: what the file of one, diptych/engine/models/<family>.py, says of it.

A `Family` reads Hugging Face folders, a `GgufFamily` GGUF files. Both say how a file's fields become a
`ModelShape`, and where each canonical tensor (diptych/engine/weights) lies in the file: a `Stored`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, Protocol

import torch

from diptych.engine.models.shape import LayerShape, ModelShape

Config = Mapping[str, Any]
"""Fields of a `config.json`, resolved: none is missing (config_fields.py)."""


Extent = tuple[range | None, range | None]
"""Rows and columns of a tensor; None is all."""


@dataclass(frozen=True)
class Stored:
    """Place of one canonical tensor in a file."""

    name: str
    """Name in the file, below the layer's prefix; `{}` stands for an expert's number."""
    rows_of: tuple[str, ...] = ()
    """Fields whose rows the file's tensor holds, in this order; empty if it is this field's alone. Rows are
    those of the fields' shapes.
    """
    rows: Callable[[str, ModelShape, int], torch.Tensor] | None = None
    """Gives the numbers of the rows that are the field's, by its name below the layer's and the layer's
    number, where those of `rows_of` do not follow one another.
    """
    plus: float = 0.0
    """Added to each number (norms that are stored less one)."""
    float32: bool = False
    """The tensor is kept in float32 in every precision, as one that something is added to is."""
    stacked: bool = False
    """The file's tensor has all experts' along its first axis."""
    expert: int | None = None
    """Number of the expert whose part of a stacked tensor this is."""
    make: Callable[[torch.Tensor, str, ModelShape], torch.Tensor] | None = None
    """Makes the canonical tensor, whose name below the layer's is the second argument, of the file's tensor
    of full numbers, for what rows do not express.
    """
    row_by_row: bool = False
    """`make` gives each row a factor: rows of an adapter's B are made alike."""
    made_of: Callable[[str, Extent, ModelShape], Extent] | None = None
    """Gives the part of the file's tensor (of one expert's, if it has all experts') that `make` makes a part
    of the canonical one of, whose name below the layer's comes first. None: it is made of the whole.
    """
    block_rows: Callable[[str], slice] | None = None
    """Gives the rows of the file's quantised blocks, `[out, in]` where its full numbers are `[in, out]`, that
    are the canonical matrix of that name below the layer's.
    """


Names = Mapping[str, str | Stored]
"""Place of each canonical field; a name alone is a tensor that is taken as it is."""

LLAMA_MODEL: Names = MappingProxyType(
    {"embed": "model.embed_tokens.weight", "final_norm": "model.norm.weight", "head": "lm_head.weight"}
)
LLAMA_ATTENTION: Names = MappingProxyType(
    {
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
    }
)
LLAMA_FEED_FORWARD: Names = MappingProxyType(
    {
        "gate": "mlp.gate_proj.weight",
        "up": "mlp.up_proj.weight",
        "down": "mlp.down_proj.weight",
        "gate_bias": "mlp.gate_proj.bias",
        "up_bias": "mlp.up_proj.bias",
        "down_bias": "mlp.down_proj.bias",
    }
)
LLAMA_NORMS: Names = MappingProxyType(
    {
        "input_norm": "input_layernorm.weight",
        "post_norm": "post_attention_layernorm.weight",
    }
)
LLAMA_LAYER: Names = MappingProxyType({**LLAMA_NORMS, **LLAMA_ATTENTION, **LLAMA_FEED_FORWARD})

GGUF_MODEL: Names = MappingProxyType(
    {
        "embed": "token_embd.weight",
        "final_norm": "output_norm.weight",
        "final_norm_bias": "output_norm.bias",
        "head": "output.weight",
    }
)
GGUF_LAYER: Names = MappingProxyType(
    {
        "input_norm": "attn_norm.weight",
        "input_norm_bias": "attn_norm.bias",
        "q": "attn_q.weight",
        "k": "attn_k.weight",
        "v": "attn_v.weight",
        "o": "attn_output.weight",
        "q_bias": "attn_q.bias",
        "k_bias": "attn_k.bias",
        "v_bias": "attn_v.bias",
        "o_bias": "attn_output.bias",
        "q_norm": "attn_q_norm.weight",
        "k_norm": "attn_k_norm.weight",
        "attention_out_norm": "post_attention_norm.weight",
        "post_norm": "ffn_norm.weight",
        "post_norm_bias": "ffn_norm.bias",
        "feed_forward_out_norm": "post_ffw_norm.weight",
        "gate": "ffn_gate.weight",
        "up": "ffn_up.weight",
        "down": "ffn_down.weight",
        "gate_bias": "ffn_gate.bias",
        "up_bias": "ffn_up.bias",
        "down_bias": "ffn_down.bias",
        "sinks": "attn_sinks.weight",
    }
)


@dataclass(frozen=True)
class Family:
    """A family of Hugging Face folders."""

    name: str
    """`model_type` of its configs."""
    defaults: Mapping[str, object]
    """Value of a field that a file leaves out. Its type is that which the field must have, but for None.
    None is derived from other fields (config_fields.py).
    """
    shape: Callable[[Config, bool], ModelShape]
    """Makes the shape of a resolved config, and of whether the output matrix is the embedding. Raises
    UnsupportedModel.
    """
    layer: Names = field(default_factory=lambda: LLAMA_LAYER)
    model: Names = field(default_factory=lambda: LLAMA_MODEL)
    interleaved: bool = False
    """The file pairs neighbouring lanes for the rotation."""
    rope_theta: float = 10000.0
    window: Literal["none", "every_layer", "layer_types"] = "none"
    """Layers to which `sliding_window` applies. Where `use_sliding_window` has a default, it must be true."""
    hidden_is_whole_heads: bool = False
    """A `hidden_size` that is no multiple of `num_attention_heads` is refused, even beside a `head_dim`."""
    resolve: Callable[[dict[str, Any]], None] | None = None
    """Derives fields of its own in a config with defaults filled in, before heads and layer types are."""
    neutral: Mapping[str, tuple[object, ...]] = field(default_factory=dict)
    """Values that a field may have where any other would need what is not computed."""
    partial_rotary: bool = False
    """`partial_rotary_factor` is computed; elsewhere any but 1 is refused."""
    rope_by_layer_type: Callable[[Config], Mapping[str, Mapping[str, Any]]] | None = None
    """Returns rotary fields for each of `layer_types`, for families whose layers differ in them."""
    layers_behind: str | None = None
    """Field with the number of layers behind the model's, which draft further tokens: they are not read."""
    layer_kinds: Mapping[str, Callable[[Config], LayerShape]] = field(default_factory=dict)
    """Layers of this family by their name in `layer_types`, beside full attention and windows."""
    elsewhere: Names = field(default_factory=dict)
    """Places of tensors in files that have any of these; `layer` has those of the others."""

    def of_files(self, has: Callable[[str], bool]) -> Family:
        """Return the family as its files are, of which `has` tells the ends of tensors' names."""
        places = {stored_at(self.elsewhere, name) for name in self.elsewhere}
        if not any(place is not None and has(place.name) for place in places):
            return self
        return replace(self, layer={**self.layer, **self.elsewhere})


class GgufMetadata(Protocol):
    """The values of a GGUF file below its architecture's prefix, by the rest of the key.

    All raise BadModelFile, naming the key, for a value of another type.
    """

    def key(self, name: str) -> str: ...
    def get(self, name: str) -> str | float | bool | None: ...
    def integer(self, name: str) -> int | None: ...
    def number(self, name: str) -> float | None: ...
    def integers(self, name: str) -> tuple[int, ...] | None:
        """Return an array of few whole numbers, which the family's `read` must name."""
        ...

    def size(self, name: str) -> int:
        """Return a whole number that must be there."""
        ...

    def has(self, tensor: str) -> bool:
        """Return whether the file has a tensor of this name."""
        ...


@dataclass(frozen=True)
class GgufFamily:
    """A family of GGUF files."""

    architecture: str
    switches: Callable[[GgufMetadata, ModelShape], ModelShape] = lambda _, shape: shape
    """Returns the shape of a file, made of what Llama's fields say. Raises UnsupportedModel, BadModelFile."""
    layer: Names = field(default_factory=lambda: GGUF_LAYER)
    model: Names = field(default_factory=lambda: GGUF_MODEL)
    interleaved: bool = False
    """The file pairs neighbouring lanes for the rotation (llama.cpp's "normal" kind)."""
    read: frozenset[str] = frozenset()
    """Keys that `switches` reads; those of Llama are known, all others below `attention.` and `rope.` are
    refused.
    """
    layers_behind: str | None = None
    """Key with the number of layers behind the model's, which draft further tokens: they are not read."""


def stored_at(names: Names, fld: str) -> Stored | None:
    """Return the place of a canonical field, None if the family has none.

    Experts share an entry: `experts.*.gate` is where each one's `gate` lies, its number in place of `{}`.
    """
    number = next((part for part in fld.split(".") if part.isdigit()), None)
    found = names.get(fld if number is None else fld.replace(f".{number}.", ".*."))
    if found is None:
        return None
    stored = Stored(found) if isinstance(found, str) else found
    if number is None:
        return stored
    return replace(
        stored,
        name=stored.name.format(number),
        rows_of=tuple(one.format(number) for one in stored.rows_of),
        expert=int(number) if stored.stacked else None,
    )
