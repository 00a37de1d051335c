"""Cost of a handoff by transport: from "the prompt is computed" to "its blocks are verified".

    python -m lab.handoff [--rounds 40] [--tokens 512 --tokens 2000]

Two processes of one machine with the real ends of the handoff and no engines; the blocks have the bundled
model's shape in bf16. Nothing is pushed before the prompt is computed as a whole, so this is the most that a
handoff can cost: in service the chunks but the last travel while the next one is computed. Transports take
turns, round by round; figures are milliseconds. `lab.gpu` measures the same between blocks on a GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from diptych.bench.figures import percentile
from diptych.cli.private_ca import PrivateCa
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.runtime.internal_tls import InternalTls
from diptych.runtime.python_module import module_command
from diptych.runtime.rpc import bind, make_server
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.runtime.rpc_streams.unix_server import UnixServer
from diptych.worker.v1 import work_pb2
from kvtransfer.drivers.client import HandoffClient
from kvtransfer.drivers.handshake import Fingerprint
from kvtransfer.drivers.peer import Peer
from kvtransfer.drivers.server import HandoffServer
from kvtransfer.drivers.types import Ready
from kvtransfer.protocol.messages import PendingTransfer
from kvtransfer.transports.pool_memory import PoolMemory, allocate_pool

TRANSPORTS = {
    "shared_memory": "in place",
    "cuda_ipc": "cuda_ipc's driver over a memfd",
    "tcp": "tcp",
    "tcp+tls": "tcp over TLS, with the links",
    "gloo": "gloo, the driver of nccl",
}
SHAPES = {
    "bundled": KVLayout(num_layers=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16),
    "8b": KVLayout(num_layers=32, num_kv_heads=8, head_dim=128, block_size=16, dtype=torch.bfloat16),
}
INCARNATION = 1
_TLS = "+tls"
_WARM_UPS = 3


@dataclass(frozen=True)
class Setting:
    """Settings that both processes have in common."""

    shape: str
    device: str
    blocks: int

    @property
    def layout(self) -> KVLayout:
        """Layout of the blocks."""
        return SHAPES[self.shape]

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of two workers with such a model."""
        layout = self.layout
        shape = (layout.block_size, layout.num_layers, layout.num_kv_heads, layout.head_dim)
        return Fingerprint(self.shape, "bf16", "bfloat16", layout.name, *shape, 1)

    def memory(self) -> KVMemory:
        """Blocks of its own for one process."""
        if self.device == "cpu":
            return KVMemory(self.layout, self.blocks)
        return KVMemory.on_device(self.layout, self.blocks, self.device)

    def pool(self) -> PoolMemory:
        """Blocks for the decode process."""
        if self.device == "cpu":
            return allocate_pool(self.layout, self.blocks)
        return PoolMemory(self.memory(), None)


async def decode_end(transport: str, setting: Setting, certificates: Path | None) -> None:
    """Run the decode process: grant whatever is asked for, and report each arrival."""
    tls = None if certificates is None else InternalTls(certificates / "decode", "decode")
    pool = BlockPool(setting.blocks)
    # A pool that was in use: consecutive blocks of a prompt are anywhere.
    taken = pool.allocate(setting.blocks)
    random.Random(1).shuffle(taken)
    pool.release(taken)

    def ready(done: Ready) -> None:
        at = time.monotonic()
        pool.release(done.block_ids)
        server.blocks_freed()
        print(json.dumps({"request": done.key[0], "at": at}), flush=True)

    server = HandoffServer(
        worker_id="decode",
        incarnation=INCARNATION,
        fingerprint=setting.fingerprint,
        memory=setting.pool(),
        pool=pool,
        transports=[transport.removesuffix(_TLS)],
        tls=tls,
        running=lambda: 0,
        on_ready=ready,
        on_failed=lambda key, reason, why: print(json.dumps({"failed": why}), flush=True),
    )
    await server.start()
    edge = make_server(internal=True)
    add_links(edge, [server.service], authenticated=tls is not None)
    credentials = None if tls is None else tls.server_credentials()
    address = f"127.0.0.1:{bind(edge, '127.0.0.1', 0, False, credentials)}"
    await edge.start()
    if tls is None:
        await UnixServer([server.service]).open(address)
    print(json.dumps({"address": address}), flush=True)
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        request, tokens = json.loads(line)
        server.expect(PendingTransfer((request, 1), tokens, []))


class Pair:
    """Prefill end in this process, and the decode process."""

    def __init__(self, process: asyncio.subprocess.Process, peer: Peer) -> None:
        self._process, self._peer = process, peer
        self._count = 0

    @classmethod
    async def start(cls, stack: AsyncExitStack, transport: str, setting: Setting) -> Pair:
        """Start a pair over one transport; it ends with the stack."""
        command = [*module_command("lab.handoff"), "--serve", transport]
        certificates = Path(stack.enter_context(TemporaryDirectory())) if transport.endswith(_TLS) else None
        if certificates is not None:
            authority = PrivateCa.fresh()
            for role in ("prefill", "decode"):
                authority.issue(certificates / role, [role])
            command += ["--certificates", str(certificates)]
        command += ["--shape", setting.shape, "--device", setting.device, "--blocks", str(setting.blocks)]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        stack.push_async_callback(_end, process)
        client = HandoffClient(
            worker_id=f"prefill-{transport}",
            incarnation=os.getpid(),
            fingerprint=setting.fingerprint,
            layout=setting.layout,
            transports=[transport.removesuffix(_TLS)],
            tls=None if certificates is None else InternalTls(certificates / "prefill", "prefill"),
            scratch=lambda: (_filled(setting), BlockPool(setting.blocks)),
            device=torch.device(setting.device),
            on_abort=lambda key: None,
            on_peer_lost=lambda address, keys: None,
        )
        stack.push_async_callback(client.close)
        return cls(process, await client.peer((await _line(process))["address"], INCARNATION))

    async def handoff(self, tokens: int) -> float:
        """Milliseconds from the whole prompt computed to its blocks verified at the other end."""
        self._count += 1
        request = f"{tokens}-{self._count}"
        if self._process.stdin is None:
            raise RuntimeError("the decode process takes no requests")
        self._process.stdin.write(json.dumps([request, tokens]).encode() + b"\n")
        granted = await self._peer.ask((request, 1), tokens, [], keep=False)
        started = time.monotonic()
        first = (work_pb2.SampledToken(token_id=1),)
        await self._peer.commit(granted, tokens, first, work_pb2.PhaseTimes())
        said = await _line(self._process)
        if said.get("request") != request:
            raise RuntimeError(f"the handoff of {request} failed: {said}")
        return (float(said["at"]) - started) * 1e3


def _filled(setting: Setting) -> KVMemory:
    """Touched memory with something in it."""
    memory = setting.memory()
    memory.data.copy_(torch.randn(setting.layout.block_shape).to(setting.layout.dtype))
    return memory


async def _line(process: asyncio.subprocess.Process) -> dict[str, str]:
    if process.stdout is None:
        raise RuntimeError("the decode process says nothing")
    line = await asyncio.wait_for(process.stdout.readline(), 60)
    said: dict[str, str] = json.loads(line)
    return said


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


Times = dict[tuple[str, int], list[float]]


async def measure(
    transports: Iterable[str],
    lengths: Sequence[int],
    rounds: int,
    shape: str = "bundled",
    device: str = "cpu",
) -> Times:
    """Every transport and length in turn; milliseconds of each round, in ascending order."""
    setting = Setting(shape, device, SHAPES[shape].blocks_for(max(lengths)) + 1)
    async with AsyncExitStack() as stack:
        pairs = {name: await Pair.start(stack, name, setting) for name in transports}
        taken: Times = {(name, tokens): [] for tokens in lengths for name in pairs}
        for number in range(_WARM_UPS + rounds):
            for (name, tokens), times in taken.items():
                spent = await pairs[name].handoff(tokens)
                if number >= _WARM_UPS:
                    times.append(spent)
    return {which: sorted(times) for which, times in taken.items()}


def table(taken: Times, layout: KVLayout) -> str:
    """Render the results as Markdown."""
    lines = ["| transport | prompt | MB | p50 ms | p90 ms | GB/s at p50 |", "|---|---|---|---|---|---|"]
    for (name, tokens), times in taken.items():
        size = layout.blocks_for(tokens) * layout.bytes_per_block
        p50, p90 = percentile(times, 50), percentile(times, 90)
        rate = "nothing moves" if name == "shared_memory" else f"{size / p50 / 1e6:.1f}"
        lines.append(
            f"| {TRANSPORTS[name]} | {tokens:,} | {size / 1e6:.0f} | {p50:.2f} | {p90:.2f} | {rate} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse the command line and measure, or be the other process."""
    parser = argparse.ArgumentParser(prog="python -m lab.handoff", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tokens", type=int, action="append", default=None)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--certificates", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--shape", choices=list(SHAPES), default="bundled", help=argparse.SUPPRESS)
    parser.add_argument("--device", default="cpu", help=argparse.SUPPRESS)
    parser.add_argument("--blocks", type=int, default=256, help=argparse.SUPPRESS)
    given = parser.parse_args()
    torch.set_num_threads(1)
    if given.serve:
        setting = Setting(given.shape, given.device, given.blocks)
        asyncio.run(decode_end(given.serve, setting, given.certificates))
        return
    taken = asyncio.run(measure(TRANSPORTS, given.tokens or [512, 2000], given.rounds))
    print(table(taken, SHAPES["bundled"]))


if __name__ == "__main__":
    main()
