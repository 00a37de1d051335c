"""The systems that modules share: a start takes longer than most of what is asked.

Whoever uses one leaves it whole and idle, and looks at that at the end of each module, so that a failure
names its own. Tests that stop or kill something, or want flags of their own, start a system of their own.
"""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest

from tests.end_to_end import reference, tiny_system
from tests.end_to_end.stack import Stack, http_root, running_stack
from tests.end_to_end.tiny_system import Served

KV_BLOCKS = "1000"  # more than all prompts of reference.prompts() together
CHUNKS = {"shared_memory": 48, "tcp": 512}
"""Tokens of a prefill step: several and a partial one for most prompts, and one for nearly all."""


def _bundled(transport: str, local: str) -> Iterator[Stack]:
    flags = ["--set", f"gateway.local-prefill={local}", "--dtype", "fp32", "--transport", transport]
    flags += ["--prefill-chunk", str(CHUNKS[transport])]
    with running_stack(*flags, "--kv-blocks", KV_BLOCKS) as stack:
        yield stack


@pytest.fixture(scope="package")
def started_in_place() -> Iterator[Stack]:
    yield from _bundled("shared_memory", "auto")


@pytest.fixture(scope="package")
def started_over_tcp() -> Iterator[Stack]:
    yield from _bundled("tcp", "never")


@pytest.fixture(scope="package")
def started_tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with tiny_system.serving(tmp_path_factory.mktemp("tiny")) as served:
        yield served


@pytest.fixture(scope="module")
def bundled(started_in_place: Stack) -> Iterator[Stack]:
    """The bundled model in fp32; blocks are handed over in place."""
    yield started_in_place
    started_in_place.wait_idle()


@pytest.fixture(scope="module")
def bundled_tcp(started_over_tcp: Stack) -> Iterator[Stack]:
    """The same, but the bytes of blocks travel, those of short prompts too."""
    yield started_over_tcp
    started_over_tcp.wait_idle()


@pytest.fixture(scope="module")
def served(started_tiny: Served) -> Iterator[Served]:
    """A tiny model whose template has tools."""
    yield started_tiny
    started_tiny.stack.wait_idle()


@pytest.fixture(scope="module")
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    """OpenAI's own client, of the module's fixture `stack`."""
    root = http_root(request.getfixturevalue("stack"))
    with openai.OpenAI(base_url=f"{root}/v1", api_key="any", max_retries=0, timeout=120) as made:
        yield made


@pytest.fixture(scope="module")
def model(client: openai.OpenAI) -> str:
    return client.models.list().data[0].id


@pytest.fixture(scope="module")
def both_transports(bundled: Stack, bundled_tcp: Stack) -> tuple[Served, Served]:
    """The same model behind both transports: in place, over TCP."""
    file = reference.model_file()
    return Served(bundled, file, reference.MODEL), Served(bundled_tcp, file, reference.MODEL)
