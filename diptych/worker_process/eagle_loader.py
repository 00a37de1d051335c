"""Loading of heads over the model's features (--speculative-model), and the checks that they fit."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from diptych.engine.backends.torch.fused_layer import dense
from diptych.engine.dtype import Precision, plain_precision, stored_dtype
from diptych.engine.heads.eagle3 import Eagle3Head
from diptych.engine.heads.eagle3_files import is_eagle3, read_eagle3
from diptych.engine.heads.eagle_files import is_eagle, read_eagle
from diptych.engine.heads.feature_head import FeatureHead
from diptych.engine.heads.head_files import BadHeads, files_digest
from diptych.engine.heads.layer_head import LayerHead
from diptych.engine.heads.mtp_files import BY_NAME, check_mtp, count_layers, read_mtp
from diptych.engine.models.shape import BadModelFile, ModelShape, UnsupportedModel
from diptych.engine.runner import Runner
from diptych.engine.weights.checkpoint import open_checkpoint
from diptych.runtime.settings import resolve_model
from diptych.worker_process.medusa_loader import UnfitHeads


@dataclass(frozen=True, slots=True)
class EagleFiles:
    """Files of a head."""

    kind: Literal["EAGLE-3", "EAGLE", "MTP"]
    path: Path
    """Folder of the head; of a layer for multi-token prediction, the model's."""
    model: Path

    @property
    def digest(self) -> str:
        """Sha256 hex of what the head is; the model's own files have a digest of theirs."""
        if self.kind == "MTP":
            return hashlib.sha256(b"diptych.mtp.1").hexdigest()
        return files_digest(self.path, {"EAGLE-3": "eagle3", "EAGLE": "eagle"}[self.kind])


@dataclass(frozen=True, slots=True)
class LoadedEagle:
    """A head, ready to compute."""

    head: FeatureHead
    digest: str


def eagle_files(named: str, model: Path) -> EagleFiles | None:
    """Return the head that `--speculative-model named` is for the model at a path; None if it is none.

    Raises UnfitHeads for a model without the layers that are named, NoModel for no file at all.
    """
    if named == BY_NAME:
        try:
            count_layers(model)
        except BadHeads as error:
            raise UnfitHeads(f"--speculative-model {named}: {error}") from error
        return EagleFiles("MTP", model, model)
    path = resolve_model(named)
    if is_eagle3(path):
        return EagleFiles("EAGLE-3", path, model)
    return EagleFiles("EAGLE", path, model) if is_eagle(path) else None


def check_eagle(files: EagleFiles, shape: ModelShape) -> str:
    """Return in words what the head of a model of `shape` takes. Raises UnfitHeads where it is not its."""
    if files.kind == "MTP":  # it may have gigabytes of experts
        try:
            return check_mtp(files.model, shape)
        except BadHeads as error:
            raise UnfitHeads(f"--speculative-model {BY_NAME}: {error}") from error
    embed = torch.zeros((1, shape.hidden_size), dtype=torch.bfloat16).expand(shape.vocab_size, -1)
    head = _read(files, shape, embed, lambda: embed, torch.bfloat16)
    if isinstance(head, Eagle3Head):
        return f"an EAGLE-3 head of {head.draft_vocab_size} tokens, over layers {head.layers}"
    return "an EAGLE head with the model's output matrix"


def load_eagle(files: EagleFiles, runner: Runner, precision: Precision) -> LoadedEagle:
    """Read the head of `runner`'s model, whose steps give its features from now on. Raises UnfitHeads."""
    shape, dtype = runner.model.shape, stored_dtype(precision)
    if not runner.has_features:
        raise UnfitHeads(
            f"--speculative-model {_named(files)}: EAGLE heads are not computed with the "
            f"{runner.model.backend_name} step"
        )
    embedding = runner.embedding
    if embedding is None:
        embedding = _embedding(files, dtype)
    head = _read(files, shape, embedding, lambda: _output_matrix(files.model, shape, embedding, dtype), dtype)
    if (why := runner.give_features(head.layers)) is not None:
        raise UnfitHeads(f"--speculative-model {_named(files)}: {why}")
    return LoadedEagle(head, files.digest)


def _read(
    files: EagleFiles,
    shape: ModelShape,
    embed: torch.Tensor,
    output_matrix: Callable[[], torch.Tensor],
    dtype: torch.dtype,
) -> Eagle3Head | LayerHead:
    try:
        match files.kind:
            case "EAGLE-3":
                of_head, weights = read_eagle3(files.path, shape, embed, dtype)
                return Eagle3Head(of_head, weights, shape.vocab_size)
            case "EAGLE":
                return read_eagle(files.path, shape, embed, output_matrix, dtype)
            case "MTP":
                return read_mtp(files.model, shape, embed, dtype)
    except BadHeads as error:
        raise UnfitHeads(f"--speculative-model {_named(files)}: {error}") from error


def _embedding(files: EagleFiles, dtype: torch.dtype) -> torch.Tensor:
    """Return the model's embedding `[vocab, hidden]` in full numbers: its backend has a share of it. Raises
    UnfitHeads.
    """
    try:
        return dense(open_checkpoint(files.model, plain_precision(dtype)).read("embed"))
    except (UnsupportedModel, BadModelFile) as error:
        raise UnfitHeads(f"--speculative-model {_named(files)}: the model's embedding: {error}") from error


def _output_matrix(
    model: Path, shape: ModelShape, embedding: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the model's output matrix `[vocab, hidden]` in full numbers: its backend has it packed."""
    if shape.tied_embeddings:
        return embedding
    try:
        head = open_checkpoint(model, plain_precision(dtype)).read("head")
    except (UnsupportedModel, BadModelFile) as error:
        raise BadHeads(f"the model's output matrix: {error}") from error
    return dense(head)


def _named(files: EagleFiles) -> str:
    return BY_NAME if files.kind == "MTP" else str(files.path)
