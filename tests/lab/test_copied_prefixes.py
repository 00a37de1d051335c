"""Prefixes over tcp with two prefill workers, on a whole system: the small form of `lab.copied_prefixes`."""

from __future__ import annotations

import asyncio

import pytest

from lab.copied_prefixes import Findings, measure, started


@pytest.mark.full  # tests/diptych/worker_process/test_pulled_prefixes.py has both workers in one process
def test_copied_prefixes_are_cached_as_promised() -> None:
    flags = ["--prefill-workers", "2", "--transport", "tcp", "--set", "gateway.local-prefill=never"]
    flags += ["--set", "prefill.pull-prefixes=always"]  # a starved machine makes pulls late
    with started(flags) as system:
        findings = asyncio.run(measure(system, chats=1, requests=24, families=4, clients=4))
    assert findings.turns == [(359, 336)], "a second turn computes what is new, and its last block"
    assert len(findings.pairs) == 2, "both prefill workers are used"
    assert findings.kept >= 0.99, findings.table()
    assert findings.again <= 0.02, findings.table()
    assert sum(promised for promised, _ in findings.pairs.values()) > 10 * 400


def test_broken_promises_are_not_made_up_by_other_pairs() -> None:
    findings = Findings(pairs={"a": [100.0, 50.0], "b": [100.0, 400.0]}, shared=200, computed_again=10)
    assert findings.kept == 0.75
    assert findings.again == 0.05
    assert "| cached of the promised tokens | 75.00% |" in findings.table()
