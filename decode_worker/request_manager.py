"""The attempts of a decode worker, from attach to terminal message, and the blocks that they hold.

One event loop owns all of this. Blocks of a step group that ends during a step are released after that step,
since it is still writing them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from decode_worker.beams import Beams
from decode_worker.choices import Choice
from decode_worker.gateway_stream import GatewayStream
from decode_worker.local_prefill import LocalPrefills, new_tokens
from decode_worker.max_blocks import max_blocks
from decode_worker.prefix_publisher import PrefixPublisher
from decode_worker.request import DecodeRequest, Outcome, State
from decode_worker.sequence import AttemptBlocks
from decode_worker.step_group import RowOwner, StepGroup
from diptych.engine.kv.block_pool import BlockMisuse, BlockPool
from diptych.engine.kv.kv_memory import KVMemory
from diptych.engine.kv.tiers.loaded import Loaded
from diptych.engine.kv.window_prefix import WindowPrefix
from diptych.runtime.block_hash import block_keys
from diptych.runtime.failpoints import reach
from diptych.worker.v1 import work_pb2
from diptych.worker_process.adapter_calls import AdapterCalls
from diptych.worker_process.adapter_store import AdapterStore, AdapterUse
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.grammar_masks import Grammars
from diptych.worker_process.kv_tiers import KvTiers
from diptych.worker_process.step_thread import StepThread
from kvtransfer.drivers.codec import attempt_id
from kvtransfer.drivers.types import Ready
from kvtransfer.protocol.messages import Key, PendingTransfer

log = logging.getLogger(__name__)


WAITING = frozenset({State.ATTACHED, State.PREFILLING})
"""States before the handoff."""


class GrantPort(Protocol):
    """The interface of the handoff that the worker calls (kvtransfer.drivers.server.HandoffServer)."""

    def expect(self, expected: PendingTransfer) -> None: ...
    def cancel(self, key: Key) -> None: ...
    def blocks_freed(self) -> None: ...
    def abort_newest_grant(self) -> Key | None: ...
    @property
    def num_grants(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Listeners:
    """Callbacks of the request manager, called on the event loop."""

    ended: Callable[[DecodeRequest], None]
    cache_changed: Callable[[list[bytes], list[bytes]], None]  # keys added, keys removed


class RequestManager:
    """Every attempt that has not ended, and `running`: step groups that have blocks, by arrival order."""

    grants: GrantPort
    local: LocalPrefills
    grammars: Grammars
    adapters: AdapterStore
    adapter_calls: AdapterCalls
    tiers: KvTiers | None = None

    def __init__(
        self,
        memory: KVMemory,
        pool: BlockPool,
        step: StepThread[RowOwner],
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
        # Step groups that hold blocks, or will: longer than their attempt lives, where a step still writes.
        self._groups: dict[DecodeRequest, list[StepGroup]] = {}
        self._arrivals = 0
        self.running: dict[int, StepGroup] = {}
        layout = memory.layout
        self.prefixes = PrefixPublisher(pool, layout.block_size, listeners.cache_changed)
        self._match: Callable[[Sequence[bytes]], int] = (
            pool.match
            if layout.windows is None
            else WindowPrefix(pool, layout.windows, layout.block_size).match
        )
        self.draining = False

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Sequences that hold verified blocks and will need more of them."""
        return sum(len(group.rows) for group in self.running.values())

    @property
    def num_waiting(self) -> int:
        """Attempts whose blocks are still being filled, or waited for."""
        return sum(request.state in WAITING for request in self._requests.values())

    def adapter_of(self, key: Key) -> AdapterUse | None:
        """Return an attempt's use of its adapter; None for one of the base model, or that has ended."""
        request = self._requests.get(key)
        return None if request is None else request.adapter

    # ---- from attach to the handoff ------------------------------------------------------------------

    def attach(self, work: work_pb2.Work, gateway: GatewayStream) -> None:
        """Announce an attempt: its KV may be granted and transferred from now on."""
        attempt = Attempt.from_work(work, max_context=self._max_context)
        if attempt.key in self._requests:
            log.warning("attempt %s attached twice; the second is ignored", attempt.key)
            return
        if self.draining:
            _refuse(attempt, gateway, work_pb2.FAILURE_REASON_DRAINING)
            return
        adapter = self.adapters.use(attempt.key, attempt.adapter) if attempt.adapter else None
        if attempt.adapter and adapter is None:
            _refuse(attempt, gateway, work_pb2.FAILURE_REASON_ADAPTER_NOT_LOADED)
            return
        blocks = AttemptBlocks(
            attempt, self._pool, self._memory, self.prefixes, on_freed=self.grants.blocks_freed
        )
        request = DecodeRequest(attempt, gateway, blocks, attempt_id(attempt.key), adapter)
        groups = _step_groups(request, self._arrivals + 1)
        self._groups[request] = groups
        self._arrivals += len(groups)
        self._requests[attempt.key] = request
        gateway.keys[attempt.key] = None
        if attempt.grammar is not None:
            request.compiling = self.grammars.start(attempt.grammar, attempt.delivered_ids)
        tokens, size = attempt.token_ids, self._memory.layout.block_size
        keys = []
        if attempt.cache_read:
            keys = block_keys(attempt.cache_namespace, tokens, size, images=attempt.images)
        announce = partial(self._announce, request, work.local_prefill, keys)
        if self.tiers is not None and self.prefixes.journal is not None:
            self.prefixes.journal.expect(keys, tokens, attempt)
        if self.tiers is None or not self.tiers.load(keys[: (len(tokens) - 1) // size], announce):
            announce()

    def _announce(
        self,
        request: DecodeRequest,
        local: work_pb2.LocalPrefill,
        keys: Sequence[bytes],
        loaded: Loaded | None = None,
    ) -> None:
        """Let an attempt be granted blocks, once what tiers have of its prefix is in the pool."""
        if request.state is State.ENDED:
            return
        request.loaded = loaded
        if local and not self._add_local(request, local, keys):
            return
        self._expect(request, keys)
        reach("decode.attached")
        if local:
            self._ask_local(request)

    def _add_local(self, request: DecodeRequest, kind: work_pb2.LocalPrefill, keys: Sequence[bytes]) -> bool:
        """Queue a prompt that is to be computed here; fail its attempt if too many of its tokens are new."""
        tokens, size = len(request.attempt.token_ids), self._memory.layout.block_size
        new = new_tokens(tokens, self._match(keys[: (tokens - 1) // size]), size)
        if not request.attempt.needs_images(tokens - new) and self.local.add(request, kind, new):
            return True
        self._fail(request, work_pb2.FAILURE_REASON_TOO_MANY_NEW, "")
        return False

    def _ask_local(self, request: DecodeRequest) -> None:
        """Let a prompt that is computed here ask for blocks, once its grammar is compiled."""
        if request.compiling is None:
            self.local.ask()
        else:
            request.compiling.add_done_callback(lambda _: self._grammar_compiled(request))

    def _grammar_compiled(self, request: DecodeRequest) -> None:
        if request.state is State.ATTACHED and self._take_grammar(request):
            self.local.ask()

    def _expect(self, request: DecodeRequest, keys: Sequence[bytes]) -> None:
        attempt, tokens = request.attempt, request.attempt.token_ids
        reserve, windowed = None, 0
        if attempt.reserve_worst_case:
            layout = self._memory.layout
            most = max_blocks(attempt, layout=layout, total_blocks=self._pool.total)
            reserve, windowed = most.blocks, most.windowed
            # The others come back, and ask when there is room for their worst case as well.
            for group in self._active_groups(request)[most.groups :]:
                self.preempt(group)
            request.gateway.flush()
        sequences = attempt.beam_width or len(self._active_groups(request))
        self.grants.expect(
            PendingTransfer(attempt.key, len(tokens), keys, reserve, sequences, attempt.priority, windowed)
        )

    def on_ready(self, ready: Ready) -> None:
        """Adopt the blocks of a verified handoff and send the first tokens, before any step."""
        request = self._requests.get(ready.key)
        if request is None:
            self._pool.release(ready.held)
            self.grants.blocks_freed()
            return
        if request.compiling is not None and not self._compiled(request, ready):
            return
        reach("decode.verified")
        request.move(State.READY)
        request.times.CopyFrom(ready.times)
        request.transport = ready.transport
        request.blocks.adopt_prompt(ready.block_ids, ready.num_tokens, ready.window, drafted=ready.drafted)
        if len(ready.first_tokens) < (1 if request.attempt.beam_width else len(request.attempt.choices)):
            self._fail(request, work_pb2.FAILURE_REASON_INTERNAL, "too few first tokens were committed")
        for group in self._active_groups(request):
            self.running[group.arrival_order] = group
            self.advance(group, partial(group.start, ready.first_tokens))
        request.blocks.release_prompt()
        request.gateway.flush()
        self._wake()

    def _compiled(self, request: DecodeRequest, ready: Ready) -> bool:
        """Return whether the grammar is compiled.

        If not yet, `ready` comes again; if never, the attempt ends.
        """
        if request.compiling is not None and not request.compiling.done():
            request.compiling.add_done_callback(lambda _: self.on_ready(ready))
            return False
        if self._take_grammar(request):
            return True
        self.on_ready(ready)  # releases the blocks
        return False

    def _take_grammar(self, request: DecodeRequest) -> bool:
        """Take a request's grammar, whose compilation is done; fail the attempt and return False without."""
        compiling, request.compiling = request.compiling, None
        if compiling is None:
            return True
        if (error := compiling.exception()) is not None:
            log.warning("the grammar of %s: %s", request.key, error)
            self._fail(request, work_pb2.FAILURE_REASON_NO_VALID_TOKEN, "")
            return False
        request.grammar = compiling.result()
        return True

    def on_failed(self, key: Key, reason: int, message: str) -> None:
        """Fail an attempt with its handoff; its blocks are already released or in quarantine."""
        if request := self._requests.get(key):
            if (
                reason == work_pb2.FAILURE_REASON_COMPUTE_FAILED
            ):  # on the prefill worker, which read our cache
                request.blocks.distrust()
                self.prefixes.report_changes()
            self._fail(request, reason, message)

    # ---- ends that come from outside -----------------------------------------------------------------

    def cancel(self, key: Key, choices: Collection[int] = ()) -> None:
        """Cancel these choices (none named: all) without further messages."""
        if request := self._requests.get(key):
            for group in self._active_groups(request):
                if not group.ended and group.drop_choices(choices):
                    self.finish(group, "cancelled")

    def gateway_lost(self, gateway: GatewayStream) -> None:
        """Cancel every attempt that came over a stream that ended."""
        for key in list(gateway.keys):
            self.cancel(key)
        gateway.close()

    def expire(self, now: float) -> None:
        """End requests past their deadline. The gateway does so too; this holds when it is slow or gone."""
        for request in list(self._requests.values()):
            if (deadline := request.attempt.deadline) is not None and now >= deadline:
                self._fail(request, work_pb2.FAILURE_REASON_DEADLINE, request.state.value)

    def hand_back(self) -> None:
        """Return all requests to their gateways, which continue them on another worker at the next token."""
        for request in list(self._requests.values()):
            self._fail(request, work_pb2.FAILURE_REASON_DRAINING, request.state.value)

    def preempt_request(self, key: Key) -> None:
        """Preempt an attempt whose grant was aborted: the gateway prefills it again."""
        if request := self._requests.get(key):
            for group in self._active_groups(request):
                self.preempt(group)
            request.gateway.flush()

    def _fail(self, request: DecodeRequest, reason: int, message: str) -> None:
        request.failed_for = reason
        for group in self._active_groups(request):
            if not group.ended:
                group.send_failed(reason, message)
                self.finish(group, "failed")
        request.gateway.flush()

    def _active_groups(self, request: DecodeRequest) -> list[StepGroup]:
        """Return the request's step groups that hold blocks, or will."""
        return list(self._groups.get(request, ()))

    # ---- one step group ------------------------------------------------------------------------------

    def advance(self, group: StepGroup, turn: Callable[[], Outcome | None]) -> None:
        """Run a step group's turn and finish it if that has an outcome.

        An exception of the turn fails this group and no other. BlockMisuse is raised: the pool's accounting
        is common to all.
        """
        try:
            outcome = turn()
        except BlockMisuse:
            raise
        except Exception as error:
            log.exception("attempt %s", group.request.key)
            group.send_failed(work_pb2.FAILURE_REASON_INTERNAL, type(error).__name__)
            outcome = "failed"
        if outcome is not None:
            self.finish(group, outcome)

    def preempt(self, group: StepGroup) -> None:
        """Take a step group's blocks; the gateway prefills prompt and delivered tokens again."""
        if not group.ended:
            group.send_preempted()
            self.finish(group, "preempted")

    def preempt_or_fail(self, group: StepGroup) -> None:
        """Preempt a step group; fail one with its worst case reserved: it is larger than the pool."""
        if group.request.attempt.reserve_worst_case:
            group.send_failed(work_pb2.FAILURE_REASON_EXCEEDS_KV_CAPACITY, "larger than the whole KV pool")
            self.finish(group, "failed")
        else:
            self.preempt(group)
        group.request.gateway.flush()

    def finish(self, group: StepGroup, outcome: Outcome) -> None:
        """End a step group: it leaves the batch, and its blocks are released once no step writes them."""
        request = group.request
        group.ended = True
        request.outcomes.append(outcome)
        self.running.pop(group.arrival_order, None)
        if all(one.ended for one in self._groups[request]):
            self._end(request)
        if self._step.writes(group):
            self._step.abort(group)  # its blocks are released after the step
        else:
            self.release_blocks(group)

    def release_blocks(self, group: StepGroup) -> None:
        """Release the blocks of an ended step group, which no step writes any more."""
        request = group.request
        groups = self._groups[request]
        groups.remove(group)
        group.release()
        if not groups:
            del self._groups[request]
            request.blocks.close()
            if request.adapter is not None:
                request.adapter.release()
        self.blocks_changed()

    def blocks_changed(self) -> None:
        """Report what changed in the prefix cache, and serve who waits for blocks."""
        self.prefixes.report_changes()
        self.grants.blocks_freed()

    def _end(self, request: DecodeRequest) -> None:
        before = request.state
        request.move(State.ENDED)
        del self._requests[request.key]
        request.gateway.keys.pop(request.key, None)
        if before in WAITING:
            self.local.drop(request.key)
            self.grants.cancel(request.key)
        self._listeners.ended(request)


def _refuse(attempt: Attempt, gateway: GatewayStream, reason: int) -> None:
    """Fail an attempt that was not taken."""
    for choice in attempt.choices:
        gateway.failed(attempt.key, choice, reason, "")
    gateway.flush()


def _step_groups(request: DecodeRequest, arrival_order: int) -> list[StepGroup]:
    """Return the step groups of an attempt, at least one, numbered from `arrival_order` on."""
    choices = request.attempt.choices
    if request.attempt.beam_width:
        return [Beams(request, arrival_order, list(choices))]
    return [Choice(request, arrival_order + place, choice, place) for place, choice in enumerate(choices)]
