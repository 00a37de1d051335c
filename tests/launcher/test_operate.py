from io import StringIO

import pytest
from rich.console import Console

from diptych.v1 import admin_pb2 as pb
from launcher.operate import reasons, worker_table

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
def test_an_id_is_whole_on_a_narrow_terminal(width: int) -> None:
    firsts = [line.split()[0] for line in shown(width) if not line.startswith(" ")]
    assert [word for word in firsts if word != "worker"] == ["prefill-0-0123abcd", "decode-0-0123abcd"]
    assert all(len(line) <= width for line in shown(width))


def test_a_wide_one_has_a_line_a_worker() -> None:
    head, *rows = shown(200)
    assert head.split()[0] == "worker"
    assert len(rows) == 2
    assert all(row.rstrip().endswith("127.0.0.1:54321") for row in rows)


def test_only_who_gets_less_has_a_reason() -> None:
    fine = pb.WorkerInfo(worker_id="decode-1-0123abcd", state=pb.WORKER_STATE_READY)
    assert list(reasons([*WORKERS[:1], fine])) == [f"prefill-0-0123abcd: {WORKERS[0].detail}"]
