"""The exchange of a group on GPUs, by the cards of its processes."""

from __future__ import annotations

import pytest

from diptych.engine.parallel.cards import VARIABLE, choose_exchange
from diptych.engine.parallel.communicator import GroupBroken


def test_processes_with_a_card_each_exchange_over_nccl() -> None:
    assert choose_exchange(["a", "b", "c"], "auto") == "nccl"
    assert choose_exchange(["a", "b"], "peers") == "peers"


def test_processes_that_share_a_card_exchange_over_gloo_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert choose_exchange(["a", "b", "a"], "auto") == "gloo"
    assert "processes share the card a" in caplog.text


def test_gloo_may_be_asked_for() -> None:
    assert choose_exchange(["a", "b"], "gloo") == "gloo"


@pytest.mark.parametrize("asked", ["nccl", "peers"])
def test_what_cannot_be_had_is_refused(asked: str) -> None:
    with pytest.raises(GroupBroken, match=f"{VARIABLE}={asked}: processes share the card a"):
        choose_exchange(["a", "a"], asked)
    with pytest.raises(GroupBroken, match="no NCCL"):
        choose_exchange(["no NCCL", "no NCCL"], asked)


def test_another_word_is_refused() -> None:
    with pytest.raises(GroupBroken, match="it must be auto, nccl, gloo, peers"):
        choose_exchange(["a"], "mpi")
