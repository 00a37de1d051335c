"""A system with a disk tier: killed and started again, damaged, shared by two workers and two tenants."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from diptych.client import Client, Completion
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack
from tests.faults.conftest import FLAGS

LENGTH, TOKENS = 320, 12
PROMPTS = [tiny_model.prompt(7000 + number, LENGTH) for number in range(3)]
POOL = ["--kv-blocks", "64"]


def answers(stack: Stack, prompts: Sequence[list[int]] = PROMPTS, salt: str = "") -> list[Completion]:
    with Client(stack.address) as client:
        return [
            client.generate(one, max_tokens=TOKENS, temperature=0.0, ignore_eos=True, cache_salt=salt)
            for one in prompts
        ]


def tokens(completions: Sequence[Completion]) -> list[list[int]]:
    return [list(one.token_ids) for one in completions]


def blocks(completions: Sequence[Completion]) -> list[int]:
    return [one.timings.tier_blocks for one in completions if one.timings is not None]


def files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.kv"))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> tuple[Path, list[list[int]]]:
    """A folder that a killed worker left, and what it had answered."""
    folder = tmp_path_factory.mktemp("tiers") / "kv"
    with running_stack(*_flags(tiny, folder)) as stack:
        said = tokens(answers(stack))
        _wait_stored(stack, folder)
        pid = stack.account["decode"][0]["pid"]
        os.kill(pid, signal.SIGKILL)
        again = answers(stack)  # by the worker that up has started in its place
        assert tokens(again) == said
        assert min(blocks(again)) > 0, "found without a restart of the whole system"
    return folder, said


def _flags(tiny: Path, folder: Path, *more: str) -> list[str]:
    tier = f"disk:{folder}:64m"
    return ["--model", str(tiny), *FLAGS, *POOL, "--kv-tier", tier, *more]


def _wait_stored(stack: Stack, folder: Path) -> None:
    stack.wait_idle()
    whole = len(PROMPTS) * ((LENGTH + TOKENS - 1) // 16)
    for _ in range(600):
        if len(files(folder)) >= whole:
            return
        time.sleep(0.1)
    raise AssertionError(f"{len(files(folder))} of {whole} blocks were stored")


def test_files_of_a_killed_system_are_found_and_give_the_same_tokens(
    first: tuple[Path, list[list[int]]], tiny: Path
) -> None:
    folder, said = first
    with running_stack(*_flags(tiny, folder)) as stack:
        found = answers(stack)
        assert tokens(found) == said
        assert [one.usage.cached_prompt_tokens for one in found] == [LENGTH - 16] * len(PROMPTS)
        assert min(blocks(found)) > 0
        strangers = answers(stack, salt="another")
        assert tokens(strangers) == said
        assert [one.usage.cached_prompt_tokens for one in strangers] == [0] * len(PROMPTS)
        assert blocks(strangers) == [0] * len(PROMPTS)


@pytest.mark.full  # tests/diptych/worker_process/test_kv_tiers.py damages files of smaller ones
def test_damaged_files_are_misses_and_give_the_same_tokens(
    first: tuple[Path, list[list[int]]], tiny: Path
) -> None:
    folder, said = first
    for number, file in enumerate(files(folder)):
        content = bytearray(file.read_bytes())
        match number % 4:
            case 0:
                content[-number - 1] ^= 4
                file.write_bytes(content)
            case 1:
                file.write_bytes(content[: len(content) // 2])
            case 2:
                file.unlink()
            case 3:
                file.write_bytes(files(folder)[0].read_bytes())
    with running_stack(*_flags(tiny, folder, "--decode-workers", "2")) as stack:
        found = answers(stack, PROMPTS * 2)
        assert tokens(found) == said * 2
        assert blocks(found)[: len(PROMPTS)] == [0] * len(PROMPTS)
        assert sum(stack.metric("decode", "diptych_kv_tier_entries_damaged", index) for index in (0, 1)) > 0
