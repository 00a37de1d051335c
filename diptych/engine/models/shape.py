"""The shape of a model: sizes and switches that one decoder definition needs for every supported family.

Sources: `config.json` of a Hugging Face folder, or the metadata of a GGUF file (see diptych/engine/weights/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class UnsupportedModel(ValueError):
    """The model's files ask for something that this engine does not compute. The message names it."""


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the length that the model was trained on.

    `linear` divides all frequencies by `factor` (Chen et al. 2023); `llama3` keeps high frequencies, divides
    low ones and blends between (Llama 3.1 report); `yarn` blends by the number of rotations within the
    trained length and scales the attention (Peng et al. 2023).
    """

    kind: Literal["linear", "llama3", "yarn", "factors"]
    factor: float = 1.0
    original_context: int = 0
    """Tokens of context at training (llama3, yarn)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Multiplies cos and sin (yarn); None means 0.1 ln(factor) + 1."""
    factors: tuple[float, ...] = ()
    """A divisor for each pair of lanes (how GGUF files carry llama3 scaling)."""
    truncate: bool = True
    """True if yarn rounds the borders of its blend to whole dimensions."""

    def stretched_context(self, declared: int) -> int:
        """Return the tokens that a model reads whose files declare `declared`: with yarn, which many files
        leave out of that number, at least `factor` times the trained length.
        """
        return max(declared, int(self.original_context * self.factor)) if self.kind == "yarn" else declared


@dataclass(frozen=True)
class ExpertsShape:
    """Sizes and switches of a layer's experts; diptych/engine/backends/torch/experts.py is their meaning."""

    count: int
    """Experts of a layer."""
    per_token: int
    """Experts of a row."""
    intermediate_size: int
    """Width of one expert."""
    scoring: Literal["softmax", "sigmoid", "softmax_of_chosen"] = "softmax"
    """How scores come from the router's logits (kernels/route_experts.py)."""
    normalised: bool = False
    """True if the scores of the chosen experts are divided by their sum."""
    scale: float = 1.0
    """Factor of the weights."""
    groups: int = 1
    """Groups of consecutive experts, all of one size."""
    chosen_groups: int = 1
    """Groups whose experts a row may choose."""
    group_score: Literal["largest", "two_largest"] = "largest"
    router_bias: bool = False
    """A bias on the router's logits (gpt-oss)."""
    correction_bias: bool = False
    """A bias on the scores, for the choice alone (DeepSeek-V3)."""
    biases: bool = False
    """Biases of each expert's three matrices (gpt-oss)."""
    gate: Literal["swiglu", "clamped_swiglu"] = "swiglu"
    clamp: float = 7.0
    """Limit of gate and up (clamped_swiglu)."""
    alpha: float = 1.702
    """Slope of the gate's sigmoid (clamped_swiglu)."""
    shared_size: int = 0
    """Width of the expert that computes every row; 0 is none."""
    shared_switch: bool = False
    """The shared expert's output is multiplied by the sigmoid of a product of the row (Qwen2-MoE)."""

    def __post_init__(self) -> None:
        for field in ("count", "per_token", "intermediate_size", "groups", "chosen_groups"):
            if getattr(self, field) < 1:
                raise UnsupportedModel(f"experts: {field} is below 1")
        if self.count % self.groups or self.chosen_groups > self.groups:
            raise UnsupportedModel(
                f"{self.count} experts: {self.chosen_groups} of {self.groups} groups cannot be chosen"
            )
        size = self.count // self.groups
        if self.groups > 1 and self.group_score == "two_largest" and size < 2:
            raise UnsupportedModel(f"{self.count} experts in {self.groups} groups: each needs two")
        if self.per_token > size * self.chosen_groups:
            raise UnsupportedModel(f"{self.per_token} experts a token of {size * self.chosen_groups}")


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one decoder-only transformer."""

    family: str
    """llama, mistral, ministral, qwen2 or qwen3: only a name, no code asks for it."""
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_eps: float
    rope_theta: float
    max_context: int
    """Positions that the model is served with, in tokens: those that it was made for, or fewer."""
    rope_scaling: RopeScaling | None = None
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias on the attention's output projection (Llama with attention_bias)."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """RMS norm over each head of queries and keys before the rotation (Qwen3)."""
    windows: tuple[int | None, ...] = ()
    """Per layer: how many last tokens, itself included, a token attends to; None is all. Empty is all,
    everywhere.
    """

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for field in (*sizes, "intermediate_size", "max_context"):
            if getattr(self, field) < 1:
                raise UnsupportedModel(f"{field} is below 1")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")
        if self.windows and len(self.windows) != self.num_layers:
            raise UnsupportedModel(f"{len(self.windows)} attention windows for {self.num_layers} layers")
        if any(window is not None and window < 1 for window in self.windows):
            raise UnsupportedModel("an attention window is below 1")

    def window(self, layer: int) -> int | None:
        """Return the attention window of `layer` in tokens, None for all (also if no context outgrows it)."""
        window = self.windows[layer] if self.windows else None
        return None if window is None or window >= self.max_context else window
