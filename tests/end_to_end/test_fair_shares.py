"""Three gateways over the same workers: a tenant that comes through two of them gets one share, not two."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest

from diptych.client import AsyncClient
from tests.end_to_end import tiny_model, tiny_system
from tests.end_to_end.stack import running_stack
from tests.faults.second_gateway import second_gateway
from tests.gateway.access.keys import Keys

PLACES = "8"  # requests of a gateway that workers have at once: what tenants compete for
CLIENTS = 32  # of a tenant at a gateway, each with one request after the other: far more than have a place
TAUGHT, COUNTED = 100, 300  # answers of the shared gateway: those before it is settled, those that count
MAX_TOKENS = 12


@dataclass(frozen=True)
class Gateways:
    """Addresses of two gateways that share, and of one that does not; the keys of two tenants."""

    first: str
    second: str
    alone: str
    both: str
    single: str


@pytest.fixture(scope="module")
def gateways(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    folder = tmp_path_factory.mktemp("fair_shares")
    model = tiny_system.write(folder / "model")
    keys = Keys(folder / "keys.jsonl")
    both, single = keys.add("both"), keys.add("single")
    common = {"DIPTYCH_API_KEYS_FILE": str(keys.path), "DIPTYCH_MAX_INFLIGHT": PLACES}
    with running_stack(*flags(model, keys.path)) as stack, ExitStack() as others:
        second = others.enter_context(second_gateway(stack, model, common))
        alone = others.enter_context(second_gateway(stack, model, common | {"DIPTYCH_FAIR_SHARES": "alone"}))
        yield Gateways(stack.address, second.address, alone.address, both, single)


def flags(model: Path, keys: Path) -> list[str]:
    made = ["--model", str(model), "--model-name", "tiny", "--dtype", "fp32", "--show-secrets"]
    return [*made, "--api-keys-file", str(keys), "--set", f"gateway.max-inflight={PLACES}"]


async def served(contested: str, other: str, gateways: Gateways) -> Counter[tuple[str, str]]:
    """Return the answers by address and tenant while both tenants flood `contested`, and one `other` too."""
    answers: Counter[tuple[str, str]] = Counter()

    async def flood(address: str, tenant: str) -> None:
        async with AsyncClient(address, api_key=getattr(gateways, tenant)) as client:
            await asyncio.gather(*(ask(client, address, tenant, seed) for seed in range(CLIENTS)))

    async def ask(client: AsyncClient, address: str, tenant: str, seed: int) -> None:
        prompt = tiny_model.prompt(seed, 20)
        while True:
            await client.generate(prompt, max_tokens=MAX_TOKENS, temperature=0.0, timeout_s=120)
            answers[address, tenant] += 1

    floods = [(contested, "single"), (contested, "both"), (other, "both")]
    clients = [asyncio.create_task(flood(address, tenant)) for address, tenant in floods]
    try:
        for wanted in (TAUGHT, COUNTED):
            answers.clear()
            while sum(count for (address, _), count in answers.items() if address == contested) < wanted:
                await asyncio.wait(clients, timeout=0.05, return_when=asyncio.FIRST_EXCEPTION)
                if failed := [client for client in clients if client.done()]:
                    failed[0].result()
        return Counter(answers)
    finally:
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)


def part_of_single(answers: Counter[tuple[str, str]], contested: str) -> float:
    single, both = answers[contested, "single"], answers[contested, "both"]
    return single / (single + both)


@pytest.mark.full  # gateways in one process do so in tests/gateway/admission
def test_tenant_of_two_gateways_leaves_the_first_one_to_the_other_tenant(gateways: Gateways) -> None:
    """The answers of a gateway are counted, not seconds: the ratio is that of a busy machine too."""
    answers = asyncio.run(served(gateways.first, gateways.second, gateways))
    assert part_of_single(answers, gateways.first) > 0.7
    assert answers[gateways.first, "both"] > 0, "it is not shut out either"
    assert answers[gateways.second, "both"] > 0


@pytest.mark.full
def test_gateway_that_shares_nothing_gives_equal_parts(gateways: Gateways) -> None:
    """The control."""
    answers = asyncio.run(served(gateways.alone, gateways.second, gateways))
    assert 0.4 < part_of_single(answers, gateways.alone) < 0.6
