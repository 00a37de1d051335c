"""The attempts of a prefill worker, from dispatch to terminal message.

Each attempt that has asked for blocks has a task of its own (kv_sender.py) that talks to its decode worker.
One that must stop while a step is writing its blocks is aborted at the next layer, and its promise of no
further write goes out after that step.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import cast

from diptych.runtime.failpoints import reach
from diptych.worker.v1 import prefill_pb2, work_pb2
from diptych.worker_process.adapter_calls import AdapterCalls
from diptych.worker_process.adapter_store import AdapterStore
from diptych.worker_process.attempt import Attempt
from diptych.worker_process.grammar_masks import Grammars, GrammarState
from diptych.worker_process.step_thread import StepThread
from kvtransfer.drivers.client import HandoffClient
from kvtransfer.drivers.types import GrantedBlocks
from kvtransfer.protocol.messages import Key
from prefill_worker.gateway_stream import GatewayStream
from prefill_worker.image_encoding import ImageEncoding
from prefill_worker.image_fetching import ImageFetching
from prefill_worker.image_store import BadImages
from prefill_worker.kv_sender import Outcome, run_handoff
from prefill_worker.request import PrefillRequest, State, Stop
from prefill_worker.request_images import RequestImages

log = logging.getLogger(__name__)


class RequestManager:
    """Every attempt that has not ended, in order of arrival."""

    handoff: HandoffClient
    grammars: Grammars
    adapters: AdapterStore
    adapter_calls: AdapterCalls
    fetching: ImageFetching | None = None

    def __init__(
        self,
        step: StepThread[PrefillRequest],
        *,
        block_size: int,
        max_context: int,
        on_ended: Callable[[PrefillRequest, str], None],  # outcome: committed, failed or cancelled
        wake: Callable[[], None],
        images: ImageEncoding | None = None,
    ) -> None:
        self._step = step
        self._block_size = block_size
        self._max_context = max_context
        self._on_ended = on_ended
        self._wake = wake
        self._images = images
        self._requests: dict[Key, PrefillRequest] = {}
        self._tasks: dict[Key, asyncio.Task[Outcome]] = {}
        self._arrived = 0
        self.draining = False

    def __getitem__(self, key: Key) -> PrefillRequest:
        return self._requests[key]

    def __len__(self) -> int:
        return len(self._requests)

    def all(self) -> Iterable[PrefillRequest]:
        return self._requests.values()

    # ---- events from gateways and decode workers -----------------------------------------------------

    def dispatch(self, dispatch: prefill_pb2.Dispatch, gateway: GatewayStream) -> None:
        """Queue an attempt."""
        attempt = Attempt.from_work(dispatch.work, max_context=self._max_context)
        if attempt.key in self._requests:
            log.warning("attempt %s dispatched twice; the second is ignored", attempt.key)
            return
        if self.draining:
            self._drop_images(attempt.key)
            gateway.failed(attempt.key, work_pb2.Failure(reason=work_pb2.FAILURE_REASON_DRAINING))
            return
        try:
            images = self._open_images(attempt, dispatch)
        except BadImages as error:
            log.error("attempt %s: %s", attempt.key, error)
            reason = work_pb2.FAILURE_REASON_COMPUTE_FAILED
            gateway.failed(attempt.key, work_pb2.Failure(reason=reason, message=str(error)))
            return
        adapter = self.adapters.use(attempt.key, attempt.adapter) if attempt.adapter else None
        if attempt.adapter and adapter is None:
            failure = work_pb2.Failure(reason=work_pb2.FAILURE_REASON_ADAPTER_NOT_LOADED)
            gateway.failed(attempt.key, failure)
            return
        self._arrived += 1
        request = self._requests[attempt.key] = PrefillRequest(
            attempt,
            attempt.token_ids,
            gateway,
            self._arrived,
            dispatch.work.waited.ToNanoseconds() / 1e9,
            dispatch.decode_address,
            dispatch.decode_incarnation,
            adapter=adapter,
            images=images,
        )
        gateway.keys[attempt.key] = None
        if self.fetching is not None and images is not None and dispatch.HasField("encoder"):
            self.fetching.begin(attempt.key, images, dispatch.encoder)
        reach("prefill.queued")
        if attempt.grammar is not None:
            compiling = self.grammars.start(attempt.grammar, attempt.delivered_ids)
            compiling.add_done_callback(functools.partial(self._compiled, request))
        self._wake()

    def _compiled(self, request: PrefillRequest, compiling: asyncio.Task[GrammarState]) -> None:
        """Store the grammar, or fail: the gateway has compiled it before, but not with this vocabulary."""
        if compiling.cancelled() or request.state is State.ENDED:
            return
        if (error := compiling.exception()) is not None:
            log.warning("the grammar of %s: %s", request.key, error)
            self.stop(request, Stop(work_pb2.Failure(reason=work_pb2.FAILURE_REASON_NO_VALID_TOKEN)))
        else:
            request.grammar = compiling.result()
        self._wake()

    def receive_image(self, part: work_pb2.ImagePart, gateway: GatewayStream) -> None:
        """Take pixels of an attempt that is to be dispatched. A model of text has no use for them."""
        if self._images is not None:
            self._images.receive(part, gateway)

    def _open_images(self, attempt: Attempt, dispatch: prefill_pb2.Dispatch) -> RequestImages | None:
        """Return the images of a dispatched attempt. Raises BadImages."""
        if not attempt.images:
            return None
        if dispatch.HasField("encoder") and self.fetching is not None:
            return self.fetching.open(attempt)
        if self._images is None:
            raise BadImages("this worker encodes no images")
        return self._images.open(attempt)

    def _drop_images(self, key: Key) -> None:
        if self._images is not None:
            self._images.drop(key)

    def cancel(self, key: Key, choices: Collection[int] = ()) -> None:
        """Cancel these choices (none named: all) without further messages.

        The prompt is computed for the others; first tokens are sampled for all, since the decode worker knows
        them by their order.
        """
        if request := self._requests.get(key):
            request.wanted -= set(choices) or request.wanted
            if not request.wanted:
                self.stop(request, Stop())
        else:
            self._drop_images(key)

    def gateway_lost(self, gateway: GatewayStream) -> None:
        """Cancel every attempt that came over a stream that ended."""
        for key in list(gateway.keys):
            self.cancel(key)
        if self._images is not None:
            self._images.gateway_lost(gateway)
        gateway.close()

    def on_abort(self, key: Key) -> None:
        """Stop an attempt whose grant the decode worker revoked; that worker reports to the gateway."""
        self.cancel(key)

    def on_peer_lost(self, address: str, keys: Sequence[Key]) -> None:
        """Stop the attempts whose grants were lost with their decode worker."""
        failure = work_pb2.Failure(
            reason=work_pb2.FAILURE_REASON_PEER_LOST, message=f"decode worker at {address} is gone"
        )
        for key in keys:
            if request := self._requests.get(key):
                self.stop(request, Stop(failure))

    def rows_arrived(self) -> None:
        """Look again which prompts can go on."""
        self._wake()

    def rows_failed(self, key: Key, failure: work_pb2.Failure) -> None:
        """Stop an attempt that does not get the rows of its images."""
        if request := self._requests.get(key):
            self.stop(request, Stop(failure))

    def expire(self, now: float) -> None:
        """Stop requests past their deadline. The gateway does so too; this holds when it is slow or gone."""
        for request in list(self._requests.values()):
            if (deadline := request.attempt.deadline) is not None and now >= deadline:
                self._fail(request, work_pb2.FAILURE_REASON_DEADLINE)

    def hand_back(self) -> None:
        """Return all requests to their gateways, which prefill them on another worker."""
        for request in list(self._requests.values()):
            self._fail(request, work_pb2.FAILURE_REASON_DRAINING)

    def _fail(self, request: PrefillRequest, reason: work_pb2.FailureReason) -> None:
        self.stop(request, Stop(work_pb2.Failure(reason=reason, message=request.state.value)))

    # ---- one attempt ---------------------------------------------------------------------------------

    def ask(self, request: PrefillRequest) -> None:
        """Start the handoff, which asks the decode worker for blocks."""
        request.move(State.ASKED)
        task = asyncio.create_task(self._handoff(request), name=f"handoff {request.key}")
        task.add_done_callback(functools.partial(self._handoff_ended, request))
        self._tasks[request.key] = task
        reach("prefill.asked")

    async def _handoff(self, request: PrefillRequest) -> Outcome:
        on_granted = functools.partial(self._granted, request)
        return await run_handoff(request, self.handoff, self._block_size, on_granted)

    def _handoff_ended(self, request: PrefillRequest, task: asyncio.Task[Outcome]) -> None:
        """End the request with its handoff.

        As a callback of the task it runs for one that is cancelled before its first line, too.
        """
        if task.cancelled():
            outcome = Outcome(failure=request.stop.failure if request.stop is not None else None)
        elif (error := task.exception()) is not None:
            log.error("handoff of %s", request.key, exc_info=error)
            reason = work_pb2.FAILURE_REASON_INTERNAL
            outcome = Outcome(failure=work_pb2.Failure(reason=reason, message="handoff failed"))
        else:
            outcome = task.result()
        self._end(request, outcome)

    def _granted(self, request: PrefillRequest, granted: GrantedBlocks) -> None:
        """Let a request whose handoff has blocks join the next step."""
        request.granted = granted
        request.computed = granted.computed_tokens
        request.move(State.GRANTED)
        if self.fetching is not None:
            self.fetching.granted(request.key, request.computed)
        if request.adapter is not None and request.adapter.may_place():
            request.adapter.place()  # else `place_adapters`, when a slot is free
        if request.stop is not None:  # cancelled while it asked, too late for that
            request.events.put_nowait(request.stop)
        reach("prefill.granted")
        self._wake()

    def place_adapters(self) -> None:
        """Give slots to the adapters of those that have blocks, in the order in which they got these."""
        while (key := self.adapters.slots.first) is not None:
            use = self._requests[cast("Key", key)].adapter
            if use is None or not use.may_place():
                return
            use.place()
            self._wake()

    def release_adapter(self, request: PrefillRequest) -> None:
        """Release the adapter of a request that has ended, once no step reads it any more."""
        if request.adapter is None or request.adapter_released or self._step.writes(request):
            return
        request.adapter_released = True
        request.adapter.release()

    def send_first_tokens(self, request: PrefillRequest, tokens: Sequence[work_pb2.SampledToken]) -> None:
        """Send the first tokens before the handoff is complete: they do not depend on it.

        There are none for a beam search, or where only the terminal message of an earlier attempt was lost.
        """
        attempt, delivered = request.attempt, request.attempt.delivered_ids
        if attempt.beam_width:
            return
        if delivered and attempt.finish_reason(delivered[-1], len(delivered), request.grammar) is not None:
            return
        by_choice = zip(attempt.choices, tokens, strict=False)  # too few: the decode worker reports it
        wanted = {choice: token for choice, token in by_choice if choice in request.wanted}
        request.gateway.first_tokens(request.key, len(delivered), wanted, request.times())

    def stop(self, request: PrefillRequest, stop: Stop) -> None:
        """End the request without a commit, as soon as no step writes its blocks."""
        if request.stop is not None:
            return
        request.stop = stop
        if self._step.writes(request):
            self._step.abort(request)
        elif request.state is State.GRANTED:
            request.events.put_nowait(stop)
        elif request.state is State.ASKED:
            self._tasks[request.key].cancel()
        else:
            self._end(request, Outcome(failure=stop.failure))

    def _end(self, request: PrefillRequest, outcome: Outcome) -> None:
        """End a request and send its terminal message; a cancelled one has none."""
        request.move(State.ENDED)
        del self._requests[request.key]
        if self.fetching is not None:
            self.fetching.drop(request.key)
        self._tasks.pop(request.key, None)
        request.gateway.keys.pop(request.key, None)
        self.release_adapter(request)
        if outcome.committed:
            request.gateway.committed(request.key)
        elif outcome.failure is not None:
            request.failure = outcome.failure
            request.gateway.failed(request.key, outcome.failure)
        how = "committed" if outcome.committed else "cancelled" if outcome.failure is None else "failed"
        self._on_ended(request, how)
        self._wake()
