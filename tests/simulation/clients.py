"""The simulated clients: each sends one request, compares its stream with the oracle, and records its end."""

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
from tests.simulation.scenario import RequestPlan

GRACE_S = 1.0
"""Seconds after its deadline for which a request may still be in a gateway that lives and runs."""


class _Call(Call):
    """The call of one request at a gateway."""

    def __init__(self, client: Client, **options: Any) -> None:
        super().__init__("diptych.v1.InferenceService/StreamGenerate", **options)
        self._client = client

    async def write(self, message: pb.GenerateResponse) -> None:
        self._client.down.send(self._client.on_message, message.SerializeToString())
        if self._client.plan.slow_reader:
            await asyncio.sleep(0.03)


@dataclass
class Client:
    """A client with one request. `end`: "ok", the reason of an error, "left", "late" or "gateway lost"."""

    cluster: Cluster
    plan: RequestPlan
    report_violation: Callable[[str], None]
    end: str = ""
    error: DiptychError | None = None
    tokens: int = 0
    got: dict[int, list[int]] = field(default_factory=dict)
    text: dict[int, str] = field(default_factory=dict)
    finished: dict[int, int] = field(default_factory=dict)
    task: asyncio.Task[None] | None = None
    machine: Machine | None = None
    too_early: bool = False  # its gateway had no pair of workers when it arrived, and was not ready

    def start(self) -> None:
        """Send the request."""
        cluster, plan = self.cluster, self.plan
        machine = self.machine = cluster.alive(f"g{plan.gateway}")
        if machine is None or machine.calls is None:
            self._end("gateway lost")
            return
        ends = (machine.host.name, "client")
        self.up = Pipe(cluster.network, f"{plan.name}/up", ends, machine.host)
        self.down = Pipe(cluster.network, f"{plan.name}/down", ends, None)
        machine.host.on_death.append(lambda: self.down.send(self._end, "gateway lost"))
        loop = cluster.loop
        self.up.send(self._arrived, machine)
        if plan.deadline_s is not None:
            loop.call_later(plan.deadline_s, self._leave, "late")
            loop.call_later(plan.deadline_s + GRACE_S, self._check_gone)
        if plan.leaves_after_s is not None:
            loop.call_later(plan.leaves_after_s, self._leave, "left")

    # ---- at the gateway ------------------------------------------------------------------------------

    def _arrived(self, machine: Machine) -> None:
        loop = self.cluster.loop
        self.too_early = not machine.program.ready
        call = _Call(self, received_at=loop.time(), time_left_s=self.plan.deadline_s)
        self.task = loop.create_task(self._serve(machine, call))

    async def _serve(self, machine: Machine, call: _Call) -> None:
        calls = machine.calls
        if calls is None:
            raise RuntimeError("the gateway does not serve yet")
        try:
            with calls.account(call):
                await machine.program.router.stream(request_of(self.plan), call)
        except DiptychError as error:
            self.down.send(self._failed, error)
        except asyncio.CancelledError:
            self.down.send(self._end, "cancelled")
            raise
        else:
            self.down.send(self._complete)

    def _cancelled(self) -> None:
        if self.task is not None and not self.task.done():
            self.task.cancel()

    def _check_gone(self) -> None:
        """Check that a gateway which can act met or refused the deadline."""
        machine, task = self.machine, self.task
        if machine is None or task is None or task.done() or machine.host.dead or machine.host.stopped:
            return
        self.report_violation(f"{self.plan.name} outlives its deadline in {machine.host}")

    # ---- at the client -------------------------------------------------------------------------------

    def on_message(self, data: bytes) -> None:
        """Check a message of the stream: all output so far must equal the oracle's."""
        if self.end:
            return
        for output in pb.GenerateResponse.FromString(data).outputs:
            got = self.got.setdefault(output.index, [])
            if output.index in self.finished:
                self.report_violation(f"{self.plan.name}: something came after the finish of {output.index}")
            got += output.token_ids
            self.text[output.index] = self.text.get(output.index, "") + output.text
            self.tokens += len(output.token_ids)
            if output.finish_reason:
                self.finished[output.index] = output.finish_reason
            due = self.expected(output.index)
            if tuple(got) != due[: len(got)]:
                self.report_violation(f"{self.plan.name}/{output.index}: {_difference(got, due)}")
        self.cluster.note(self.plan.name, "receives", self.tokens)

    def expected(self, choice: int) -> tuple[int, ...]:
        """Return the choice's output in a run without faults."""
        plan = self.plan
        stop_ids = frozenset((*plan.stop_ids, *served_model().card.eos_token_ids))
        limits = plan.min_tokens, plan.max_tokens
        return oracle(plan.prompt, plan.sampling, choice, stop_ids, limits, plan.adapter)

    def _complete(self) -> None:
        if self.end:
            return
        for choice in range(self.plan.choices):
            due, reason = self.expected(choice), self.finished.get(choice)
            got = tuple(self.got.get(choice, ()))
            stop_text = stop_string(self.plan) is not None and reason == pb.FINISH_REASON_STOP
            if reason is None or (got != due and not stop_text):
                self.report_violation(
                    f"{self.plan.name}/{choice} is complete without its end: {_difference(got, due)}"
                )
            elif stop_text and got != due and _shown(self.plan, got) != self.text.get(choice):
                self.report_violation(f"{self.plan.name}/{choice} stopped where its stop string is not")
        self._end("ok")

    def _failed(self, error: DiptychError) -> None:
        if self.end:
            return
        self.error = error
        if error.code is grpc.StatusCode.UNAVAILABLE and self.tokens:
            self.report_violation(f"{self.plan.name}: UNAVAILABLE after {self.tokens} tokens")
        if error.code is grpc.StatusCode.ABORTED and not self.tokens:
            self.report_violation(f"{self.plan.name}: ABORTED, but nothing was delivered")
        self._end(error.reason)

    def _leave(self, how: str) -> None:
        if not self.end:
            self._end(how)
            self.up.send(self._cancelled)

    def _end(self, how: str) -> None:
        if not self.end:
            self.end = how
            self.cluster.note(self.plan.name, "ends", how)


def stop_string(plan: RequestPlan) -> str | None:
    """Return the stop string: the text of the first choice's token `stop_after`; None where there is none."""
    if plan.stop_after is None:
        return None
    limits = plan.min_tokens, plan.max_tokens
    ids = oracle(plan.prompt, plan.sampling, 0, frozenset(plan.stop_ids), limits, plan.adapter)
    if plan.stop_after >= len(ids):
        return None
    return served_model().tokenizer.decode([ids[plan.stop_after]], True).strip() or None


def _shown(plan: RequestPlan, got: tuple[int, ...]) -> str | None:
    """Return the text before the stop string that the last of these tokens completes; None where none does.

    A stop string that is complete below `min_tokens` is text like any other.
    """
    decode, stop = served_model().tokenizer.decode, stop_string(plan)
    if stop is None:
        return None
    free = len(decode(got[: max(plan.min_tokens - 1, 0)], True))
    first = max(free + 1 - len(stop), 0)  # the first start of a stop string that is complete after them
    found = decode(got, True).find(stop, first)
    return decode(got, True)[:found] if found >= 0 and decode(got[:-1], True).find(stop, first) < 0 else None


def _difference(got: Any, due: Any) -> str:
    at = next((n for n, (a, b) in enumerate(zip(got, due, strict=False)) if a != b), min(len(got), len(due)))
    return f"differs at token {at} of {len(got)} (due {len(due)})"


def request_of(plan: RequestPlan) -> pb.GenerateRequest:
    """Return the protobuf message of a request."""
    stop = stop_string(plan)
    return pb.GenerateRequest(
        model=served_model().card.name,
        lora=plan.adapter,
        token_ids=pb.TokenIds(ids=plan.prompt),
        sampling=pb.SamplingParams(
            temperature=plan.sampling.temperature,
            seed=plan.sampling.seed,
            frequency_penalty=plan.sampling.frequency_penalty,
            n=plan.choices,
        ),
        stopping=pb.StoppingCriteria(
            max_tokens=plan.max_tokens,
            min_tokens=plan.min_tokens,
            stop_token_ids=plan.stop_ids,
            stop=[stop] if stop is not None else [],
        ),
        response=pb.ResponseOptions(text=stop is not None, token_ids=True),
        cache=pb.CacheOptions(bypass_read=not plan.cached, bypass_write=not plan.cached),
        priority=plan.priority,
    )
