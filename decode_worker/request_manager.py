"""The attempts of a decode worker, from attach to last word; what they hold while they are here.

One event loop owns all of this. Blocks of a gang that ends during a step are released after that step, since
it is still writing them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from decode_worker.attempt_blocks import AttemptBlocks
from decode_worker.decode_modes import gangs_of
from decode_worker.gateway_stream import GatewayStream
from decode_worker.max_blocks import worst_case
from decode_worker.prefix_publisher import PrefixPublisher
from decode_worker.request import DecodeRequest, Outcome, State
from decode_worker.step_group import StepGroup
from diptych.engine.kv.block_pool import BlockMisuse, BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.runtime.block_hash import block_keys
from diptych.runtime.failpoints import reach
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.grammar_masks import Grammars
from diptych.worker_process.step_thread import StepThread
from kvtransfer.drivers.codec import attempt_id
from kvtransfer.drivers.types import Ready
from kvtransfer.protocol.messages import Key, PendingTransfer

log = logging.getLogger(__name__)


class GrantPort(Protocol):
    """The side of the handoff that the worker talks to (kvtransfer.drivers.server.HandoffServer)."""

    def expect(self, expected: PendingTransfer) -> None: ...
    def cancel(self, key: Key) -> None: ...
    def blocks_freed(self) -> None: ...
    def abort_newest_grant(self) -> Key | None: ...
    @property
    def num_grants(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Listeners:
    """Who hears of what happens here; called on the event loop."""

    ended: Callable[[DecodeRequest], None]
    cache_changed: Callable[[list[bytes], list[bytes]], None]  # keys added, keys removed


class RequestManager:
    """Every attempt that is not over, and `running`: their gangs that have blocks, by age."""

    grants: GrantPort
    grammars: Grammars

    def __init__(
        self,
        memory: KVMemory,
        pool: BlockPool,
        step: StepThread[StepGroup],
        *,
        max_context: int,
        listeners: Listeners,
        wake: Callable[[], None],
    ) -> None:
        self._memory = memory
        self._pool = pool
        self._step = step
        self._max_context = max_context
        self._listeners = listeners
        self._wake = wake
        self._requests: dict[Key, DecodeRequest] = {}
        # Of each attempt those that hold blocks, or will: longer than it lives, where a step still writes.
        self._gangs: dict[DecodeRequest, list[StepGroup]] = {}
        self._joined = 0
        self.running: dict[int, StepGroup] = {}
        self.prefixes = PrefixPublisher(pool, memory.layout.block_size, listeners.cache_changed)
        self.draining = False

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Sequences that hold verified blocks and will need more of them."""
        return sum(len(gang.rows) for gang in self.running.values())

    @property
    def num_waiting(self) -> int:
        """Attempts whose blocks are still being filled, or waited for."""
        return sum(request.state is State.ATTACHED for request in self._requests.values())

    # ---- from attach to the handoff ----------------------------------------------------------------

    def attach(self, work: work_pb2.Work, gateway: GatewayStream) -> None:
        """Announce an attempt: its KV may be granted and handed over from now on."""
        attempt = Attempt.from_work(work, max_context=self._max_context)
        if attempt.key in self._requests:
            log.warning("attempt %s attached twice; the second is ignored", attempt.key)
            return
        if self.draining:
            for choice in attempt.choices:
                gateway.failed(attempt.key, choice, work_pb2.FAILURE_REASON_DRAINING, "")
            gateway.flush()
            return
        blocks = AttemptBlocks(attempt, self._pool, self._memory, self.prefixes)
        request = DecodeRequest(attempt, gateway, blocks, attempt_id(attempt.key))
        gangs = gangs_of(request, self._joined + 1)
        self._gangs[request] = gangs
        self._joined += len(gangs)
        self._requests[attempt.key] = request
        gateway.keys[attempt.key] = None
        if attempt.grammar is not None:
            request.compiling = self.grammars.start(attempt.grammar, attempt.delivered_ids)
        self._expect(request)
        reach("decode.attached")

    def _expect(self, request: DecodeRequest) -> None:
        attempt, size = request.attempt, self._memory.layout.block_size
        tokens = attempt.token_ids
        keys = block_keys(attempt.cache_namespace, tokens, size) if attempt.cache_read else []
        reserve = None
        if attempt.reserve_worst_case:
            reserve, together = worst_case(attempt, block_size=size, total_blocks=self._pool.total)
            # The others come back, and ask when there is room for their worst case as well.
            for gang in self._left(request)[together:]:
                self.preempt(gang)
            request.gateway.flush()
        sequences = attempt.beam_width or len(self._left(request))
        self.grants.expect(
            PendingTransfer(attempt.key, len(tokens), keys, reserve, sequences, attempt.priority)
        )

    def on_ready(self, ready: Ready) -> None:
        """The handoff is verified: the blocks are ours, first tokens go out before any step."""
        request = self._requests.get(ready.key)
        if request is None:
            self._pool.release(ready.block_ids)
            self.grants.blocks_freed()
            return
        if request.compiling is not None and not self._compiled(request, ready):
            return
        reach("decode.verified")
        request.move(State.READY)
        request.times.CopyFrom(ready.times)
        request.transport = ready.transport
        request.blocks.take_over(ready.block_ids, ready.num_tokens)
        if len(ready.first_tokens) < (1 if request.attempt.beam_width else len(request.attempt.choices)):
            self._fail(request, work_pb2.FAILURE_REASON_INTERNAL, "too few first tokens were committed")
        for gang in self._left(request):
            self.running[gang.joined] = gang
            self.carry_on(gang, partial(gang.start, ready.first_tokens))
        request.blocks.all_rooted()
        request.gateway.flush()
        self._wake()

    def _compiled(self, request: DecodeRequest, ready: Ready) -> bool:
        """Whether the grammar is there. If not yet, `ready` comes again; if never, the attempt is over."""
        compiling = request.compiling
        if compiling is None:
            return True
        if not compiling.done():
            compiling.add_done_callback(lambda _: self.on_ready(ready))
            return False
        if (error := compiling.exception()) is not None:
            log.warning("the grammar of %s: %s", request.key, error)
            self._fail(request, work_pb2.FAILURE_REASON_NOTHING_ALLOWED, "")
            self.on_ready(ready)  # gives the blocks back
            return False
        request.grammar, request.compiling = compiling.result(), None
        return True

    def on_failed(self, key: Key, reason: int, message: str) -> None:
        """The handoff of an attempt failed; its blocks are already back or in quarantine."""
        if request := self._requests.get(key):
            if reason == work_pb2.FAILURE_REASON_ROW_FAILED:  # of the prefill worker, which read our cache
                request.blocks.distrust()
                self.prefixes.tell()
            self._fail(request, reason, message)

    # ---- ends that come from outside -----------------------------------------------------------------

    def cancel(self, key: Key, choices: Collection[int] = ()) -> None:
        """The gateway wants these choices no longer (none named: all); nothing more is said of them."""
        if request := self._requests.get(key):
            for gang in self._left(request):
                if not gang.ended and gang.forgo(choices):
                    self.leave(gang, "cancelled")

    def gateway_lost(self, gateway: GatewayStream) -> None:
        """Its stream ended: every attempt that came over it is cancelled."""
        for key in list(gateway.keys):
            self.cancel(key)
        gateway.close()

    def end_late(self, now: float) -> None:
        """End what is past its deadline. The gateway does too; this holds when it is slow or gone."""
        for request in list(self._requests.values()):
            if (deadline := request.attempt.deadline) is not None and now >= deadline:
                self._fail(request, work_pb2.FAILURE_REASON_DEADLINE, request.state.value)

    def hand_back(self) -> None:
        """This worker leaves: the gateways continue what is here elsewhere, at the next token."""
        for request in list(self._requests.values()):
            self._fail(request, work_pb2.FAILURE_REASON_DRAINING, request.state.value)

    def preempt_attempt(self, key: Key) -> None:
        """Its grant was taken back: the gateway prefills it again."""
        if request := self._requests.get(key):
            for gang in self._left(request):
                self.preempt(gang)
            request.gateway.flush()

    def _fail(self, request: DecodeRequest, reason: int, message: str) -> None:
        request.failed_for = reason
        for gang in self._left(request):
            if not gang.ended:
                gang.say_failed(reason, message)
                self.leave(gang, "failed")
        request.gateway.flush()

    def _left(self, request: DecodeRequest) -> list[StepGroup]:
        """Its gangs that hold blocks, or will; none when all have let go."""
        return list(self._gangs.get(request, ()))

    # ---- one gang ------------------------------------------------------------------------------------

    def carry_on(self, gang: StepGroup, turn: Callable[[], Outcome | None]) -> None:
        """Let it say what it has to say: over, or not. What raises there ends this gang and no other, unless
        it is the books of blocks, which are everybody's.
        """
        try:
            outcome = turn()
        except BlockMisuse:
            raise
        except Exception as error:
            log.exception("attempt %s", gang.request.key)
            gang.say_failed(work_pb2.FAILURE_REASON_INTERNAL, type(error).__name__)
            outcome = "failed"
        if outcome is not None:
            self.leave(gang, outcome)

    def preempt(self, gang: StepGroup) -> None:
        """Take its blocks; the gateway prefills prompt and delivered tokens again."""
        if not gang.ended:
            gang.say_preempted()
            self.leave(gang, "preempted")

    def make_way(self, gang: StepGroup) -> None:
        """The planner has no blocks for it, or needs its own. With a reserve it is larger than the pool."""
        if gang.request.attempt.reserve_worst_case:
            gang.say_failed(work_pb2.FAILURE_REASON_NEVER_FITS, "larger than all blocks together")
            self.leave(gang, "failed")
        else:
            self.preempt(gang)
        gang.request.gateway.flush()

    def leave(self, gang: StepGroup, outcome: Outcome) -> None:
        """Last station of every gang: out of the batch, and its blocks go back as soon as they may."""
        request = gang.request
        gang.ended = True
        request.outcomes.append(outcome)
        self.running.pop(gang.joined, None)
        if all(one.ended for one in self._gangs[request]):
            self._end(request)
        if self._step.writes(gang):
            self._step.abort(gang)  # its blocks follow after the step
        else:
            self.let_go(gang)

    def let_go(self, gang: StepGroup) -> None:
        """No step writes its blocks any more."""
        request = gang.request
        gangs = self._gangs[request]
        gangs.remove(gang)
        gang.release()
        if not gangs:
            del self._gangs[request]
            request.blocks.close()
        self.prefixes.tell()
        self.grants.blocks_freed()

    def _end(self, request: DecodeRequest) -> None:
        before = request.state
        request.move(State.ENDED)
        del self._requests[request.key]
        request.gateway.keys.pop(request.key, None)
        if before is State.ATTACHED:
            self.grants.cancel(request.key)
        self._listeners.ended(request)
