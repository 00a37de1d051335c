"""Loading of the draft model that is given by --speculative-model, and the checks that it fits the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from diptych.engine.loaded_model import Model
from diptych.engine.runner import Runner
from diptych.engine.weights.checkpoint import shape_of
from diptych.runtime.settings import StartupError
from diptych.runtime.tokenizer.tokenizer import Tokenizer, UnusableTokenizer


class UnfitDraftModel(StartupError):
    """A draft model whose tokens are not the model's."""


@dataclass(frozen=True, slots=True)
class LoadedDraft:
    """A draft model, ready to compute."""

    model: Model
    runner: Runner
    digest: str


def check_vocabulary(path: Path, draft_path: Path) -> None:
    """Check that each token of the draft model spells what the model's token of the same number does.

    Files may pad the vocabulary to different sizes. Raises UnfitDraftModel.
    """
    try:
        own, drafts = Tokenizer.load(path), Tokenizer.load(draft_path)
    except (UnusableTokenizer, OSError) as error:
        raise UnfitDraftModel(f"--speculative-model {draft_path}: {error}") from error
    for token_id in range(max(own.vocab_size, drafts.vocab_size)):
        spelled, drafted = own.piece(token_id), drafts.piece(token_id)
        same_kind = own.is_special(token_id) == drafts.is_special(token_id) or not (spelled or drafted)
        if spelled != drafted or not same_kind:
            raise UnfitDraftModel(
                f"--speculative-model {draft_path}: its vocabulary is not the model's: token {token_id} is "
                f"{_shown(drafts, token_id)}, the model's is {_shown(own, token_id)}"
            )


def check_keeps_no_state(draft_path: Path) -> None:
    """Check that the draft model has no recurrent layers: nothing takes drafted tokens out of their states.

    Raises UnfitDraftModel.
    """
    shape = shape_of(draft_path)
    if shape.recurrent_layers:
        raise UnfitDraftModel(
            f"--speculative-model {draft_path}: a draft model may have no recurrent layers, "
            f"as {shape.family} has"
        )


def _shown(tokenizer: Tokenizer, token_id: int) -> str:
    piece = tokenizer.piece(token_id)
    if not piece:
        return "none"
    return f"{piece.decode('utf-8', 'replace')!r}{' (a control token)' * tokenizer.is_special(token_id)}"
