"""Real engine loops of both workers in one process, linked by real gRPC: everything but the gateway."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

import torch

from decode_worker.adapter_gate import AdapterGate
from decode_worker.draft_model import DraftModel
from decode_worker.eagle_draft import EagleDraft
from decode_worker.eagle_tree import EagleTree
from decode_worker.engine_loop import EngineLoop as DecodeLoop
from decode_worker.local_schedule import LocalBounds
from decode_worker.medusa_draft import MedusaDraft
from decode_worker.request import DecodeRequest
from decode_worker.request_manager import Listeners
from decode_worker.speculation import Drafter, Speculation
from decode_worker.tree_plan import TreePlan
from decode_worker.tree_plans import parse_plan
from diptych.engine.adapters.reader import read_adapter
from diptych.engine.backends.native.backend import NativeBackend
from diptych.engine.backends.torch.backend import TorchBackend
from diptych.engine.backends.triton.backend import TritonBackend
from diptych.engine.batch import SequenceStep
from diptych.engine.cpu_policy import CpuPolicy
from diptych.engine.heads.feature_head import FeatureHead
from diptych.engine.heads.medusa import MedusaHeads
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.kv_memory import KVLayout, KVMemory
from diptych.engine.kv.tiers.stack import TierStack
from diptych.engine.kv.window_groups import window_groups
from diptych.engine.loaded_model import Model
from diptych.engine.models.recurrent import ShortConvShape
from diptych.engine.models.shape import LayerShape, ModelShape
from diptych.engine.runner import Runner
from diptych.engine.shared_cores import SharedCores
from diptych.engine.step_pacing import StepPacing
from diptych.runtime.kv_layout_name import draft_part
from diptych.runtime.rpc import bind, make_server
from diptych.runtime.rpc_streams.grpc_stream import add_links
from diptych.runtime.rpc_streams.unix_server import UnixServer
from diptych.worker_process.adapter_calls import AdapterCalls
from diptych.worker_process.adapter_store import AdapterStore
from diptych.worker_process.draft_chunks import DraftChunks, PromptDrafts
from diptych.worker_process.eagle_chunks import EagleChunks
from diptych.worker_process.kv_tiers import KvTiers
from kvtransfer.drivers.client import HandoffClient
from kvtransfer.drivers.handshake import Fingerprint
from kvtransfer.drivers.scratch import Scratch
from kvtransfer.drivers.server import HandoffServer
from kvtransfer.protocol.lease import LeaseTimes
from kvtransfer.protocol.pull_rates import PullMode
from kvtransfer.transports.pool_memory import allocate_pool
from prefill_worker.engine_loop import EngineLoop as PrefillLoop
from prefill_worker.request import PrefillRequest
from tests.diptych.engine.backends.triton.reference_operators import REFERENCE_OPERATORS
from tests.kernels.cpu.tiny_models import shape_of, weights_of

BLOCK = 4
VOCABULARY = 61
SHAPE = shape_of(
    vocab_size=VOCABULARY,
    hidden_size=16,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    intermediate_size=20,
    max_context=256,
)
RECURRENT = replace(
    SHAPE,
    layers=(
        LayerShape(attention=False, recurrent=ShortConvShape(16, 3)),
        LayerShape(),
        LayerShape(attention=False, recurrent=ShortConvShape(16, 4, bias=True)),
        LayerShape(recurrent=ShortConvShape(16, 2)),
        LayerShape(attention=False, recurrent=ShortConvShape(16, 3), feed_forward=False),
    ),
)
"""The shape of a model with recurrent layers, whose pages take two blocks each."""
WINDOWED = replace(SHAPE, layers=tuple(LayerShape(window) for window in (9, None, 9)))
"""The shape of a model with a window, whose layers lie in blocks of their own: three a place."""
TICK_S = 0.02
MAX_BATCH = 8
DRAFT_TOKENS = 12
LOCAL_BOUNDS = LocalBounds(short=16, fallback=200, chunk=3, idle_chunk=8)


@cache
def model(shape: ModelShape | None = None) -> Model:
    """Return a random model, so that every mistake changes the tokens, with steps of a millisecond.

    `shape` is SHAPE by default, here and below.
    """
    return _own_model(shape)


def _own_model(shape: ModelShape | None = None) -> Model:
    """Return the same model on a torch backend with slots of its own."""
    shape = shape or SHAPE
    backend = TorchBackend(shape, weights_of(shape, torch.float32))
    return Model(shape, "fp32", torch.float32, backend, "torch")


def launching_model(shape: ModelShape | None = None) -> Model:
    """Return the same model on a backend that launches steps, with reference kernels on the CPU.

    One for each decode worker: what is recorded is recorded over its memory.
    """
    shape = shape or SHAPE
    backend = TritonBackend(shape, weights_of(shape, torch.float32), "cpu", REFERENCE_OPERATORS)
    return Model(shape, "fp32", torch.float32, backend, "triton")


def native_model(shape: ModelShape | None = None) -> Model:
    """Return the same model on the native backend, whose own thread computes launched steps."""
    shape = shape or SHAPE
    backend = NativeBackend(shape, weights_of(shape, torch.float32), torch.float32)
    return Model(shape, "fp32", torch.float32, backend, "native")


MODELS = {"torch": _own_model, "device": launching_model, "native": native_model}


def draft_model(kind: str, backend: str) -> Model:
    """Return a draft model: "same" as the model, "random" of another shape, or its "first" layer."""
    shape, weights = SHAPE, weights_of(SHAPE, torch.float32)
    if kind == "random":
        shape = replace(SHAPE, hidden_size=12, layers=SHAPE.layers * 2)
        weights = weights_of(shape, torch.float32, seed=8)
    elif kind == "first":
        shape = replace(SHAPE, layers=SHAPE.layers[:1])
        weights = replace(weights, layers=weights.layers[:1])
    if backend == "native":
        return Model(shape, "fp32", torch.float32, NativeBackend(shape, weights, torch.float32), "native")
    return Model(shape, "fp32", torch.float32, TorchBackend(shape, weights), "torch")


def layout(draft: Model | FeatureHead | None = None, shape: ModelShape | None = None) -> KVLayout:
    """Return the layout of blocks; where a `shape` is given, layers with a window have their own, recurrent
    ones their pages.
    """
    segment = None if draft is None else draft.kv_layout(BLOCK)
    if shape is not None and shape.recurrent_layers:
        return replace(model(shape).kv_layout(BLOCK), draft=segment)
    return replace(
        model(shape).kv_layout(BLOCK),
        draft=segment,
        windows=None if shape is None else window_groups(shape.windows),
    )


@cache
def greedy(
    prompt: tuple[int, ...], count: int, adapter: Path | None = None, shape: ModelShape | None = None
) -> tuple[int, ...]:
    """Return the model's output after `prompt`, computed alone and at once, with the adapter at a path.

    One block has all layers here.
    """
    if shape is not None and shape.recurrent_layers:
        return tuple(_computed_anew(prompt, count, shape))
    runner = Runner(model(shape), 1)
    if adapter is not None:
        runner = Runner(_own_model(), 1)
        assert runner.allow_adapters(1, 8) is None
        runner.place_adapter(0, runner.prepare_adapter(read_adapter(adapter, SHAPE, 8)))
    laid = model(shape).kv_layout(BLOCK)
    slot, blocks = None if adapter is None else 0, laid.blocks_for(len(prompt) + count)
    memory, table = KVMemory(laid, blocks), list(range(blocks))
    new, start, out = list(prompt), 0, []
    for _ in range(count):
        logits = runner.step([SequenceStep(memory, table, start, new, wants_logits=True, adapter=slot)])
        start += len(new)
        new = [int(logits[0].argmax())]
        out += new
    return tuple(out)


def _computed_anew(prompt: tuple[int, ...], count: int, shape: ModelShape) -> list[int]:
    """Return the same of a model with recurrent layers: each token from all before it, with no state read."""
    runner, laid, tokens = Runner(model(shape), 1), layout(shape=shape), list(prompt)
    places = laid.blocks_for(len(prompt) + count)
    memory = KVMemory(laid, places * laid.blocks_per_place)
    full, *pages = (range(table * places, (table + 1) * places) for table in range(laid.blocks_per_place))
    for _ in range(count):
        logits = runner.step([SequenceStep(memory, full, 0, tokens, wants_logits=True, window_tables=pages)])
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


@dataclass
class Decode:
    """A decode worker without its edges."""

    pool: BlockPool
    memory: KVMemory
    loop: DecodeLoop
    handoff: HandoffServer
    address: str
    incarnation: int
    ended: list[DecodeRequest]

    def leftovers(self) -> list[str]:
        """Return what is left although no request is; also checks the pool's accounting."""
        self.pool.invariants()
        self.loop.requests.adapters.slots.invariants()
        stats = self.handoff.stats()
        counts = {
            "requests": self.loop.num_running + self.loop.num_waiting,
            "grants": stats.grants,
            "waiting asks": stats.waiting_asks,
            "quarantined": stats.quarantined_blocks,
            "held blocks": self.pool.total - self.pool.available(),
            "adapters in use": self.loop.requests.adapters.num_uses,
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


@dataclass
class Prefill:
    """A prefill worker without its edges."""

    loop: PrefillLoop
    client: HandoffClient
    scratch: BlockPool
    scratch_memory: KVMemory
    ended: list[tuple[PrefillRequest, str]]
    tiers: list[KvTiers]
    """Tiers below the scratch blocks, once these are there; none where the worker has none."""

    def leftovers(self) -> list[str]:
        self.scratch.invariants()
        counts = {
            "requests": self.loop.num_running + self.loop.num_waiting,
            "held scratch blocks": self.scratch.total - self.scratch.available(),
            "adapters in use": self.loop.requests.adapters.num_uses,
        }
        return [f"{count} {what}" for what, count in counts.items() if count]


@dataclass
class House:
    """Both kinds of workers, stepping."""

    decodes: list[Decode] = field(default_factory=list)
    prefills: list[Prefill] = field(default_factory=list)
    shares: list[SharedCores] = field(default_factory=list)

    def leftovers(self) -> list[str]:
        return [line for worker in (*self.decodes, *self.prefills) for line in worker.leftovers()]

    async def empty(self, seconds: float = 10.0) -> list[str]:
        """Wait until nothing of any request is left; return what is, when that does not happen."""
        for _ in range(int(seconds / 0.01)):
            if not self.leftovers():
                break
            await asyncio.sleep(0.01)
        return self.leftovers()


@asynccontextmanager
async def house(
    transport: str,
    *,
    decodes: int = 1,
    prefills: int = 1,
    blocks: int = 24,
    scratch: int = 24,
    chunk: int = 8,
    backend: str = "torch",
    stretch: float | None = None,
    drafter: Drafter | None = None,
    bounds: LocalBounds = LOCAL_BOUNDS,
    draft: str | None = None,
    drafts: tuple[Sequence[str | None], Sequence[str | None]] | None = None,
    max_loras: int = 0,
    heads: MedusaHeads | None = None,
    trees: str = "",
    eagle: FeatureHead | None = None,
    shape: ModelShape | None = None,
    prefill_tiers: Callable[[int], TierStack] | None = None,
    pull_mode: PullMode = "auto",
) -> AsyncIterator[House]:
    """Start that many workers of each kind; ends them all.

    With a `backend` of "device" or "native" all workers sample tokens in their steps, and decode workers
    launch these ahead, natively as long as another worker's core is free. With a `stretch`, or natively, each
    worker has a core that it lends to the others; by the stretch decode steps are paced
    (`diptych.engine.step_pacing`). A `drafter` drafts for steps of up to DRAFT_TOKENS tokens. Decode workers
    compute prompts within `bounds` themselves, where a gateway says so. A `draft` model (`draft_model`)
    drafts in place of a drafter, or `heads` or `eagle`, with `trees` as in --speculative-tree. `drafts`
    are the draft models of each decode and each prefill worker, where they differ. Each worker has
    `max_loras` slots for adapters. `prefill_tiers` makes the tiers of each prefill worker, by its number;
    these pull from decode workers by `pull_mode`.
    """
    made, plan = House(), parse_plan(trees)
    decode_kinds, prefill_kinds = drafts or ([draft] * decodes, [draft] * prefills)
    async with AsyncExitStack() as stack:
        cores = os.memfd_create("cores")
        stack.callback(os.close, cores)
        workers = decodes + prefills
        if stretch is not None or backend == "native":
            made.shares = [SharedCores(cores, home=[n], cores=workers) for n in range(workers)]
        shares = iter(made.shares or [None] * workers)
        for number in range(decodes):
            runner = _runner(backend, next(shares), StepPacing(stretch or 1.0), shape)
            kind = decode_kinds[number]
            segment = eagle or _draft_runner(kind, backend)
            if eagle is not None:
                assert runner.give_features(eagle.layers) is None
            if heads is not None:
                assert runner.give_hidden_rows() is None
                drafter = MedusaDraft(heads, plan)
            made.decodes.append(
                await _decode(
                    stack,
                    transport,
                    number,
                    blocks,
                    runner,
                    drafter,
                    bounds,
                    segment,
                    plan,
                    shape,
                    kind or "",
                )
            )
            _add_adapters(made.decodes[-1].loop, runner, max_loras)
            made.decodes[-1].loop.requests.adapters.on_slot_free = made.decodes[-1].handoff.blocks_freed
        for number in range(prefills):
            runner = _runner(backend, next(shares), shape=shape)
            kind = prefill_kinds[number]
            segment = eagle or _draft_runner(kind, backend)
            if eagle is not None:
                assert runner.give_features(eagle.layers) is None
            tiers = None if prefill_tiers is None else prefill_tiers(number)
            made.prefills.append(
                _prefill(
                    stack,
                    transport,
                    number,
                    scratch,
                    chunk,
                    runner,
                    segment,
                    shape,
                    tiers,
                    pull_mode,
                    kind or "",
                )
            )
            loop = made.prefills[-1].loop
            _add_adapters(loop, runner, max_loras)
            loop.requests.adapters.on_slot_free = loop.requests.place_adapters
        yield made


def _draft_runner(kind: str | None, backend: str) -> Runner | None:
    return None if kind is None else Runner(draft_model(kind, backend), 1)


def _chunks(drafts: Runner | FeatureHead | None) -> PromptDrafts | None:
    if isinstance(drafts, Runner):
        return DraftChunks(drafts)
    return None if drafts is None else EagleChunks(drafts)


def _add_adapters(loop: DecodeLoop | PrefillLoop, runner: Runner, slots: int) -> None:
    loop.requests.adapters = AdapterStore(runner, slots=slots, max_rank=8)
    loop.requests.adapter_calls = AdapterCalls(loop.requests.adapters)


def _runner(
    backend: str,
    shared: SharedCores | None,
    pacing: StepPacing | None = None,
    shape: ModelShape | None = None,
) -> Runner:
    model = MODELS[backend](shape)
    return Runner(model, cpu=CpuPolicy(model.backend, 1, shared=shared, pacing=pacing))


def _fingerprint(laid: KVLayout, draft: str) -> Fingerprint:
    parts = [laid.name] if laid.draft is None else [laid.name, draft_part(laid.draft.name, "float32")]
    return Fingerprint(
        model_digest="tiny",
        dtype="fp32",
        kv_dtype="float32",
        kv_layout="+".join(parts),
        draft_digest=draft,
        block_size=BLOCK,
        num_layers=laid.num_layers,
        num_kv_heads=laid.num_kv_heads,
        head_dim=laid.head_dim,
        hash_version=1,
    )


async def _decode(
    stack: AsyncExitStack,
    transport: str,
    number: int,
    blocks: int,
    runner: Runner,
    drafter: Drafter | None,
    bounds: LocalBounds,
    drafts: Runner | FeatureHead | None,
    plan: TreePlan | None,
    shape: ModelShape | None,
    draft: str,
) -> Decode:
    laid = layout(drafts.model if isinstance(drafts, Runner) else drafts, shape)
    memory, pool = allocate_pool(laid, blocks), BlockPool(blocks)
    ended: list[DecodeRequest] = []
    runner.plan_decode(MAX_BATCH, BLOCK, laid.windows)
    runner.prepare_decode(memory.memory)
    speculation, chunks = None, _chunks(drafts)
    if isinstance(drafts, Runner):
        drafter = DraftModel(drafts, memory.memory)
    elif drafts is not None and plan is not None:
        drafter = EagleTree(drafts, memory.memory, plan)
    elif drafts is not None:
        drafter = EagleDraft(drafts, memory.memory)
    if drafter is not None:
        most = len(drafter.depths) if isinstance(drafter, MedusaDraft | EagleTree) else 3
        speculation = Speculation(drafter, most=most, tokens=max(DRAFT_TOKENS, 3 * most))
    loop = DecodeLoop(
        runner,
        memory.memory,
        pool,
        max_batch=MAX_BATCH,
        max_context=(shape or SHAPE).max_context,
        listeners=Listeners(ended.append, lambda added, removed: None),
        speculation=speculation,
        draft_chunks=chunks,
    )
    handoff = HandoffServer(
        worker_id=f"decode-{number}",
        incarnation=100 + number,
        fingerprint=_fingerprint(laid, draft),
        memory=memory,
        pool=pool,
        transports=[transport],
        running=lambda: loop.num_running,
        on_ready=loop.requests.on_ready,
        on_failed=loop.requests.on_failed,
        # A writer here is this very process: nothing may lead to its being killed.
        lease_times=LeaseTimes(interval_s=0.05, fence_after_s=20.0, relink_grace_s=20.0),
        gate=AdapterGate(loop.requests.adapter_of),
        local_chunk=bounds.idle_chunk,
    )
    loop.connect(handoff, bounds)
    await handoff.start()
    server = make_server(internal=True)
    add_links(server, [handoff.service])
    address = f"127.0.0.1:{bind(server, '127.0.0.1', 0, False)}"
    await server.start()
    stack.push_async_callback(server.stop, None)
    door = UnixServer([handoff.service])
    await door.open(address)
    stack.push_async_callback(door.close)
    stack.push_async_callback(handoff.close)
    _keep_running(stack, loop.run, loop.tick, loop.close)
    return Decode(pool, memory.memory, loop, handoff, address, 100 + number, ended)


def _prefill(
    stack: AsyncExitStack,
    transport: str,
    number: int,
    scratch: int,
    chunk: int,
    runner: Runner,
    drafts: Runner | FeatureHead | None,
    shape: ModelShape | None,
    tier_stack: TierStack | None,
    pull_mode: PullMode,
    draft: str,
) -> Prefill:
    laid = layout(drafts.model if isinstance(drafts, Runner) else drafts, shape)
    memory, pool = KVMemory(laid, scratch), BlockPool(scratch)
    ended: list[tuple[PrefillRequest, str]] = []
    loop = PrefillLoop(
        runner,
        block_size=BLOCK,
        chunk=chunk,
        enough=chunk,
        max_prompts=6,
        max_context=(shape or SHAPE).max_context,
        on_ended=lambda request, how: ended.append((request, how)),
        draft_chunks=_chunks(drafts),
    )
    tiers: list[KvTiers] = []

    def make_tiers(scratch: Scratch, pool: BlockPool) -> KvTiers | None:
        if tier_stack is None:
            return None
        tiers.append(
            KvTiers(scratch.memory, pool, tier_stack, changed=lambda: None, moved=lambda tiered, gone: None)
        )
        stack.push_async_callback(asyncio.to_thread, tiers[0].close)
        return tiers[0]

    def cache_changed(added: list[bytes], removed: list[bytes]) -> None:
        for one in tiers:
            one.cache_changed(added, removed)

    client = HandoffClient(
        worker_id=f"prefill-{number}",
        incarnation=200 + number,
        fingerprint=_fingerprint(laid, draft),
        layout=laid,
        transports=[transport],
        scratch=lambda: (memory, pool),
        on_abort=loop.requests.on_abort,
        on_peer_lost=loop.requests.on_peer_lost,
        chunk_tokens=chunk,
        tiers=make_tiers,
        cache_changed=cache_changed,
        pull_mode=pull_mode,
    )
    loop.requests.handoff = client
    stack.push_async_callback(client.close)
    _keep_running(stack, loop.run, loop.tick, loop.close)
    return Prefill(loop, client, pool, memory, ended, tiers)


def _keep_running(
    stack: AsyncExitStack,
    run: Callable[[], Awaitable[None]],
    tick: Callable[[float], None],
    close: Callable[[], None],
) -> None:
    async def ticking() -> None:
        while True:
            tick(asyncio.get_running_loop().time())  # the same clock as time.monotonic()
            await asyncio.sleep(TICK_S)

    tasks = [asyncio.ensure_future(run()), asyncio.ensure_future(ticking())]

    async def stop() -> None:
        died = [task for task in tasks if task.done()]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        close()
        if died:
            raise RuntimeError(f"a loop ended by itself: {results}")

    stack.push_async_callback(stop)
