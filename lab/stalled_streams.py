"""Memory of the gateway while clients leave their streams unread, and after they have gone.

    python -m lab.stalled_streams [--streams 72] [--tokens 200] [--logprobs 20] [--turns 3]

Each turn opens the streams over a channel with a fixed window of 64 KiB and reads one message of each, no
more, as a client does that has stopped. Once the workers have computed them all the client goes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import uvloop

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc
from lab.costs.gateway.systems import SYSTEMS, Target

FIXED_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65535)]
LOOK_S = 0.1
AFTER_S = 5.0  # freed memory goes back to the system a second later
TIMEOUT_S = 600.0
_BUSY = ("diptych_requests_running{", "diptych_requests_waiting{")
_UNREAD = "diptych_unread_output_bytes "


@dataclass(frozen=True)
class Turn:
    """Resident memory of the gateway, and the output that waited, in MiB."""

    before: float
    most: float
    after: float
    unread: float  # most of the output that waited for its readers, as the gateway counts it


async def _turn(target: Target, request: pb.GenerateRequest, streams: int) -> Turn:
    before = most = _resident_mib(target.pid)
    unread, busy = 0.0, True
    address = f"127.0.0.1:{target.grpc_port}"
    async with grpc.aio.insecure_channel(address, options=FIXED_WINDOW) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        stopped = [stub.StreamGenerate(request) for _ in range(streams)]
        reading = asyncio.gather(*(call.read() for call in stopped))
        async with asyncio.timeout(TIMEOUT_S):
            while not reading.done() or busy:
                busy, waiting = await _state_of(target)
                unread = max(unread, waiting / (1 << 20))
                most = max(most, _resident_mib(target.pid))
                await asyncio.sleep(LOOK_S)
        await reading
        most = max(most, _resident_mib(target.pid))
        for call in stopped:
            call.cancel()
    await asyncio.sleep(AFTER_S)
    return Turn(before, most, _resident_mib(target.pid), unread)


async def _state_of(target: Target) -> tuple[bool, float]:
    """Return whether workers still compute requests of the gateway, and the bytes that wait for readers."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{target.http_port}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
            return text

    busy, unread = False, 0.0
    for line in (await asyncio.to_thread(read)).splitlines():
        if line.startswith(_BUSY):
            busy = busy or float(line.rsplit(" ", 1)[1]) > 0
        elif line.startswith(_UNREAD):
            unread = float(line.rsplit(" ", 1)[1])
    return busy, unread


def _resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith("VmRSS:")]
    return int(line.split()[1]) / 1024


def table(turns: Sequence[Turn]) -> str:
    lines = ["| turn | before, MiB | most | 5 s after they went | unread, most |", "|---|---|---|---|---|"]
    for number, turn in enumerate(turns, 1):
        lines.append(
            f"| {number} | {turn.before:.0f} | {turn.most:.0f} | {turn.after:.0f} | {turn.unread:.1f} |"
        )
    return "\n".join(lines)


async def _measured(options: argparse.Namespace) -> list[Turn]:
    async with SYSTEMS[options.system](options.step / 1000) as target:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{target.grpc_port}") as channel:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            models = (await stub.ListModels(pb.ListModelsRequest())).models
        request = pb.GenerateRequest(
            model=models[0].name,
            text="The capital of France is",
            sampling=pb.SamplingParams(n=options.choices, seed=1, temperature=1.0),
            stopping=pb.StoppingCriteria(max_tokens=options.tokens, ignore_eos=True),
            response=pb.ResponseOptions(logprobs=options.logprobs or None),
        )
        return [await _turn(target, request, options.streams) for _ in range(options.turns)]


def main(argv: Sequence[str]) -> int:
    options = _parser().parse_args(argv)
    turns = uvloop.run(_measured(options))
    print(
        f"{options.streams} streams, n = {options.choices}, of {options.tokens} tokens with "
        f"{options.logprobs} log-probabilities\n\n{table(turns)}"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m lab.stalled_streams", description="Readers that stop.")
    add = parser.add_argument
    add("--system", choices=SYSTEMS, default="whole", help="played: between workers without an engine")
    add("--streams", type=int, default=72)
    add("--choices", type=int, default=1, help="of each stream (n)")
    add("--tokens", type=int, default=200, help="of each choice")
    add("--logprobs", type=int, default=20, help="of each token; 0: none")
    add("--turns", type=int, default=3)
    add("--step", type=float, default=2.0, help="milliseconds between two tokens of played workers")
    return parser


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
