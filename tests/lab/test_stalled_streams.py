"""Streams that are not read, at a gateway between scripted workers."""

from __future__ import annotations

import pytest

from lab.stalled_streams import main


@pytest.mark.full
def test_stalled_streams_print_the_gateways_memory_by_turn(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--system", "played", "--streams", "4", "--tokens", "20", "--logprobs", "0", "--turns", "1"]
    assert main(flags) == 0
    *_, row = capsys.readouterr().out.splitlines()
    turn, before, most, _, _ = (float(cell) for cell in row.strip("|").split("|"))
    assert turn == 1
    assert 10 < before <= most
