"""The section of two cards where it cannot measure: it says so, and leaves no process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from lab.gpu import two_cards
from lab.gpu.section import Context, Unmeasured


def test_one_card_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(torch.device("cuda", 0), False, lambda line: None)
    monkeypatch.setattr(two_cards, "device_of", lambda context: context.device)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(Unmeasured, match="two CUDA devices are needed, one for each rank, and there is 1"):
        next(two_cards.two_cards(context))


def test_a_rank_that_fails_is_named() -> None:
    """The other one, which waits for it, is not waited for."""
    waits, fails = (
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        for code in ("import time; time.sleep(600)", "raise SystemExit(3)")
    )
    with waits, fails:
        with pytest.raises(Unmeasured, match="rank 1 ended with status 3"):
            two_cards._result_of([waits, fails])
        waits.kill()
