"""Loading of the EAGLE-3 head that --speculative-model names, and the checks that it fits the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from diptych.engine.dtype import Precision, stored_dtype
from diptych.engine.heads.eagle3 import Eagle3Head
from diptych.engine.heads.eagle3_files import files_digest, read_eagle3
from diptych.engine.heads.head_files import BadHeads
from diptych.engine.models.shape import ModelShape
from diptych.engine.runner import Runner
from diptych.worker_process.medusa_loader import UnfitHeads


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """A head, ready to compute."""

    head: Eagle3Head
    digest: str


def check_eagle(path: Path, shape: ModelShape) -> str:
    """Return in words what the head of a model of `shape` takes. Raises UnfitHeads where it is not its."""
    try:
        _, weights = read_eagle3(path, shape, torch.empty((0, shape.hidden_size)), torch.bfloat16)
    except BadHeads as error:
        raise UnfitHeads(f"--speculative-model {path}: {error}") from error
    return f"an EAGLE-3 head of {len(weights.draft_tokens)} tokens, over layers {weights.layers}"


def load_eagle(path: Path, runner: Runner, precision: Precision) -> LoadedEagle:
    """Read the head of `runner`'s model, whose steps give its features from now on. Raises UnfitHeads."""
    flag, shape, embedding = f"--speculative-model {path}", runner.model.shape, runner.embedding
    if embedding is None:
        raise UnfitHeads(f"{flag}: EAGLE heads are not computed with the {runner.model.backend_name} step")
    try:
        of_head, weights = read_eagle3(path, shape, embedding, stored_dtype(precision))
    except BadHeads as error:
        raise UnfitHeads(f"{flag}: {error}") from error
    if (why := runner.give_features(weights.layers)) is not None:
        raise UnfitHeads(f"{flag}: {why}")
    return LoadedEagle(Eagle3Head(of_head, weights, shape.vocab_size), files_digest(path))
