"""Small systems for tests that break them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack
from tests.faults.failpoints import Armory

FLAGS = ["--model-name", "tiny", "--dtype", "fp32", "--prefill-chunk", "48", "--transport", "shared_memory"]


@dataclass(frozen=True)
class Breakable:
    """A running system, and the means to break it."""

    stack: Stack
    armory: Armory

    @property
    def address(self) -> str:
        return self.stack.address


def breakable(
    tmp_path_factory: pytest.TempPathFactory, model: Path, *flags: str, local_prefill: str = "never"
) -> Iterator[Breakable]:
    armory = Armory(tmp_path_factory.mktemp("failpoints"), local_prefill)
    # At a load of 30 on two cores a worker takes more than 100 s to start again.
    env = {**armory.environment, "DIPTYCH_WORKER_WAIT_TIMEOUT": "500"}
    with running_stack("--model", str(model), *FLAGS, *flags, env=env) as stack:
        yield Breakable(stack, armory)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a small random model."""
    return tiny_model.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def laptop(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Breakable]:
    """Run one worker of each role: requests that lose it wait until it is back. Every test leaves it whole
    and idle.
    """
    yield from breakable(tmp_path_factory, tiny)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Breakable]:
    """Two workers a role."""
    yield from breakable(tmp_path_factory, tiny, "--prefill-workers", "2", "--decode-workers", "2")


@pytest.fixture(scope="module")
def local_pairs(tmp_path_factory: pytest.TempPathFactory, tiny: Path) -> Iterator[Breakable]:
    """Two workers a role; decode workers compute the prompts themselves."""
    flags = ("--prefill-workers", "2", "--decode-workers", "2")
    yield from breakable(tmp_path_factory, tiny, *flags, local_prefill="always")
