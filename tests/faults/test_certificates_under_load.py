"""Authorities that follow one another under load, while workers die and link anew: no client errors."""

from __future__ import annotations

import asyncio
import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from diptych.client import AsyncClient
from tests.diptych.runtime.authority import Authority
from tests.end_to_end import tiny_model
from tests.end_to_end.stack import running_stack
from tests.end_to_end.test_internal_tls import OVER_NETWORK, served_certificate
from tests.faults.system import PAIRS, eventually

CLIENTS, ROUNDS, TOKENS = 16, 6, 60


@pytest.mark.full  # tests/end_to_end/test_internal_tls.py replaces them once
def test_six_authorities_and_six_deaths_cost_no_answer(tmp_path: Path) -> None:
    model = tiny_model.write(tmp_path / "model")
    certificates = Authority().issue_all(tmp_path / "certificates")
    flags = ["--model", str(model), "--dtype", "fp32", "--kv-blocks", "800", *PAIRS, *OVER_NETWORK]
    flags += ["--set", "decode.max-local-prefill-tokens=0", "--internal-tls", str(certificates)]
    answers: Counter[tuple[int, tuple[int, ...]]] = Counter()

    async def ask(client: AsyncClient, number: int, done: asyncio.Event) -> None:
        prompt = tiny_model.prompt(number % 5, 20 + number)
        while not done.is_set():
            stream = client.stream(prompt, max_tokens=TOKENS, temperature=0, timeout_s=120)
            answers[number, tuple([token async for chunk in stream for token in chunk.token_ids])] += 1

    with running_stack(*flags, env={"DIPTYCH_WORKER_WAIT_TIMEOUT": "100"}) as stack:

        def replace(number: int) -> None:
            role = ("decode", "prefill")[number % 2]
            before = served_certificate(stack, role)
            Authority().issue_all(certificates)
            eventually(
                lambda: served_certificate(stack, role) != before, 30, "the certificate is another one"
            )
            os.kill(stack.account[role][number // 2 % 2]["pid"], signal.SIGKILL)

        async def load() -> None:
            done = asyncio.Event()
            async with AsyncClient(stack.address, retries=0) as client, asyncio.TaskGroup() as tasks:
                for number in range(CLIENTS):
                    tasks.create_task(ask(client, number, done))
                for number in range(ROUNDS):
                    await asyncio.sleep(3)
                    await asyncio.to_thread(replace, number)
                await asyncio.sleep(3)
                done.set()

        asyncio.run(load())
    assert len(answers) == CLIENTS, "each client got one text, whatever happened"
    assert answers.total() > 2 * CLIENTS
