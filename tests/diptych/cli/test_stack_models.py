"""Models of a running `diptych up`: the workers that are started for one that comes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from diptych.cli.child import Announcement, ChildSpec
from diptych.cli.stack import SharedSecrets, program_specs
from diptych.cli.stack_models import StackModels
from diptych.cli.stack_options import StackOptions
from diptych.cli.supervisor import Running, ServesWithout, Supervisor

SHARED = SharedSecrets("redis://:password@127.0.0.1:1/0", "5ec2e7")


class RecordingSupervisor(Supervisor):
    """Supervisor that keeps specifications and starts nothing."""

    def __init__(self, specs: Sequence[ChildSpec]) -> None:
        self.specs = {spec.name: spec for spec in specs}

    async def start(
        self, specs: Sequence[ChildSpec], *, serves_without: ServesWithout | None = None
    ) -> list[Announcement | None]:
        self.specs |= {spec.name: spec for spec in specs}
        return [None] * len(specs)

    def running(self) -> list[Running]:
        return [Running(one.name, one.role, 1, None, 0, one.model) for one in self.specs.values()]


def flag(spec: ChildSpec, name: str) -> object:
    return spec.argv[spec.argv.index(f"--{name}") + 1]


async def test_workers_of_a_model_that_comes_have_names_and_ranks_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("diptych.cli.stack_models.checked_model", Path)
    for module in ("worker_specs", "stack_models"):
        monkeypatch.setattr(f"diptych.cli.{module}.reads_images", lambda model: "images" in model)
    options = StackOptions(model="a=/images/a,b=/b", kv_events="ipc:///run/diptych/kv", encode_workers=1)
    supervisor = RecordingSupervisor(program_specs(options, SHARED, cores=4))
    models = StackModels(options, SHARED, supervisor)
    lines: list[str] = []
    for name, path in (("c", "/images/c"), ("d", "/d"), ("d", "/d")):
        await models.load([name, path], lines.append)
    assert lines == ["started decode-2, prefill-2, encode-1", "started decode-3, prefill-3"]
    workers = [spec for spec in supervisor.specs.values() if spec.roles]
    ranks = {flag(spec.roles["decode"], "kv-events-rank") for spec in workers}
    assert ranks == {str(rank) for rank in range(8)}
