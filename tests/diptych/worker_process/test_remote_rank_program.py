"""The process of a rank on another host: it says why it can join no group."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from diptych.engine.parallel.stages import Grid
from diptych.engine.parallel_model import Dealing
from diptych.runtime.python_module import module_command
from diptych.worker_process.group.orders import RankFailed, StartRank
from diptych.worker_process.group.remote_rank_program import CANNOT_SERVE
from diptych.worker_process.group.rendezvous import Rendezvous
from tests.end_to_end import tiny_model

pytestmark = pytest.mark.timeout(240)


def test_a_rank_with_other_files_is_not_started_again(tmp_path: Path) -> None:
    """The end of the group, which follows, does not hide why."""
    model, key = tiny_model.write(tmp_path / "model"), tmp_path / "key"
    key.write_text("a secret of ranks, for this test")
    meeting = Rendezvous("127.0.0.1", 0, key.read_bytes())
    death, alive = os.pipe()
    command = [*module_command("diptych.worker_process.group.remote_rank_program")]
    command += [f"127.0.0.1:{meeting.port}", str(key), str(model), "info", str(death)]
    process = subprocess.Popen(command, pass_fds=[death], stderr=subprocess.PIPE, text=True)
    try:
        (joined,) = meeting.accept(1)
        order = StartRank(1, Grid(2), model, "fp32", False, Dealing(2), None, 1, "cpu", 1, files_digest=b"?")
        joined.ends["control"].send(order)
        answer = joined.ends["control"].recv()
        assert isinstance(answer, RankFailed)
        assert "other files than the model of rank 0" in answer.why
        for end in joined.ends.values():
            end.close()
        _, said = process.communicate(timeout=120)
    finally:
        process.kill()
        os.close(death)
        os.close(alive)
    assert process.returncode == CANNOT_SERVE
    assert "other files than the model of rank 0" in said.splitlines()[-1]
