"""The bare engine and a whole system beside each other: what each computes, and what the tables say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from diptych.bench.cpu_time import cpu_s, main_thread_cpu_s
from diptych.bench.datasets.synthetic import RandomLengths
from diptych.engine.batch import SequenceStep
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.runner import Runner
from diptych.runtime.python_module import module_command
from diptych.runtime.settings import resolve_model
from lab.closed_turn import Size
from lab.costs.service.__main__ import main
from lab.costs.service.bare_engine import BareEngine
from lab.costs.service.measure import EVENT_LOOP, GENERATOR, OTHERS, Round, bare_engine, name_of
from lab.costs.service.report import markdown
from lab.precisions import load_precision


def test_the_bare_engine_says_what_the_model_says() -> None:
    """Each output, token for token, as one prompt after the other would have it in steps of its own."""
    runner = Runner(load_precision(resolve_model("bundled"), "fp32"), 2)
    outputs = BareEngine(runner, clients=2, input_len=20, output_len=4).outputs(seed=3)
    for request, output in zip(RandomLengths(20, 4).requests(2, 3), outputs, strict=True):
        assert not isinstance(request.prompt, str)
        memory = KVMemory(runner.model.kv_layout(16), 2)
        tokens = list(request.prompt)
        for expected in output:
            logits = runner.step([SequenceStep(memory, [0, 1], 0, tokens, wants_logits=True)])
            assert int(torch.argmax(logits[0])) == expected
            tokens.append(expected)


def test_a_bare_engine_that_does_not_start_is_told() -> None:
    with pytest.raises(RuntimeError, match="ended with status 1"), bare_engine("/nowhere", "int8", Size()):
        pass


@pytest.mark.full
@pytest.mark.parametrize("rounds", [1, 2])
def test_both_by_turns(rounds: int, tmp_path: Path) -> None:
    table = tmp_path / "table.md"
    sizes = ["--clients", "2", "--per-client", "2", "--input-len", "20", "--output-len", "8"]
    assert main([*sizes, "--rounds", str(rounds), "--output", str(table)]) == 0
    lines = table.read_text().splitlines()
    assert lines[0] == (
        f"`--dtype int8`, 2 clients, 20 in / 8 out, {os.cpu_count()} cores; medians of {rounds} rounds, "
        "both in each (smallest–largest)."
    )
    parts = {line.split("|")[1].strip() for line in lines if line.startswith("| ")}
    assert {"bare engine", "whole system", "decode_worker"} <= parts  # others may take less than a tick


def test_ratios_are_taken_within_a_round() -> None:
    """The machine was twice as fast in the second one, for both."""
    cpu_s = {("gateway", EVENT_LOOP): 1e-4, ("gateway", OTHERS): 4e-4, (GENERATOR, EVENT_LOOP): 5e-4}
    cpu_s |= {("launcher", EVENT_LOOP): 1e-7}
    rounds = [Round(1000, 800, cpu_s, 0.0), Round(2000, 1600, cpu_s, 0.0), Round(2000, 1400, cpu_s, 0.0)]
    lines = markdown(rounds, "t").splitlines()
    assert "| of the bare engine's, target ≥ 0.9 | 0.80 (0.70–0.80) |" in lines
    assert "| the same without the load generator's CPU time | 1.60 (1.40–1.60) |" in lines
    assert [line for line in lines if line.startswith(("| gateway", "| launcher", "| load"))] == [
        "| gateway | 100 | 400 |",
        "| load generator | 500 | 0 |",
    ]


def test_threads_and_programs_are_told_apart() -> None:
    code = "import threading, time\nt = threading.Thread(target=lambda: [0 for _ in range(5_000_000)])\n"
    code += "t.start(); t.join(); print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert name_of(child.pid) == Path(sys.executable).name
        assert main_thread_cpu_s(child.pid) < cpu_s(child.pid)  # the other one has ended, and counts
        child.kill()
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()  # only now it is a program of its own for certain
        assert name_of(child.pid) == "http.server"
        child.kill()
    with subprocess.Popen([*module_command("http.server"), "0"], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert name_of(child.pid) == "http.server"
        child.kill()
