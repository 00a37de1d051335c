from concurrent.futures import ThreadPoolExecutor
from io import StringIO

import grpc
import pytest
from rich.console import Console
from typer.testing import CliRunner

from diptych.cli.adapter_commands import adapter_table
from diptych.cli.admin_commands import reasons, worker_table
from diptych.cli.app import app
from diptych.v1 import admin_pb2 as pb
from gateway.frontends.admin.servicer import MAX_GRACE_S

WORKERS = [
    pb.WorkerInfo(
        worker_id=f"{role}-0-0123abcd",
        role=number,
        address="127.0.0.1:54321",
        state=pb.WORKER_STATE_INCOMPATIBLE,
        detail="no worker of the other role can exchange blocks with it",
        load=pb.WorkerLoad(
            running=64, waiting=120, waiting_tokens=400_000, free_blocks=1021, total_blocks=10922
        ),
    )
    for role, number in (("prefill", pb.WORKER_ROLE_PREFILL), ("decode", pb.WORKER_ROLE_DECODE))
]


def shown(width: int) -> list[str]:
    out = StringIO()
    Console(file=out, width=width).print(worker_table(WORKERS))
    return out.getvalue().splitlines()


@pytest.mark.parametrize("width", [80, 120])
def test_worker_table_keeps_ids_whole_on_a_narrow_terminal(width: int) -> None:
    firsts = [line.split()[0] for line in shown(width) if not line.startswith(" ")]
    assert [word for word in firsts if word != "worker"] == ["prefill-0-0123abcd", "decode-0-0123abcd"]
    assert all(len(line) <= width for line in shown(width))


def test_worker_table_has_a_line_a_worker_on_a_wide_terminal() -> None:
    head, *rows = shown(200)
    assert head.split()[0] == "worker"
    assert len(rows) == 2
    assert all(row.rstrip().endswith("127.0.0.1:54321") for row in rows)


def test_worker_table_shows_the_processes_of_groups_and_which_is_stopped() -> None:
    ranks = [pb.WorkerRank(pid=40 + n, state="sleeping", weight_bytes=3 << 20) for n in range(4)]
    ranks[2].state = "stopped"
    ranks[3].kv_bytes, ranks[3].left_bytes = 70 << 20, 0
    group = pb.WorkerInfo(worker_id="prefill-1", load=pb.WorkerLoad(ranks=ranks, stages=2))
    out = StringIO()
    Console(file=out, width=240).print(worker_table([group, *WORKERS]))
    head, row, *_ = out.getvalue().splitlines()
    assert "ranks" in head
    assert "40 (3 MiB), 41 (3 MiB) | 42 (3 MiB stopped), 43 (3 MiB, KV 70, left 0)" in row
    assert "ranks" not in shown(200)[0]


@pytest.mark.parametrize("arguments", [["workers"], ["flush"], ["drain", "decode-0-0123abcd"]])
def test_list_workers_at_another_port_names_the_admin_port(arguments: list[str]) -> None:
    with ThreadPoolExecutor(1) as threads:
        public = grpc.server(threads)
        address = f"127.0.0.1:{public.add_insecure_port('127.0.0.1:0')}"
        public.start()
        refused = CliRunner().invoke(app, [*arguments, "--address", address])
        public.stop(0).wait()
    assert refused.exit_code == 1
    [line] = refused.stderr.splitlines()
    assert "UNIMPLEMENTED" in line
    assert line.endswith("gRPC port + 1 unless --admin-port says otherwise, 50052 by default")


@pytest.mark.parametrize("grace", ["inf", "1e300", str(MAX_GRACE_S + 1)])
def test_drain_refuses_a_grace_beyond_a_day(grace: str) -> None:
    refused = CliRunner().invoke(
        app, ["drain", "decode-0-0123abcd", "--grace", grace, "--address", "127.0.0.1:1"]
    )
    assert refused.exit_code == 2
    assert "--grace" in refused.stderr


def test_reasons_are_of_workers_that_are_not_routed_only() -> None:
    fine = pb.WorkerInfo(worker_id="decode-1-0123abcd", state=pb.WORKER_STATE_READY)
    assert list(reasons([*WORKERS[:1], fine])) == [f"prefill-0-0123abcd: {WORKERS[0].detail}"]


def test_worker_table_has_a_column_of_adapters_where_there_are_some() -> None:
    assert "adapters" not in shown(200)[0]
    worker = pb.WorkerInfo(worker_id="decode-0", load=pb.WorkerLoad(adapters=["legal", "0123456789ab"]))
    out = StringIO()
    Console(file=out, width=200).print(worker_table([worker]))
    head, row = out.getvalue().splitlines()
    assert "adapters" in head
    assert "legal, 0123456789ab" in row


def test_adapter_table_has_a_line_an_adapter() -> None:
    adapters = [
        pb.Adapter(name="legal", digest="ab" * 32, path="/adapters/legal", rank=8, workers=["d0", "p0"]),
        pb.Adapter(name="old", digest="cd" * 32, path="/adapters/old", running=3, draining=True),
    ]
    out = StringIO()
    Console(file=out, width=200).print(adapter_table(adapters))
    _, legal, old = (line.split() for line in out.getvalue().splitlines())
    assert legal == ["legal", "ab" * 6, "8", "served", "0", "d0,", "p0", "/adapters/legal"]
    assert old == ["old", "cd" * 6, "unloading", "3", "/adapters/old"]


@pytest.mark.parametrize(
    "arguments", [["list"], ["load", "legal", "/adapters/legal"], ["unload", "legal"]], ids=lambda one: one[0]
)
def test_lora_commands_name_the_admin_port(arguments: list[str]) -> None:
    with ThreadPoolExecutor(1) as threads:
        public = grpc.server(threads)
        address = f"127.0.0.1:{public.add_insecure_port('127.0.0.1:0')}"
        public.start()
        refused = CliRunner().invoke(app, ["lora", *arguments, "--address", address])
        public.stop(0).wait()
    assert refused.exit_code == 1
    assert "UNIMPLEMENTED" in refused.stderr
