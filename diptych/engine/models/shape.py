"""The shape of a model: sizes and switches that one decoder definition needs for every supported family.

Sources: `config.json` of a Hugging Face folder, or the metadata of a GGUF file; the reader of a family
(diptych/engine/models/<family>.py) makes the shape. What differs between layers stands in a `LayerShape`
each, all else in the `ModelShape`. No code asks for a family's name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diptych.engine.models.recurrent import RecurrentShape


class UnsupportedModel(ValueError):
    """The model's files ask for something that this engine does not compute. The message names it."""


class BadModelFile(ValueError):
    """A file that is damaged, incomplete or not what it says it is."""


_MAX_LAYERS = 4096


def check_layer_count(layers: int) -> None:
    """Raise UnsupportedModel for more layers than any model has: a damaged file would fill the memory."""
    if layers > _MAX_LAYERS:
        raise UnsupportedModel(f"{layers} layers: at most {_MAX_LAYERS} are computed")


Activation = Literal["silu", "gelu", "gelu_tanh", "relu2", "clamped_swiglu"]
"""Function of the feed-forward's gate, or of its only matrix: `x sigmoid(x)`, the exact GELU, its tanh form,
`max(x, 0)²`; `clamped_swiglu` is gpt-oss': `min(gate, c) sigmoid(1.702 gate) (clamp(up, -c, c) + 1)`.
"""
NormPlacement = Literal["before", "after", "around"]
"""Places of a sublayer f's norms: `x + f(norm(x))`, `x + norm(f(x))` or `x + norm(f(norm(x)))`."""
QKNorm = Literal["none", "head", "width"]
"""RMS norm of queries and keys: over each head, or over all heads' lanes together."""
Routing = Literal["softmax_then_topk", "topk_then_softmax", "sigmoid"]


@dataclass(frozen=True)
class RopeScaling:
    """Scaling of rotary frequencies beyond the length that the model was trained on.

    `linear` divides all frequencies by `factor` (Chen et al. 2023); `llama3` keeps high frequencies, divides
    low ones and blends between (Llama 3.1 report); `yarn` blends by the number of rotations within the
    trained length and scales the attention (Peng et al. 2023); `longrope` divides each frequency by a factor
    of its own, of one list for contexts up to the trained length and of another beyond (Ding et al. 2024).
    """

    kind: Literal["linear", "llama3", "yarn", "factors", "longrope"]
    factor: float = 1.0
    original_context: int = 0
    """Tokens of context at training (llama3, yarn, longrope)."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    """Multiplies cos and sin (yarn, longrope); None means 0.1 ln(factor) + 1 for yarn, 1 for longrope."""
    factors: tuple[float, ...] = ()
    """A divisor for each pair of lanes (how GGUF files carry llama3 scaling; longrope's short contexts)."""
    long_factors: tuple[float, ...] = ()
    """Divisors where the model is served with more context than the trained one (longrope)."""
    truncate: bool = True
    """True if yarn rounds the borders of its blend to whole dimensions."""

    def stretched_context(self, declared: int) -> int:
        """Return the tokens that a model reads whose files declare `declared`: with yarn, which many files
        leave out of that number, at least `factor` times the trained length.
        """
        return max(declared, int(self.original_context * self.factor)) if self.kind == "yarn" else declared


@dataclass(frozen=True)
class Rotation:
    """Table of rotary angles (Su et al. 2021); layers choose theirs by number.

    Lane i of a head is paired with lane i + head_dim / 2. A file that pairs neighbours, or rotates `width`
    lanes only, has its rows of q and k reordered by its reader (`lane_order` in rope.py), so that pairs from
    `width / 2` on are those that are not rotated: their angle is 0.
    """

    theta: float
    width: int
    """Lanes of a head that are rotated, even, at most head_dim."""
    scaling: RopeScaling | None = None
    axes: tuple[int, ...] = ()
    """Axes (0 time, 1 height, 2 width) of the position that turns each pair of lanes, `width / 2` of them;
    empty: tokens have one position.
    """


@dataclass(frozen=True)
class LayerShape:
    """Record of what differs between layers."""

    window: int | None = None
    """Number of last tokens, itself included, that a token attends to; None is all. `ModelShape.window`
    knows the context, too.
    """
    rotation: int | None = 0
    """Index into `ModelShape.rotations`; None: queries and keys are not rotated."""
    experts: bool = False
    """The feed-forward is `ModelShape.experts`, not the dense one."""
    attention: bool = True
    """The layer attends; else it keeps no keys and values."""
    recurrent: RecurrentShape | None = None
    """Recurrence in place of attention, or, where the layer has both, beside it: both read the same input and
    are added.
    """
    feed_forward: bool = True
    """The layer has a feed-forward."""

    @property
    def mixes(self) -> bool:
        """True if the layer's tokens read others: it attends, or is recurrent."""
        return self.attention or self.recurrent is not None


@dataclass(frozen=True)
class ExpertsShape:
    """A feed-forward of experts, of which a router picks some for each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    """Width of each expert."""
    routing: Routing = "softmax_then_topk"
    """Weights of the picked: the softmax over all experts, over the picked alone, or a sigmoid each."""
    normalise: bool = False
    """Divide the picked experts' weights by their sum."""
    scale: float = 1.0
    """Multiplies the weights, after they were normalised."""
    correction_bias: bool = False
    """A number for each expert is added for picking, and not for weighing (DeepSeek-V3)."""
    groups: int = 1
    """Groups of experts in a row, of which the best `groups_per_token` are picked from."""
    groups_per_token: int = 1
    group_score: Literal["best", "best_two"] = "best"
    """Score of a group: its best expert's (DeepSeek-V2) or the sum of its two best (V3)."""
    shared_size: int = 0
    """Width of the expert that every token passes, beside the picked; 0: there is none."""
    shared_gate: bool = False
    """The shared expert's output is multiplied by a sigmoid of a product with the input (Qwen2-MoE)."""
    router_bias: bool = False
    bias: bool = False
    """Biases of the experts' matrices."""
    gated: bool = True
    """Experts, the shared one too, are `down(act(gate x) * up x)`, else `down(act(up x))`, without a gate."""
    clamp: float | None = None
    """Bound c of the activation `clamped_swiglu`."""
    held: range | None = None
    """Experts whose matrices are here, where a model is dealt to parts; None: all are."""

    @property
    def own(self) -> range:
        """Numbers of the experts whose matrices are here."""
        return range(self.num_experts) if self.held is None else self.held

    def __post_init__(self) -> None:
        for field in ("num_experts", "experts_per_token", "intermediate_size", "groups", "groups_per_token"):
            if getattr(self, field) < 1:
                raise UnsupportedModel(f"experts: {field} is below 1")
        if self.num_experts % self.groups or self.groups_per_token > self.groups:
            raise UnsupportedModel(
                f"{self.groups_per_token} of {self.groups} groups of {self.num_experts} experts"
            )
        size = self.num_experts // self.groups
        if self.groups > 1 and self.group_score == "best_two" and size < 2:
            raise UnsupportedModel(f"{self.num_experts} experts in {self.groups} groups: each needs two")
        if self.experts_per_token > size * self.groups_per_token:
            raise UnsupportedModel(
                f"{self.experts_per_token} experts a token of {size * self.groups_per_token}"
            )


@dataclass(frozen=True)
class LatentShape:
    """Attention over latents: a token keeps one vector for all heads (DeepSeek-V2 report, 2024).

    Of a head's query `plain + head_dim` lanes meet a key; the last `head_dim`, and the same lanes of every
    key, are rotated. `ModelShape.num_kv_heads` is 1.
    """

    rank: int
    """Numbers of a latent that keys and values are made from."""
    plain: int
    """Lanes of a head that are not rotated."""
    value: int
    """Width of a head's values."""
    query_rank: int | None = None
    """Width of the queries' own latent; None: they come from the residual."""

    def __post_init__(self) -> None:
        for field in ("rank", "plain", "value"):
            if getattr(self, field) < 1:
                raise UnsupportedModel(f"latents: {field} is below 1")
        if self.query_rank is not None and self.query_rank < 1:
            raise UnsupportedModel("latents: query_rank is below 1")


LATENT_EPS = 1e-6
"""Epsilon of the norms of latents, whatever the model's."""


@dataclass(frozen=True)
class QueryGrowth:
    """Factor of queries at position p: `1 + beta ln(1 + floor(p / length))` (Llama 4, Ministral 3)."""

    beta: float
    length: int
    """Tokens up to which the factor is 1."""


@dataclass(frozen=True)
class ModelShape:
    """Sizes and switches of one decoder-only transformer. The defaults are Llama's."""

    family: str
    """Name of the family: only for people, no code asks for it."""
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    """Width of dense feed-forwards."""
    rms_eps: float
    """Epsilon of all norms, whatever their kind."""
    max_context: int
    """Positions that the model is served with, in tokens: those that it was made for, or fewer."""
    layers: tuple[LayerShape, ...]
    rotations: tuple[Rotation, ...]
    tied_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    """A bias on the attention's output projection (Llama with attention_bias)."""
    mlp_bias: bool = False
    qk_norm: QKNorm = "none"
    qk_norm_after_rotation: bool = False
    """The norm of queries and keys follows the rotation (Hunyuan); else it precedes it."""
    attention_scale: float | None = None
    """Factor of scores; None is `head_dim ** -0.5` (see `score_scale`)."""
    score_cap: float | None = None
    """Scores s become `cap tanh(s / cap)` after their scale, before the mask (Gemma 2)."""
    query_growth: QueryGrowth | None = None
    attention_gate: bool = False
    """A gate of what attention mixes: a sigmoid of a product with its input, for each lane."""
    sinks: bool = False
    """A logit for each head beside the scores, which takes its share of the softmax and no value."""
    activation: Activation = "silu"
    gated: bool = True
    """The feed-forward is `down(act(gate x) * up x)`, else `down(act(up x))`, without a gate."""
    norm: Literal["rms", "layer"] = "rms"
    """Root mean square, or LayerNorm (Ba et al. 2016), of the residual's norms. Norms of heads are RMS."""
    norm_bias: bool = False
    """Norms add a bias (layer only)."""
    norms: NormPlacement = "before"
    parallel_residual: bool = False
    """Attention and feed-forward read the same input: `x + attn(norm(x)) + ffn(norm(x))`. One norm serves
    both.
    """
    embedding_scale: float = 1.0
    """Multiplies embeddings, in the residual's dtype and not in the output matrix."""
    residual_scale: float = 1.0
    """Multiplies what attention and feed-forward add to the residual (Granite)."""
    logit_scale: float = 1.0
    """Multiplies logits, before their cap."""
    logit_cap: float | None = None
    """Logits l become `cap tanh(l / cap)`."""
    factors: tuple[tuple[str, tuple[float, ...]], ...] = ()
    """Factors that the reader multiplies into a layer's tensors, by their names below its own: one, or one
    for each stretch of rows (Falcon-H1). The tensors have them already.
    """
    experts: ExpertsShape | None = None
    latent: LatentShape | None = None
    """Attention is over latents, in every layer."""
    deep_images: bool = False
    """The residual takes rows of images after early layers, too (`EmbeddingRows.rows`)."""

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
        for field in (*sizes, "intermediate_size", "max_context"):
            if getattr(self, field) < 1:
                raise UnsupportedModel(f"{field} is below 1")
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(f"{self.num_heads} heads cannot share {self.num_kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim {self.head_dim} is odd: rotary embedding needs pairs")
        for rotation in self.rotations:
            if rotation.width % 2 or not 0 < rotation.width <= self.head_dim:
                raise UnsupportedModel(f"{rotation.width} rotated lanes of a head of {self.head_dim}")
            if rotation.axes and len(rotation.axes) != rotation.width // 2:
                raise UnsupportedModel(
                    f"axes of {len(rotation.axes)} of {rotation.width // 2} pairs of lanes"
                )
        for layer in self.layers:
            if layer.window is not None and layer.window < 1:
                raise UnsupportedModel("an attention window is below 1")
            if layer.rotation is not None and not 0 <= layer.rotation < len(self.rotations):
                raise UnsupportedModel(f"a layer has rotation {layer.rotation} of {len(self.rotations)}")
            if layer.experts and self.experts is None:
                raise UnsupportedModel("a layer has experts, the model has none")
            if not layer.mixes and not layer.feed_forward:
                raise UnsupportedModel("a layer has neither attention nor a recurrence nor a feed-forward")
        if not any(layer.attention for layer in self.layers):
            raise UnsupportedModel(
                "no layer attends: cached prefixes are chains of blocks with keys and values"
            )

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep keys and values."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.attention)

    @property
    def recurrent_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that keep a state."""
        return tuple(number for number, layer in enumerate(self.layers) if layer.recurrent is not None)

    @property
    def kept_numbers(self) -> int:
        """Numbers that one token keeps in a layer: keys and values of all KV heads, or a latent."""
        if self.latent is not None:
            return self.latent.rank + self.head_dim
        return 2 * self.num_kv_heads * self.head_dim

    @property
    def score_scale(self) -> float:
        """Factor of attention's scores."""
        return self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale

    @property
    def served_factors(self) -> str:
        """Name of the rotary factors that the served context chooses (longrope): keys of other factors are
        other keys. Empty where contexts of every length share them.
        """
        scalings = [rotation.scaling for rotation in self.rotations]
        chosen = [one for one in scalings if one is not None and one.kind == "longrope"]
        if not chosen:
            return ""
        return "longrope-" + ("long" if self.max_context > chosen[0].original_context else "short")

    @property
    def grows_queries(self) -> bool:
        """True if `query_growth` changes any query within the context."""
        return self.query_growth is not None and self.max_context > self.query_growth.length

    def window(self, layer: int) -> int | None:
        """Return the attention window of `layer` in tokens, None for all (also if no context outgrows it)."""
        window = self.layers[layer].window
        return None if window is None or window >= self.max_context else window

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Attention window of each layer in tokens, None for all."""
        return tuple(self.window(layer) for layer in range(self.num_layers))
