"""EAGLE heads and multi-token prediction layers in real processes: equal tokens, through killed workers."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from tests.diptych.engine.heads import mtp_models
from tests.end_to_end import knowing_head, tiny_model
from tests.end_to_end.stack import running_stack
from tests.end_to_end.test_draft_model import LONG, _streamed, _total
from tests.end_to_end.test_medusa import PROMPT, _seeded

pytestmark = pytest.mark.timeout(900)


@pytest.mark.full  # tests/diptych/worker_process/test_eagle.py has both workers in one process
@pytest.mark.parametrize(
    ("transport", "tree"),
    [("tcp", ""), ("shared_memory", ""), ("tcp", "3,2,1"), ("shared_memory", "dynamic:9,4,3")],
)
def test_an_eagle_head_changes_no_token_nor_does_the_death_of_a_decode_worker(
    transport: str, tree: str, tmp_path: Path
) -> None:
    """The text is asked for again with its own beginning as a prompt: with a prefix from the cache."""
    model = tiny_model.write(tmp_path / "tiny")
    head = knowing_head.write(tmp_path / "head", model, [PROMPT], LONG)
    flags = ("--model", str(model), "--dtype", "fp32", "--transport", transport, "--decode-workers", "2")
    drafts = ("--speculative-model", str(head), *(("--speculative-tree", tree) if tree else ()))
    with running_stack(*flags) as plain:
        expected = asyncio.run(_streamed(plain, PROMPT, kill=False))
        further = asyncio.run(_streamed(plain, PROMPT + expected[:40], kill=False))
    with running_stack(*flags, *drafts) as stack:
        assert asyncio.run(_streamed(stack, PROMPT, kill=False)) == expected
        assert _total(stack, "accepted") > 0, "how many were drafted depends on measured times"
        assert asyncio.run(_streamed(stack, PROMPT + expected[:40], kill=False)) == further
        seeded = asyncio.run(_seeded(stack.address))
        assert asyncio.run(_streamed(stack, PROMPT, kill=True)) == expected
    with running_stack(*flags) as plain:
        assert asyncio.run(_seeded(plain.address)) == seeded


@pytest.mark.full  # tests/diptych/engine/heads/test_mtp.py computes the layer
@pytest.mark.parametrize("name", mtp_models.FAMILIES)
def test_a_models_own_layer_changes_no_token_nor_does_the_death_of_a_decode_worker(
    name: str, tmp_path: Path
) -> None:
    model = tiny_model.write(tmp_path / "tiny")
    config = json.loads((model / "config.json").read_text())
    ends = {key: config[key] for key in ("vocab_size", "bos_token_id", "eos_token_id")}
    mtp_models.write(model, name, **ends)
    flags = ("--model", str(model), "--dtype", "fp32", "--decode-workers", "2")
    with running_stack(*flags) as plain:
        expected = asyncio.run(_streamed(plain, PROMPT, kill=False))
        seeded = asyncio.run(_seeded(plain.address))
    with running_stack(*flags, "--speculative-model", "mtp", "--speculative-tokens", "2") as stack:
        assert asyncio.run(_streamed(stack, PROMPT, kill=False)) == expected
        assert asyncio.run(_seeded(stack.address)) == seeded
        assert _total(stack, "draft") > 0
        assert asyncio.run(_streamed(stack, PROMPT, kill=True)) == expected
