"""Files of EAGLE-3 heads (eagle3.py), and the checks that they are a model's."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from diptych.engine.heads.head_files import BadHeads, read_config
from diptych.engine.models.config_fields import resolve_config, shape_from_config
from diptych.engine.models.shape import ModelShape, UnsupportedModel
from diptych.engine.weights.canonical import BadModelFile

DRAFT_VOCAB: Final = "draft_vocab_size"
_LAYER: Final = ("midlayer.", "layers.0.", "model.layers.0.", "model.midlayer.")
_PLAIN: Final = ("", "model.")


@dataclass(frozen=True)
class Eagle3Weights:
    """Weights of a head, all of one type."""

    embed: torch.Tensor
    """`[vocab, hidden]`, the model's own where the files have none."""
    fc: torch.Tensor
    """`[hidden, taps * the model's hidden]`."""
    hidden_norm: torch.Tensor
    input_norm: torch.Tensor
    post_norm: torch.Tensor
    norm: torch.Tensor
    qkv: Sequence[tuple[torch.Tensor, torch.Tensor | None]]
    """Matrices `[width, 2 * hidden]` and biases of queries, keys and values."""
    output: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    lm_head: torch.Tensor
    """`[draft vocab, hidden]`."""
    draft_tokens: torch.Tensor
    """int64 `[draft vocab]`: the model's number of each drafted token."""
    layers: tuple[int, ...]
    """Layers of the model before which the residual stream is read."""
    norm_before_residual: bool
    """True if the residual of the layer begins with the normed feature."""


def is_eagle3(path: Path) -> bool:
    """Return whether a folder's config.json is that of an EAGLE-3 head, as the authors name them."""
    try:
        config = read_config(path)
    except BadHeads:
        return False
    named = config.get("architectures")
    return DRAFT_VOCAB in config or (isinstance(named, list) and any("Eagle3" in str(one) for one in named))


def files_digest(path: Path) -> str:
    """Return the Sha256 hex of a head's config and of all bytes of its weights."""
    digest = hashlib.sha256(b"diptych.eagle3.1")
    for file in (path / "config.json", *sorted(path.glob("*.safetensors"))):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def read_eagle3(
    path: Path, model: ModelShape, embed: torch.Tensor, dtype: torch.dtype
) -> tuple[ModelShape, Eagle3Weights]:
    """Read the head of a model of shape `model` and embedding `embed` in `dtype`. Raises BadHeads."""
    config = read_config(path)
    try:
        shape = shape_from_config(resolve_config(_of_llama(config)), tied=False)
    except (UnsupportedModel, BadModelFile) as error:
        raise BadHeads(f"{path}: {error}") from error
    if shape.num_layers != 1 or shape.vocab_size != model.vocab_size:
        raise BadHeads(
            f"{path}: a head of {shape.num_layers} layers for {shape.vocab_size} tokens; the model has "
            f"{model.vocab_size}, and heads of one layer are computed"
        )
    layers = _tapped(path, config, model.num_layers)
    files = _Files(path, dtype)
    hidden, width = shape.hidden_size, shape.num_heads * shape.head_dim
    kv, inner = shape.num_kv_heads * shape.head_dim, shape.intermediate_size
    drafts = config.get(DRAFT_VOCAB) or model.vocab_size
    own = files.find(_PLAIN, "embed_tokens.weight")
    if own is None and embed.shape[1] != hidden:
        raise BadHeads(f"{path}: without embed_tokens.weight its width {hidden} has to be {embed.shape[1]}")
    weights = Eagle3Weights(
        embed=embed if own is None else files.sized(own, (model.vocab_size, hidden)),
        fc=files.plain("fc.weight", (hidden, len(layers) * model.hidden_size)),
        hidden_norm=files.layer("hidden_norm.weight", (hidden,)),
        input_norm=files.layer("input_layernorm.weight", (hidden,)),
        post_norm=files.layer("post_attention_layernorm.weight", (hidden,)),
        norm=files.plain("norm.weight", (hidden,)),
        qkv=[
            files.projection(name, (rows, 2 * hidden))
            for name, rows in zip("qkv", (width, kv, kv), strict=True)
        ],
        output=files.layer("self_attn.o_proj.weight", (hidden, width)),
        gate=files.layer("mlp.gate_proj.weight", (inner, hidden)),
        up=files.layer("mlp.up_proj.weight", (inner, hidden)),
        down=files.layer("mlp.down_proj.weight", (hidden, inner)),
        lm_head=files.plain("lm_head.weight", (drafts, hidden)),
        draft_tokens=files.draft_tokens(drafts, model.vocab_size),
        layers=layers,
        norm_before_residual=config.get("norm_before_residual") is True,
    )
    return shape, weights


def _of_llama(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of a Llama of which the head's layer is one."""
    return {**config, "model_type": "llama", "architectures": ["LlamaForCausalLM"]}


def _tapped(path: Path, config: Mapping[str, Any], layers: int) -> tuple[int, ...]:
    """Return the tapped layers: the config's, else those of the authors, early, middle and late."""
    inner = config.get("eagle_config")
    named = config.get("eagle_aux_hidden_state_layer_ids") or (
        inner.get("eagle_aux_hidden_state_layer_ids") if isinstance(inner, dict) else None
    )
    found = tuple(named) if isinstance(named, list) else (2, layers // 2, layers - 3)
    if not found or not all(isinstance(layer, int) and 0 <= layer < layers for layer in found):
        raise BadHeads(f"{path}: it reads layers {found}, the model has {layers}")
    return found


class _Files:
    """The tensors of a folder's safetensors files."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._path = path
        self._dtype = dtype
        self._tensors: dict[str, torch.Tensor] = {}
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise BadHeads(f"{path} has no safetensors files: other forms are pickles, which are never read")
        for file in files:
            try:
                with safe_open(file, framework="pt") as opened:
                    self._tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            except (SafetensorError, OSError) as error:
                raise BadHeads(f"{file} is broken or incomplete, no safetensors file") from error

    def find(self, prefixes: Sequence[str], name: str) -> str | None:
        """Return the full name of a tensor, if there is one."""
        return next((prefix + name for prefix in prefixes if prefix + name in self._tensors), None)

    def plain(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        return self._named(_PLAIN, name, size)

    def layer(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        return self._named(_LAYER, name, size)

    def projection(self, name: str, size: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return matrix and bias of the queries (`q`), keys or values."""
        bias = self.find(_LAYER, f"self_attn.{name}_proj.bias")
        matrix = self.layer(f"self_attn.{name}_proj.weight", size)
        return matrix, None if bias is None else self.sized(bias, size[:1])

    def draft_tokens(self, drafts: int, vocab: int) -> torch.Tensor:
        """Return the model's number of each drafted token; without `d2t` they are the same."""
        found = self.find(_PLAIN, "d2t")
        numbers = torch.arange(drafts)
        if found is not None:
            steps = self._tensors[found]
            if steps.shape != numbers.shape:
                raise BadHeads(f"{self._path}: d2t has {len(steps)} numbers for {drafts} tokens")
            numbers = numbers + steps.long()
        if int(numbers.min()) < 0 or int(numbers.max()) >= vocab:
            raise BadHeads(f"{self._path}: it drafts tokens that the model's vocabulary of {vocab} lacks")
        return numbers

    def sized(self, name: str, size: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor that is there. Raises BadHeads for another size."""
        tensor = self._tensors[name]
        if tuple(tensor.shape) != size:
            said, wanted = (" x ".join(map(str, one)) for one in (tensor.shape, size))
            raise BadHeads(
                f"{self._path}: {name} is of {said}, for this model it would be {wanted}: this is "
                "the head of another model"
            )
        if not tensor.isfinite().all():
            raise BadHeads(f"{self._path}: {name} has numbers that are not finite")
        return tensor.to(self._dtype).contiguous()

    def _named(self, prefixes: Sequence[str], name: str, size: tuple[int, ...]) -> torch.Tensor:
        found = self.find(prefixes, name)
        if found is None:
            raise BadHeads(f"{self._path} lacks {name}")
        return self.sized(found, size)
