"""The checks that a draft model's vocabulary is the model's."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken

from diptych.worker_process.draft_loader import UnfitDraftModel, check_vocabulary
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder


def test_equal_vocabularies_pass_and_others_are_refused_by_their_first_token(tmp_path: Path) -> None:
    tokenizer = byte_level(vocab_size=320)
    model = write_folder(tmp_path / "model", tokenizer)
    check_vocabulary(model, write_folder(tmp_path / "same", byte_level(vocab_size=320)))
    tokenizer.add_tokens([AddedToken("<more>", normalized=False)])
    with pytest.raises(UnfitDraftModel, match=r"token \d+ is '<more>', the model's is none"):
        check_vocabulary(model, write_folder(tmp_path / "longer", tokenizer))
    with pytest.raises(UnfitDraftModel, match="vocabulary is not the model's: token"):
        check_vocabulary(model, write_folder(tmp_path / "shorter", byte_level(vocab_size=300)))


def test_files_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    model = write_folder(tmp_path / "model", byte_level(vocab_size=320))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnfitDraftModel, match="--speculative-model"):
        check_vocabulary(model, tmp_path / "empty")
