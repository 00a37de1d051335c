"""First tokens are sent as soon as they are computed, and equal those of the decode worker."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from kvtransfer.drivers.server import HandoffServer
from tests.diptych.worker_process.both_workers import greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, Heard, work
from tests.kvtransfer.conftest import until

PROMPT = (5, 9, 2, 7)


async def heard(transport: str = "shared_memory", **changes: Any) -> Heard:
    async with house(transport) as made:
        gateway = Gateway(made)
        message = work(("r", 1), PROMPT, changes.pop("max_tokens", 5), **changes)
        said = gateway.start(made.decodes[0], made.prefills[0], message)
        await said.ended.wait()
        await gateway.close()
        assert await made.empty() == []
    return said


@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
async def test_first_tokens_arrive_before_the_handoff_is_complete(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, held = HandoffServer._handle, asyncio.Event()
    commits = []

    def holding(server: HandoffServer, link: Any, request: Any) -> None:
        if request.WhichOneof("message") == "commit" and not held.is_set():
            commits.append((server, link, request))
        else:
            handle(server, link, request)

    monkeypatch.setattr(HandoffServer, "_handle", holding)
    async with house(transport) as made:
        gateway = Gateway(made)
        said = gateway.start(made.decodes[0], made.prefills[0], work(("r", 1), PROMPT, 5))
        await until(lambda: bool(said.early[0]))
        await until(lambda: bool(commits))
        assert said.tokens == []
        held.set()
        for one in commits:
            handle(*one)
        await said.ended.wait()
        await gateway.close()
        assert await made.empty() == []
    assert said.early[0] == [greedy(PROMPT, 1)[0]]
    assert tuple(said.tokens) == greedy(PROMPT, 5)


async def test_each_choice_with_its_own_seed_has_a_first_token() -> None:
    said = await heard(choices=(0, 2), sampling={"temperature": 1.0, "seed": 3})
    assert said.early == {choice: output[:1] for choice, output in said.outputs.items()}
    assert all(len(early) == 1 for early in said.early.values())


async def test_first_tokens_follow_the_delivered_tokens() -> None:
    output = greedy(PROMPT, 5)
    said = await heard(delivered=output[:3])
    assert (said.early[0], tuple(said.tokens)) == ([output[3]], output[3:])


async def test_an_ended_output_has_no_first_token() -> None:
    """The client has its last token, and only the terminal message was lost."""
    output = greedy(PROMPT, 2)
    said = await heard(delivered=output, stop=(output[-1],))
    assert (said.early[0], said.tokens, said.terminal_messages) == ([], [], ["decode finished"])


async def test_a_beam_search_has_candidates_and_no_first_token() -> None:
    said = await heard(choices=(0,), sampling={"beam_width": 2})
    assert said.early[0] == []
    assert said.tokens != []
