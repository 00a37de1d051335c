"""Processes that host a prefill and a decode worker: which workers are paired, and how they are started."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from diptych.cli import hosted_pairs
from diptych.cli.child import ChildSpec, Slot, announced_by, ids_of, records_of
from diptych.cli.preflight import BadOptions, read_programs
from diptych.cli.stack import SharedSecrets, program_specs
from diptych.cli.stack_options import StackOptions
from diptych.host.flags import split_flags
from diptych.runtime.python_module import module_arguments

SHARED = SharedSecrets("redis://:password@127.0.0.1:1/0", "5ec2e7")
ANNOUNCED = {
    "prefill.grpc_port": 1, "prefill.worker_id": "prefill-0-a", "prefill.record": "{p}",
    "decode.grpc_port": 2, "decode.worker_id": "decode-0-a", "decode.record": "{d}",
}  # fmt: skip


def specs(**options: object) -> dict[str, ChildSpec]:
    chosen = StackOptions(**{"device": "cpu", "gpu_sharing": "turns", **options})
    return {spec.name: spec for spec in program_specs(chosen, SHARED, 4)}


def test_default_is_a_process_for_each_worker() -> None:
    assert list(specs(gpu_sharing="auto")) == ["gateway", "decode-0", "prefill-0"]
    assert list(specs(gpu_sharing="off")) == ["gateway", "decode-0", "prefill-0"]


def test_workers_are_paired_while_there_are_two() -> None:
    made = specs(prefill_workers=3, decode_workers=2)
    assert list(made) == ["gateway", "pair-0", "pair-1", "prefill-2"]
    assert made["pair-1"].names == ("pair-1", "prefill-1", "decode-1")
    assert made["prefill-2"].workers == (made["prefill-2"],)


def test_pairs_are_of_one_model() -> None:
    made = specs(model="a=/a,b=/b", prefill_workers=1, decode_workers=1)
    assert list(made) == ["gateway", "pair-0", "pair-1"]
    for spec in made.values():
        assert len({one.model for one in spec.hosts}) <= 1


def test_flags_of_both_workers_are_those_that_they_have_alone() -> None:
    alone, pair = specs(gpu_sharing="off"), specs()["pair-0"]
    own, workers = split_flags(list(module_arguments(pair.argv)))  # type: ignore[misc]
    assert own[:2] == ["--gpu-sharing", "turns"]
    assert Slot("ready_fd") in own
    assert Slot("death_fd") in own
    for role, flags in workers.items():
        expected = [
            Slot(f"{role}_id") if word == Slot("worker_id") else word
            for word in module_arguments(alone[f"{role}-0"].argv)
        ]
        at = expected.index("--ready-fd")
        assert flags == expected[:at]
        assert expected[at:] == ["--ready-fd", Slot("ready_fd"), "--death-fd", Slot("death_fd")]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"auto_roles": True}, "--auto-roles"),
        ({"kv_tier": "ram:1g"}, "--kv-tier"),
        ({"overrides": (("prefill", "device", "cuda:1"),)}, "--set gives each another --device"),
        (
            {"overrides": (("prefill", "tensor-parallel", "2"), ("decode", "tensor-parallel", "2"))},
            "--tensor-parallel takes processes of its own",
        ),
        ({"gpu_sharing": "together"}, "must be auto, off, turns"),
    ],
)
def test_what_cannot_be_paired_is_refused_by_name(options: dict[str, object], why: str) -> None:
    with pytest.raises(BadOptions, match=why):
        read_programs(StackOptions(**{"device": "cpu", "gpu_sharing": "turns", **options}))


def test_auto_pairs_where_it_can_once_it_is_more_than_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hosted_pairs, "BY_DEFAULT", "turns")
    assert "pair-0" in specs(gpu_sharing="auto", device="cuda")
    assert "pair-0" not in specs(gpu_sharing="auto", device="cpu")
    assert "pair-0" not in specs(gpu_sharing="auto", device="cuda", auto_roles=True)


def test_programs_are_checked_as_those_of_two_processes() -> None:
    programs = read_programs(StackOptions(device="cpu", gpu_sharing="turns"))
    assert [one.role for one in programs] == ["gateway", "prefill", "decode"]


def test_memory_of_a_card_is_that_of_one_process() -> None:
    share = [str(one) for one in specs(device="cuda")["pair-0"].argv]
    assert share[share.index("--gpu-memory-utilization") + 1] == "0.9"
    alone = [str(one) for one in specs(device="cuda", gpu_sharing="off")["decode-0"].argv]
    assert alone[alone.index("--gpu-memory-utilization") + 1] == "0.72"


def test_announcement_of_a_pair_is_taken_apart_by_role() -> None:
    assert announced_by(ANNOUNCED, "decode") == {
        "grpc_port": 2, "worker_id": "decode-0-a", "record": "{d}"
    }  # fmt: skip
    assert ids_of(ANNOUNCED) == ["prefill-0-a", "decode-0-a"]
    assert records_of(ANNOUNCED) == ["{p}", "{d}"]


def test_successor_of_a_pair_confirms_the_death_of_both() -> None:
    assert specs()["pair-0"].after_death(ANNOUNCED).died == ("prefill-0-a", "decode-0-a")


def test_pair_of_a_later_model_has_names_of_its_own() -> None:
    renamed = specs()["pair-0"].renamed({"pair-0", "prefill-0", "decode-0", "decode-1"})
    assert renamed.names == ("pair-1", "prefill-1", "decode-2")


def test_no_flag_of_the_hosting_program_is_one_of_another_folder(tmp_path: Path) -> None:
    assert specs()["pair-0"].argv[:2] == (sys.executable, "-P")
    assert Path(str(specs()["pair-0"].argv[2])).is_absolute()
