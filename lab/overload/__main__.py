"""`python -m lab.overload`: start a system, overload it, print what came of it.

Four minutes; `--seconds 10` is a quick look. `--address` takes a system that runs already.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from diptych.bench.backends import Unreachable
from diptych.bench.backends.grpc import GrpcBackend
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.cpu_time import CpuTime
from diptych.bench.request import RequestFailed
from diptych.runtime.python_module import module_command
from lab.overload.phases import Plan, Played, play
from lab.overload.report import lines, table
from lab.peers.process import RunningServer, StartFailed
from lab.peers.servers import Server

_TIMEOUT_S = 120.0


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, 1 when the system fails or a figure is missed, 2 for wrong flags."""
    options = _parser().parse_args(argv)
    plan = Plan(options.seconds, options.input_len, options.output_len, seed=options.seed)
    before = CpuTime.now()
    try:
        if options.address is not None:
            played = _played(options.address, plan)
        else:
            server = _server(options.model, options.dtype)
            with tempfile.TemporaryDirectory() as folder, RunningServer(server, Path(folder)) as running:
                played = _played(running.address, plan)
    except (RequestFailed, StartFailed, Unreachable) as error:
        print(f"lab.overload: {error}", file=sys.stderr)
        return 1
    found = lines(played)
    print(f"{table(played, found)}\n\n{before.stolen_till_now()}")
    return 0 if all(line.met for line in found) else 1


def _played(address: str, plan: Plan) -> Played:
    async def run() -> Played:
        backend = GrpcBackend(address, Asking(timeout_s=_TIMEOUT_S))
        try:
            return await play(backend, plan)
        finally:
            await backend.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def _server(model: str, dtype: str) -> Server:
    """Start a system with a queue as short as keeps the workers busy: latency before everything."""
    return Server(
        name="diptych",
        family="diptych",
        precision=dtype,
        arguments=(
            *module_command("diptych"),
            *("up", "--dtype", dtype, "--model", model),
            *("--grpc-port", "{port}", "--http-port", "{spare_port}", "--ready-file", "{ready_file}"),
            *("--set", "gateway.max-queue-delay-s=auto"),
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m lab.overload", description="Four times too much.")
    parser.add_argument("--address", help="host:port of a gateway that runs already")
    parser.add_argument("--model", default="bundled", help="GGUF file or Hugging Face folder")
    parser.add_argument("--dtype", default="auto", help="as `diptych up` takes it")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each load (60)")
    parser.add_argument("--input-len", type=int, default=128, help="tokens of a prompt (128)")
    parser.add_argument("--output-len", type=int, default=48, help="tokens of an answer (48)")
    parser.add_argument("--seed", type=int, default=1)
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
