"""Prompts whose prefix lies in a tier of the prefill worker, on real loops over tcp: the same tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from diptych.engine.kv.tiers import entry
from diptych.engine.kv.tiers.disk import DiskTier
from diptych.engine.kv.tiers.entry import EntryFormat
from diptych.engine.kv.tiers.ram import RamTier
from diptych.engine.kv.tiers.stack import TierStack
from diptych.worker_process import tier_loads
from tests.diptych.worker_process.both_workers import BLOCK, House, greedy, house, layout
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.kvtransfer.conftest import until

PROMPT = tuple(range(20))
QUESTION, ANOTHER = (*PROMPT, 60), (*PROMPT, 59)
OTHERS = [tuple(range(start, start + 28)) for start in (21, 30)]
KIND = b"f" * 16
COUNT = 6
SHARED = len(PROMPT) // BLOCK * BLOCK


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no load be late: a starved machine makes some so, which cost tokens but no test."""
    monkeypatch.setattr(tier_loads, "LOAD_S", 20.0)


def form() -> EntryFormat:
    return EntryFormat(KIND, layout().bytes_per_block)


def in_memory(number: int) -> TierStack:
    return TierStack([RamTier(1 << 20)], form())


def folder_of(folder: Path) -> Callable[[int], TierStack]:
    """Return a maker of tiers: the first worker stores in the folder, the others read there."""

    def make(number: int) -> TierStack:
        disk = DiskTier(folder, 1 << 20, KIND)
        return TierStack([RamTier(1 << 20), disk], form(), {"disk"} if number else ())

    return make


def files(folder: Path) -> dict[Path, int]:
    """Return the files of a tier, by the number that another file of the name would not have."""
    return {file: file.stat().st_ino for file in folder.rglob("*.kv")}


def damage(folder: Path) -> None:
    """Write other numbers into each block of a tier."""
    for file in folder.rglob("*.kv"):
        content = bytearray(file.read_bytes())
        content[-200::4] = bytes(len(content[-200::4]))
        content[-197::4] = b"\x41" * len(content[-197::4])
        file.write_bytes(content)


async def ask(made: House, gateway: Gateway, prompt: tuple[int, ...], prefill: int = 0) -> tuple[int, ...]:
    """Return the answer to a prompt that this prefill worker computes."""
    request = work((f"r{len(made.prefills[prefill].ended)}-{prefill}", 1), prompt, COUNT)
    heard = gateway.start(made.decodes[0], made.prefills[prefill], request)
    await heard.ended.wait()
    assert await made.empty() == []
    return tuple(heard.tokens)


def computed(made: House, prefill: int = 0) -> list[int]:
    """Return the tokens that each ended request of a worker started from."""
    return [request.granted.computed_tokens for request, _ in made.prefills[prefill].ended if request.granted]


async def stored(made: House, keys: int, prefill: int = 0) -> None:
    await until(lambda: len(made.prefills[prefill].tiers[0].stack.keys()) >= keys)


async def test_prefix_that_scratch_has_lost_comes_from_memory() -> None:
    async with house("tcp", scratch=12, blocks=64, prefill_tiers=in_memory, pull_mode="never") as made:
        gateway = Gateway(made)
        assert await ask(made, gateway, PROMPT) == greedy(PROMPT, COUNT)
        await stored(made, SHARED // BLOCK)
        for other in OTHERS:
            assert await ask(made, gateway, other) == greedy(other, COUNT)
        assert await ask(made, gateway, QUESTION) == greedy(QUESTION, COUNT)
        assert computed(made) == [0, 0, 0, SHARED]
        request, _ = made.prefills[0].ended[-1]
        assert request.times().tier_blocks > 0
        assert request.times().kv_load.ToNanoseconds() > 0
        assert await ask(made, gateway, ANOTHER) == greedy(ANOTHER, COUNT)
        assert computed(made)[-1] == SHARED
        assert made.prefills[0].ended[-1][0].times().tier_blocks == 0, "it is in scratch again"
        await gateway.close()


async def test_other_worker_reads_the_folder_and_stores_nothing_there(tmp_path: Path) -> None:
    tiers = folder_of(tmp_path)
    async with house("tcp", prefills=2, blocks=64, prefill_tiers=tiers, pull_mode="never") as made:
        gateway = Gateway(made)
        await ask(made, gateway, PROMPT)
        await stored(made, SHARED // BLOCK)
        before = files(tmp_path)
        assert await ask(made, gateway, OTHERS[0], prefill=1) == greedy(OTHERS[0], COUNT)
        reader = made.prefills[1].tiers[0]
        await stored(made, len(OTHERS[0]) // BLOCK, prefill=1)
        reader.stack.tiers[1]._rescan_at = 0.0  # type: ignore[attr-defined]
        reader.stack.rescan()
        assert await ask(made, gateway, QUESTION, prefill=1) == greedy(QUESTION, COUNT)
        assert computed(made, 1) == [0, SHARED]
        assert made.prefills[1].ended[-1][0].granted.loaded.blocks == {"disk": SHARED // BLOCK}  # type: ignore[union-attr]
        assert files(tmp_path) == before
        await gateway.close()


@pytest.mark.parametrize("verified", [True, False], ids=["verified", "control"])
async def test_damaged_block_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verified: bool
) -> None:
    """The control: without the digest the answer is another one."""
    tiers = folder_of(tmp_path)
    if not verified:
        monkeypatch.setattr(entry, "_digest", lambda head, payload: bytes(16))
    async with house("tcp", prefills=2, blocks=64, prefill_tiers=tiers, pull_mode="never") as made:
        gateway = Gateway(made)
        await ask(made, gateway, PROMPT)
        await stored(made, SHARED // BLOCK)
        damage(tmp_path)
        assert await ask(made, gateway, OTHERS[0], prefill=1) == greedy(OTHERS[0], COUNT)
        reader = made.prefills[1].tiers[0].stack
        reader.tiers[1].refresh()  # type: ignore[attr-defined]
        answer = await ask(made, gateway, QUESTION, prefill=1)
        assert (answer == greedy(QUESTION, COUNT)) == verified
        assert (reader.damaged > 0) == verified
        await gateway.close()


@pytest.mark.parametrize("how", ["cancel", "flush", "late"])
async def test_end_in_the_middle_of_a_load_leaves_nothing(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    let, waiting, real = threading.Event(), threading.Event(), TierStack.get

    def held(self: TierStack, key: bytes, parent: bytes) -> object:
        waiting.set()
        let.wait(30)
        return real(self, key, parent)

    async with house("tcp", scratch=12, blocks=64, prefill_tiers=in_memory, pull_mode="never") as made:
        gateway = Gateway(made)
        await ask(made, gateway, PROMPT)
        await stored(made, SHARED // BLOCK)
        await ask(made, gateway, OTHERS[0])
        await ask(made, gateway, OTHERS[1])
        monkeypatch.setattr(TierStack, "get", held)
        if how == "late":
            monkeypatch.setattr(tier_loads, "LOAD_S", 0.05)
        heard = gateway.start(made.decodes[0], made.prefills[0], work(("second", 1), QUESTION, COUNT))
        await asyncio.to_thread(waiting.wait, 30)
        if how == "cancel":
            made.decodes[0].loop.requests.cancel(("second", 1))
            made.prefills[0].loop.requests.cancel(("second", 1))
        elif how == "flush":
            made.prefills[0].client.flush_prefix_cache()
            let.set()
        if how != "cancel":
            await heard.ended.wait()
            assert tuple(heard.tokens) == greedy(QUESTION, COUNT)
            assert computed(made)[-1] == 0
        let.set()
        assert await made.empty() == []
        monkeypatch.undo()
        assert await ask(made, gateway, ANOTHER) == greedy(ANOTHER, COUNT)
        await gateway.close()
