"""Workers without an engine: real gRPC servers on real ports that follow a script.

They register in a real directory, greet, beat, note everything they are told, and say what a test tells them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from diptych.runtime.discovery.publisher import DirectoryPublisher
from diptych.runtime.discovery.records import Role, WorkerRecord
from diptych.runtime.rpc import bind, make_server
from diptych.worker.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, work_pb2

BLOCK_SIZE = 16
_incarnations = itertools.count(1000)
_names = itertools.count(1)


class ScriptedWorker:
    """Base of both roles. ``sent`` holds what gateways sent, in order, as (oneof name, message)."""

    role: Role
    response: type[Any]

    def __init__(self, *, total_blocks: int = 1024, max_context: int = 8192) -> None:
        self.worker_id = f"{self.role}-{next(_names)}"
        self.incarnation = next(_incarnations)
        self.total_blocks = total_blocks
        self.max_context = max_context
        self.sent: list[tuple[str, Any]] = []
        self.told = asyncio.Event()
        self.links = 0  # open now
        self.silent = False  # neither heartbeats nor answers, with the connection open
        self.stuck = False  # beats, but the step of its engine does not end
        self.replaces = ""  # ids of workers whose death its supervisor saw
        self.image_rows, self.encodes = "", 0  # as in `WorkerRecord`
        self.roles = ""  # in which its supervisor could start it
        self.busy_share, self.waiting_tokens = 0.0, 0
        self.drains: work_pb2.Drain | None = None  # the order, once it has come
        self.keys: list[bytes] = []  # of cached blocks, for the directory
        self.max_loras = 8
        self.adapters: set[bytes] = set()  # in its memory
        self.refusal = ""  # of the next loads; "silence" = no answer at all
        self._outboxes: list[asyncio.Queue[Any]] = []
        self._server: grpc.aio.Server | None = None
        self.publisher: DirectoryPublisher | None = None
        self.address = ""

    async def start(self, redis_url: str, digest: str) -> None:
        self._server = make_server(internal=True)
        self._register(self._server)
        self.address = f"127.0.0.1:{bind(self._server, '127.0.0.1', 0, False)}"
        await self._server.start()
        record = WorkerRecord(
            self.worker_id,
            self.role,
            self.address,
            self.incarnation,
            digest,
            "model",
            "fp32",
            "fp32",
            "test",
            BLOCK_SIZE,
            self.max_context,
            self.total_blocks,
            1,
            free_blocks=self.total_blocks,
            replaces=self.replaces,
            roles=self.roles,
            image_rows=self.image_rows,
            encodes=self.encodes,
        )
        self.publisher = DirectoryPublisher(redis_url, record, lambda: self.keys)
        await self.publisher.start()

    async def kill(self) -> None:
        """Simulate the death of the process: streams break, the lease stays until it expires."""
        if self._server is not None:
            await self._server.stop(None)

    async def close(self) -> None:
        await self.kill()
        if self.publisher is not None:
            await self.publisher.close()

    async def wait_for(self, kind: str, count: int = 1) -> list[Any]:
        """Wait for ``count`` messages of this kind and return them."""
        while True:
            found = [message for name, message in self.sent if name == kind]
            if len(found) >= count:
                return found
            self.told.clear()
            await asyncio.wait_for(self.told.wait(), 20)

    def say(self, **message: Any) -> None:
        """Send to every gateway that is linked."""
        for outbox in self._outboxes:
            outbox.put_nowait(self.response(**message))

    async def on_message(self, kind: str, message: Any) -> None:
        """Handle a message, as the script wants."""

    def _register(self, server: grpc.aio.Server) -> None:
        raise NotImplementedError

    async def Link(self, requests: AsyncIterator[Any], context: Any) -> AsyncIterator[Any]:
        outbox: asyncio.Queue[Any] = asyncio.Queue()
        greeting = work_pb2.WorkerHello(worker_id=self.worker_id, incarnation=self.incarnation)
        outbox.put_nowait(self.response(hello=greeting))
        self._outboxes.append(outbox)
        self.links += 1
        reader = asyncio.create_task(self._read(requests))
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    message = await asyncio.wait_for(outbox.get(), 0.25)
                    yield message
                    continue
                if not self.silent:
                    beat = work_pb2.Heartbeat(load=self.load(), busy=True)
                    if self.stuck:
                        beat.late.FromSeconds(60)
                    yield self.response(heartbeat=beat)
        finally:
            self.links -= 1
            self._outboxes.remove(outbox)
            reader.cancel()

    def load(self) -> work_pb2.Load:
        return work_pb2.Load(
            free_blocks=self.total_blocks,
            total_blocks=self.total_blocks,
            adapters=sorted(self.adapters),
            max_loras=self.max_loras,
            busy_share=self.busy_share,
            waiting_tokens=self.waiting_tokens,
            draining=self.drains is not None,
            becomes=self.drains.become if self.drains is not None else work_pb2.WORKER_ROLE_UNSPECIFIED,
        )

    def _on_adapter(self, kind: str, message: Any) -> None:
        """Load or unload at once, unless ``refusal`` says otherwise."""
        answer = work_pb2.AdapterAnswer(id=message.id)
        if kind == "load_adapter" and self.refusal == "silence":
            return
        if kind == "load_adapter" and self.refusal:
            reason = work_pb2.FAILURE_REASON_ADAPTER_NOT_LOADED
            answer.failure.CopyFrom(work_pb2.Failure(reason=reason, message=self.refusal))
        elif kind == "load_adapter":
            self.adapters.add(message.digest)
        else:
            self.adapters.discard(message.digest)
        self.say(adapter_answer=answer)

    async def _read(self, requests: AsyncIterator[Any]) -> None:
        async for request in requests:
            kind = request.WhichOneof("message")
            if self.silent or kind == "heartbeat":
                continue
            message = getattr(request, kind)
            self.sent.append((kind, message))
            self.told.set()
            if kind == "drain":
                self.drains = message
            if kind in ("load_adapter", "unload_adapter"):
                self._on_adapter(kind, message)
            await self.on_message(kind, message)


class ScriptedPrefill(ScriptedWorker):
    """Commits everything at once, unless ``idle``."""

    role: Role = "prefill"
    response = prefill_pb2.PrefillServiceLinkResponse

    def __init__(self, *, idle: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.idle = idle

    def _register(self, server: grpc.aio.Server) -> None:
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self, server)

    async def on_message(self, kind: str, message: Any) -> None:
        if kind == "dispatch" and not self.idle:
            self.committed(message.work)

    def first(self, work: work_pb2.Work, token_id: int, cached_tokens: int = 0) -> None:
        token = work_pb2.Tokens(id=work.id, index=delivered(work), token_ids=[token_id])
        token.cached_tokens = cached_tokens
        self.say(first_tokens=prefill_pb2.FirstTokens(tokens=[token]))

    def committed(self, work: work_pb2.Work) -> None:
        self.say(ended=prefill_pb2.PrefillEnded(id=work.id, committed=prefill_pb2.Committed()))

    def fail(self, work: work_pb2.Work, reason: work_pb2.FailureReason) -> None:
        failure = work_pb2.Failure(reason=reason, message="scripted")
        self.say(ended=prefill_pb2.PrefillEnded(id=work.id, failure=failure))


Script = Callable[["ScriptedDecode", work_pb2.Work], Awaitable[None]]


class ScriptedDecode(ScriptedWorker):
    """Runs ``script`` for every attach."""

    role: Role = "decode"
    response = decode_pb2.DecodeServiceLinkResponse

    def __init__(self, script: Script | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.script = script
        self._tasks: set[asyncio.Task[None]] = set()

    def _register(self, server: grpc.aio.Server) -> None:
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(self, server)

    async def on_message(self, kind: str, message: Any) -> None:
        if kind == "attach" and self.script is not None:
            task = asyncio.ensure_future(self.script(self, message))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def tokens(self, work: work_pb2.Work, index: int, ids: list[int], **more: Any) -> None:
        self.say(
            step=decode_pb2.StepBatch(
                tokens=[work_pb2.Tokens(id=work.id, index=index, token_ids=ids, **more)]
            )
        )

    def ended(self, work: work_pb2.Work, times: work_pb2.PhaseTimes | None = None, **outcome: Any) -> None:
        self.say(
            step=decode_pb2.StepBatch(
                ended=[decode_pb2.DecodeEnded(id=work.id, times=times or work_pb2.PhaseTimes(), **outcome)]
            )
        )

    def finish(self, work: work_pb2.Work, times: work_pb2.PhaseTimes | None = None) -> None:
        self.ended(work, times, finished=work_pb2.FINISH_REASON_LENGTH)

    def fail(self, work: work_pb2.Work, reason: work_pb2.FailureReason) -> None:
        self.ended(work, failure=work_pb2.Failure(reason=reason, message="scripted"))


def delivered(work: work_pb2.Work) -> int:
    """Output tokens that the client has already when this attempt starts."""
    return len(work.token_ids) - work.prompt_tokens


def answering(ids: list[int], *, per_step: int = 1, pause_s: float = 0.0) -> Script:
    """Return the script of a worker that always outputs ``ids`` and then ends by length."""

    async def script(worker: ScriptedDecode, work: work_pb2.Work) -> None:
        for index in range(delivered(work), len(ids), per_step):
            worker.tokens(work, index, ids[index : index + per_step])
            await asyncio.sleep(pause_s)
        worker.finish(work)

    return script


async def main(redis_url: str, digest: str) -> None:
    """Run an idle pair of workers as a process that a test stops or kills."""
    for worker in (ScriptedPrefill(idle=True), ScriptedDecode()):
        await worker.start(redis_url, digest)
    print("started", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
