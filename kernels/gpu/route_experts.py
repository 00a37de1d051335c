"""Routing on the GPU: the router's product, the choice of experts, and the order of rows by expert.

The meaning is kernels/route_experts.py. All launches depend on sizes alone, never on what was chosen: a
captured graph serves every step. A row's scores are summed in one order whatever stands beside it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from kernels.gpu.launch import check_dense, power_of_two

_ROUTINGS = {"softmax_then_topk": 0, "topk_then_softmax": 1, "sigmoid": 2}
_TOPK_THEN_SOFTMAX, _SIGMOID = tl.constexpr(1), tl.constexpr(2)
_ROWS, _EXPERTS, _DEPTH = 16, 16, 128
_CHUNK = 1024


@dataclass(frozen=True)
class RoutedRows:
    """The experts of T rows, K each: pair `t * K + k` is row t at its k-th expert."""

    experts: torch.Tensor
    """int32 `[T, K]`, ascending in each row."""
    weights: torch.Tensor
    """float32 `[T, K]`."""
    order: torch.Tensor
    """int32 `[T * K]`: the pairs, sorted by expert, those of an expert by row."""
    firsts: torch.Tensor
    """int32 `[E + 1]`: where in `order` each expert's pairs begin, and the end."""
    logits: torch.Tensor
    """float32 `[T, E]`: the router's."""
    held: range | None = None
    """Experts whose matrices are there: `firsts` has theirs alone, and others add nothing; None: all."""

    @classmethod
    def make(cls, tokens: int, experts: int, per_token: int, device: torch.device) -> RoutedRows:
        """Allocate room for up to `tokens` rows."""

        def empty(*sizes: int, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(sizes, dtype=kind, device=device)

        return cls(
            experts=empty(tokens, per_token),
            weights=empty(tokens, per_token, kind=torch.float32),
            order=empty(tokens * per_token),
            firsts=empty(experts + 1),
            logits=empty(tokens, experts, kind=torch.float32),
        )

    def rows(self, tokens: int) -> RoutedRows:
        """Return the room of `tokens` rows, as views."""
        pairs = tokens * self.experts.shape[1]
        return RoutedRows(
            self.experts[:tokens],
            self.weights[:tokens],
            self.order[:pairs],
            self.firsts,
            self.logits[:tokens],
        )

    def among(self, held: range) -> RoutedRows:
        """Return the same choices for products with the matrices of the experts `held` alone."""
        return replace(self, firsts=self.firsts[held.start : held.stop + 1], held=held)


@triton.jit(do_not_specialize=["tokens"])
def _logits(
    x, router, bias, out, tokens, experts, K: tl.constexpr, BIASED: tl.constexpr, ROWS: tl.constexpr,
    EXPERTS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Compute the logits of ROWS rows for EXPERTS experts, DEPTH of the sum at a time.

    `x [tokens, K]`, `router` float32 `[experts, K]`, `bias` float32 `[experts]`, `out` float32 `[tokens,
    experts]`; grid `[ceil(tokens / ROWS), ceil(experts / EXPERTS)]`.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    expert = tl.program_id(1) * EXPERTS + tl.arange(0, EXPERTS)
    k = tl.arange(0, DEPTH)
    real, known = row < tokens, expert < experts
    acc = tl.zeros([ROWS, EXPERTS], tl.float32)
    for start in range(0, K, DEPTH):
        inside = k < K - start
        x_place = x + row[:, None].to(tl.int64) * K + start + k[None, :]
        wide = tl.load(x_place, mask=real[:, None] & inside[None, :], other=0.0).to(tl.float32)
        w_place = router + expert[None, :] * K + start + k[:, None]
        weight = tl.load(w_place, mask=known[None, :] & inside[:, None], other=0.0)
        acc = tl.dot(wide, weight, acc, input_precision="ieee")
    if BIASED:
        acc += tl.load(bias + expert, mask=known, other=0.0)[None, :]
    place = out + row[:, None].to(tl.int64) * experts + expert[None, :]
    tl.store(place, acc, mask=real[:, None] & known[None, :])


@triton.jit
def _best_groups(
    chances, at, E: tl.constexpr, GROUPS: tl.constexpr, PICKED: tl.constexpr, BEST: tl.constexpr
):
    """Return which experts `at [E_PAD]` lie in the PICKED best of GROUPS groups.

    `chances [E_PAD]` are scores, -inf beyond the last; BEST is how many of a group's are summed, 1 or 2.
    """
    SIZE: tl.constexpr = E // GROUPS
    group_of = at // SIZE
    allowed = at < 0
    scores = tl.full(chances.shape, float("-inf"), tl.float32)
    for group in range(GROUPS):
        own = tl.where((group_of == group) & (at < E), chances, float("-inf"))
        score = tl.max(own, axis=0)
        if BEST == 2:
            first = tl.argmax(own, axis=0)
            score += tl.max(tl.where(at == first, float("-inf"), own), axis=0)
        # A group without a number is still better than one that is picked already.
        score = tl.where(score >= -3.0e38, score, -3.0e38)
        scores = tl.where(at == group, score, scores)
    for _ in range(PICKED):
        best = tl.argmax(scores, axis=0)
        allowed = allowed | (group_of == best)
        scores = tl.where(at == best, float("-inf"), scores)
    return allowed


@triton.jit
def _pick(
    logits, correction, experts_out, weights_out, scale,
    E: tl.constexpr, E_PAD: tl.constexpr, COUNT: tl.constexpr, ROUTING: tl.constexpr,
    NORMALISE: tl.constexpr, CORRECTED: tl.constexpr, GROUPS: tl.constexpr, PICKED: tl.constexpr,
    BEST: tl.constexpr,
):  # fmt: skip
    """Pick the COUNT experts of one row of `logits [rows, E]`, and weigh them.

    `correction` float32 `[E]`; `experts_out` int32 and `weights_out` float32 `[rows, COUNT]`; grid `[rows]`.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, E_PAD)
    known = at < E
    score = tl.load(logits + row * E + at, mask=known, other=float("-inf"))
    if ROUTING == _SIGMOID:
        score = 1.0 / (1.0 + tl.exp(-score))
    elif ROUTING != _TOPK_THEN_SOFTMAX:
        score = tl.exp(score - tl.max(score, axis=0))
        score = score / tl.sum(score, axis=0)
    chance = score
    if CORRECTED:
        chance += tl.load(correction + at, mask=known, other=0.0)
    chance = tl.where(known, chance, float("-inf"))
    if GROUPS > 1:
        allowed = _best_groups(chance, at, E, GROUPS, PICKED, BEST)
        chance = tl.where(allowed, chance, float("-inf"))
    # What is no number, or of a closed group, is picked last, but before what was picked: all differ.
    chance = tl.where(chance >= -3.0e38, chance, -3.0e38)
    chance = tl.where(known, chance, float("-inf"))
    picked = at < 0
    for _ in range(COUNT):
        best = tl.argmax(chance, axis=0)
        picked = picked | (at == best)
        chance = tl.where(at == best, float("-inf"), chance)
    if ROUTING == _TOPK_THEN_SOFTMAX:
        weight = tl.where(picked, score, float("-inf"))
        weight = tl.exp(weight - tl.max(weight, axis=0))
        weight = weight / tl.sum(tl.where(picked, weight, 0.0), axis=0)
    elif NORMALISE:
        total = tl.sum(tl.where(picked, score, 0.0), axis=0)
        weight = score / (total + (1e-20 if ROUTING == _SIGMOID else 0.0))
    else:
        weight = score
    place = row * COUNT + tl.cumsum(picked.to(tl.int32), axis=0) - 1
    tl.store(experts_out + place, at, mask=picked)
    tl.store(weights_out + place, weight * scale, mask=picked)


@triton.jit(do_not_specialize=["pairs"])
def _sort(experts, order, firsts, pairs, CHUNK: tl.constexpr):
    """Place the pairs of one expert in `order [pairs]`, and its beginning in `firsts`.

    `experts` int32 `[pairs]`; program e is expert e, and the last one, which has none, writes the end.
    """
    expert = tl.program_id(0)
    at = tl.arange(0, CHUNK)
    first = tl.zeros([], tl.int32)
    for start in range(0, pairs, CHUNK):
        inside = start + at < pairs
        found = tl.load(experts + start + at, mask=inside, other=0x7FFFFFFF)
        first += tl.sum((found < expert).to(tl.int32), axis=0)
    tl.store(firsts + expert, first)
    for start in range(0, pairs, CHUNK):
        inside = start + at < pairs
        own = tl.load(experts + start + at, mask=inside, other=0x7FFFFFFF) == expert
        place = first + tl.cumsum(own.to(tl.int32), axis=0) - 1
        tl.store(order + place, start + at, mask=own)
        first += tl.sum(own.to(tl.int32), axis=0)


def router_logits(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply `x [T, hidden]`, widened, with `router`, float32 `[E, hidden]`, and add `bias`.

    Returns float32 `[T, E]`. A row has the same bits whatever the number of rows.
    """
    (tokens, hidden), experts = check_dense("x", x).shape, len(router)
    if out is None:
        out = torch.empty((tokens, experts), device=x.device)
    if tokens:
        _logits[(triton.cdiv(tokens, _ROWS), triton.cdiv(experts, _EXPERTS))](
            x, check_dense("router", router), router if bias is None else bias, out, tokens, experts,
            K=hidden, BIASED=bias is not None, ROWS=_ROWS, EXPERTS=_EXPERTS, DEPTH=_DEPTH,
        )  # fmt: skip
    return out


def route_experts(
    x: torch.Tensor,
    router: torch.Tensor,
    bias: torch.Tensor | None = None,
    correction: torch.Tensor | None = None,
    *,
    count: int,
    routing: str = "softmax_then_topk",
    normalise: bool = False,
    scale: float = 1.0,
    groups: int = 1,
    groups_per_token: int = 1,
    group_score: str = "best",
    out: RoutedRows | None = None,
) -> RoutedRows:
    """Choose the experts of `x [T, hidden]`, and sort its rows by them.

    `router` is float32 `[E, hidden]`, `bias` float32 `[E]`, added to logits; the rest as in
    kernels/route_experts.py.
    """
    tokens, experts = len(x), len(router)
    out = RoutedRows.make(tokens, experts, count, x.device) if out is None else out
    if tokens == 0:
        out.firsts.zero_()
        return out
    router_logits(x, router, bias, out=out.logits)
    choice: dict[str, Any] = {"NORMALISE": normalise, "GROUPS": groups, "PICKED": groups_per_token}
    _pick[(tokens,)](
        out.logits, out.logits if correction is None else correction, out.experts, out.weights, scale,
        E=experts, E_PAD=power_of_two(experts), COUNT=count, ROUTING=_ROUTINGS[routing],
        CORRECTED=correction is not None, BEST=1 if group_score == "best" else 2, **choice,
    )  # fmt: skip
    _sort[(experts + 1,)](out.experts, out.order, out.firsts, tokens * count, CHUNK=_CHUNK)
    return out


def order_rows(experts: torch.Tensor, count: int) -> RoutedRows:
    """Sort rows that were routed elsewhere by their experts, int32 `[T, K]`, of `count`; -1 is none.

    The choices are for products alone: they have no weights, and no logits.
    """
    made = RoutedRows(
        check_dense("experts", experts),
        weights=torch.empty(0, device=experts.device),
        order=torch.empty(experts.numel(), dtype=torch.int32, device=experts.device),
        firsts=torch.empty(count + 1, dtype=torch.int32, device=experts.device),
        logits=torch.empty(0, device=experts.device),
    )
    _sort[(count + 1,)](made.experts, made.order, made.firsts, experts.numel(), CHUNK=_CHUNK)
    return made
