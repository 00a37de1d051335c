"""The clients: each asks once, reads its stream against the oracle, and says how it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc

from diptych.runtime.errors import DiptychError
from diptych.v1 import inference_pb2 as pb
from gateway.call import Call
from tests.simulation.cluster import Cluster, Machine, served_model
from tests.simulation.model import oracle
from tests.simulation.network import Pipe
from tests.simulation.scenario import Ask

GRACE_S = 1.0
"""So long after its deadline a request may still be about in a gateway that lives and runs."""


class _Call(Call):
    """One request at a gateway's door."""

    def __init__(self, client: Client, **options: Any) -> None:
        super().__init__("diptych.v1.InferenceService/StreamGenerate", **options)
        self._client = client

    async def write(self, message: pb.GenerateResponse) -> None:
        self._client.down.send(self._client.heard, message.SerializeToString())
        if self._client.ask.slow_reader:
            await asyncio.sleep(0.03)


@dataclass
class Client:
    """`end` is how it ended: "ok", the reason of an error, "left", "late", "gateway lost"."""

    cluster: Cluster
    ask: Ask
    violated: Callable[[str], None]
    end: str = ""
    error: DiptychError | None = None
    tokens: int = 0
    got: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    machine: Machine | None = None
    too_early: bool = False  # its gateway had no pair of workers when it came, and said so to health checks

    def start(self) -> None:
        """Send the request."""
        cluster, ask = self.cluster, self.ask
        machine = self.machine = cluster.alive(f"g{ask.gateway}")
        if machine is None or machine.calls is None:
            self._over("gateway lost")
            return
        ends = (machine.host.name, "client")
        self.up = Pipe(cluster.network, f"{ask.name}/up", ends, machine.host)
        self.down = Pipe(cluster.network, f"{ask.name}/down", ends, None)
        machine.host.on_death.append(lambda: self.down.send(self._over, "gateway lost"))
        loop = cluster.loop
        self.up.send(self._arrived, machine)
        if ask.deadline_s is not None:
            loop.call_later(ask.deadline_s, self._leave, "late")
            loop.call_later(ask.deadline_s + GRACE_S, self._check_gone)
        if ask.leaves_after_s is not None:
            loop.call_later(ask.leaves_after_s, self._leave, "left")

    # ---- at the gateway ------------------------------------------------------------------------------

    def _arrived(self, machine: Machine) -> None:
        loop = self.cluster.loop
        self.too_early = not machine.program.ready
        call = _Call(self, received_at=loop.time(), time_left_s=self.ask.deadline_s)
        self.task = loop.create_task(self._serve(machine, call))

    async def _serve(self, machine: Machine, call: _Call) -> None:
        calls = machine.calls
        if calls is None:
            raise RuntimeError("the gateway does not serve yet")
        try:
            with calls.account(call):
                await machine.program.generator.stream(request_of(self.ask), call)
        except DiptychError as error:
            self.down.send(self._failed, error)
        except asyncio.CancelledError:
            self.down.send(self._over, "cancelled")
            raise
        else:
            self.down.send(self._complete)

    def _cancelled(self) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()

    def _check_gone(self) -> None:
        """Deadlines are met or refused, by every gateway that could."""
        machine, task = self.machine, self.task
        if machine is None or task is None or task.done() or machine.host.dead or machine.host.stopped:
            return
        self.violated(f"{self.ask.name} outlives its deadline in {machine.host}")

    # ---- at the client -------------------------------------------------------------------------------

    def heard(self, data: bytes) -> None:
        """A message of the stream: all of it so far must be what the oracle says."""
        if self.end:
            return
        for output in pb.GenerateResponse.FromString(data).outputs:
            got = self.got.setdefault(output.index, [])
            if output.index in self.finished:
                self.violated(f"{self.ask.name}: something came after the finish of {output.index}")
            got += output.token_ids
            self.text[output.index] = self.text.get(output.index, "") + output.text
            self.tokens += len(output.token_ids)
            if output.finish_reason:
                self.finished[output.index] = output.finish_reason
            due = self.expected(output.index)
            if tuple(got) != due[: len(got)]:
                self.violated(f"{self.ask.name}/{output.index}: {_difference(got, due)}")
        self.cluster.note(self.ask.name, "hears", self.tokens)

    def expected(self, choice: int) -> tuple[int, ...]:
        """What the choice says when nothing goes wrong."""
        ask = self.ask
        stop_ids = frozenset((*ask.stop_ids, *served_model().card.eos_token_ids))
        return oracle(ask.prompt, ask.draws, choice, stop_ids, (ask.min_tokens, ask.max_tokens))

    def _complete(self) -> None:
        if self.end:
            return
        for choice in range(self.ask.choices):
            due, reason = self.expected(choice), self.finished.get(choice)
            got = tuple(self.got.get(choice, ()))
            stop_text = stop_string(self.ask) is not None and reason == pb.FINISH_REASON_STOP
            if reason is None or (got != due and not stop_text):
                self.violated(
                    f"{self.ask.name}/{choice} is complete without its end: {_difference(got, due)}"
                )
            elif stop_text and got != due and _shown(self.ask, got) != self.text.get(choice):
                self.violated(f"{self.ask.name}/{choice} stopped where its stop string is not")
        self._over("ok")

    def _failed(self, error: DiptychError) -> None:
        if self.end:
            return
        self.error = error
        if error.code is grpc.StatusCode.UNAVAILABLE and self.tokens:
            self.violated(f"{self.ask.name}: UNAVAILABLE after {self.tokens} tokens")
        if error.code is grpc.StatusCode.ABORTED and not self.tokens:
            self.violated(f"{self.ask.name}: ABORTED, but nothing was delivered")
        self._over(error.reason)

    def _leave(self, how: str) -> None:
        if not self.end:
            self._over(how)
            self.up.send(self._cancelled)

    def _over(self, how: str) -> None:
        if not self.end:
            self.end = how
            self.cluster.note(self.ask.name, "ends", how)


def stop_string(ask: Ask) -> str | None:
    """The text of the first choice's token of that number."""
    if ask.stop_after is None:
        return None
    ids = oracle(ask.prompt, ask.draws, 0, frozenset(ask.stop_ids), (ask.min_tokens, ask.max_tokens))
    if ask.stop_after >= len(ids):
        return None
    return served_model().tokenizer.decode([ids[ask.stop_after]], True).strip() or None


def _shown(ask: Ask, got: tuple[int, ...]) -> str | None:
    """What a client sees of these tokens when the last of them completes the stop string; None: it does not.

    One that is complete below `min_tokens` is text like any other.
    """
    decode, stop = served_model().tokenizer.decode, stop_string(ask)
    if stop is None:
        return None
    free = len(decode(got[: max(ask.min_tokens - 1, 0)], True))
    first = max(free + 1 - len(stop), 0)  # where one may begin that is complete after them
    found = decode(got, True).find(stop, first)
    return decode(got, True)[:found] if found >= 0 and decode(got[:-1], True).find(stop, first) < 0 else None


def _difference(got: Any, due: Any) -> str:
    at = next((n for n, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), min(len(got), len(due)))
    return f"differs at token {at} of {len(got)} (due {len(due)})"


def request_of(ask: Ask) -> pb.GenerateRequest:
    """The message for it."""
    stop = stop_string(ask)
    return pb.GenerateRequest(
        model=served_model().card.name,
        token_ids=pb.TokenIds(ids=ask.prompt),
        sampling=pb.SamplingParams(
            temperature=ask.draws.temperature,
            seed=ask.draws.seed,
            frequency_penalty=ask.draws.frequency_penalty,
            n=ask.choices,
        ),
        stopping=pb.StoppingCriteria(
            max_tokens=ask.max_tokens,
            min_tokens=ask.min_tokens,
            stop_token_ids=ask.stop_ids,
            stop=[stop] if stop is not None else [],
        ),
        response=pb.ResponseOptions(text=stop is not None, token_ids=True),
        cache=pb.CacheOptions(bypass_read=not ask.cached, bypass_write=not ask.cached),
        priority=ask.priority,
    )
