"""Planted bugs: the simulator must find each bug that is patched into the real classes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from decode_worker.choices import Choice
from decode_worker.local_prefill import LocalPrefills
from decode_worker.request_manager import RequestManager
from decode_worker.sequence import AttemptBlocks
from decode_worker.window_rows import WindowRows
from diptych.engine.kv import window_prefix
from diptych.engine.kv.block_pool import BlockPool
from diptych.engine.kv.tiers import entry
from diptych.engine.kv.window_groups import WindowGroups
from diptych.engine.sampling import Sampled
from diptych.engine.vision.embedding_cache import EmbeddingCache
from diptych.runtime import block_hash
from diptych.worker_process import kv_tiers, tier_writes
from diptych.worker_process.attempt import Attempt
from gateway.admission.queue import AdmissionQueue
from gateway.attempt.types import Role, TokensArrived
from gateway.attempt.work import build_work
from gateway.session.choice_state import ChoiceState
from gateway.session.events import Emit
from gateway.worker_pool.prefix_index import PrefixIndexReader
from kvtransfer.protocol.messages import SendGrant
from kvtransfer.protocol.receiver import Receiver
from kvtransfer.protocol.transfer_table import TransferTable
from kvtransfer.transports import pull_frames, tcp
from kvtransfer.transports.registered_writers import RegisteredWriters
from prefill_worker.image_fetching import ImageFetching
from prefill_worker.request_manager import RequestManager as PrefillRequestManager
from tests.simulation.model import BLOCK_SIZE
from tests.simulation.ranks import SimulatedGroup
from tests.simulation.run import simulate
from tests.simulation.scenario import make_scenario

Patch = pytest.MonkeyPatch


def quarantine_ends_without_proof(patch: Patch) -> None:
    """Blocks are freed under a writer that was only asked to stop."""

    def quarantine(self: TransferTable, attempt: Any) -> None:
        real(self, attempt)
        self.release(attempt)

    real = TransferTable.quarantine
    patch.setattr(TransferTable, "quarantine", quarantine)


def quarantine_ends_by_the_clock(patch: Patch) -> None:
    """Blocks are freed when a writer was silent for a while."""

    def tick(self: Receiver, now: float) -> list[Any]:
        for attempt in list(self._transfers.grants):
            if attempt.phase.value == "quarantined" and self._waited_s(attempt) > 0.2:
                self._transfers.release(attempt)
        return real(self, now)

    real = Receiver.tick
    patch.setattr(Receiver, "tick", tick)


def lost_link_counts_as_death(patch: Patch) -> None:
    """A closed stream counts as a proof that the writer has stopped."""

    def link_lost(self: Receiver, writer: Any) -> list[Any]:
        link = self._links.get(writer)
        return [] if link is None else [*real(self, writer), *self.writer_dead(writer, link.transport)]

    real = Receiver.link_lost
    patch.setattr(Receiver, "link_lost", link_lost)


def digests_are_not_checked(patch: Patch) -> None:
    """Blocks of the copying transport are not verified."""

    def believed(ref: Any, index: int, payload: Any) -> bytes:
        return b"0" * 16

    patch.setattr(tcp, "block_digest", believed)


def pulled_blocks_are_not_verified(patch: Patch) -> None:
    """Blocks that are pulled enter scratch as they come."""

    def believed(ref: Any, index: int, payload: Any) -> bytes:
        return b"0" * 16

    patch.setattr(pull_frames, "pulled_block_digest", believed)


def drafts_are_not_verified(patch: Patch) -> None:
    """Drafted tokens are accepted unseen."""

    def take(self: Choice, picked: Sequence[Any]) -> Any:
        (found,) = picked
        if isinstance(found, list):
            draft = [Sampled(token) for token in self.rows[0].draft]
            picked = [[*draft, found[-1]]]
        return real(self, picked)

    real = Choice.take
    patch.setattr(Choice, "take", take)


def tokens_are_delivered_twice(patch: Patch) -> None:
    """Tokens that were delivered are delivered again."""

    def tokens(self: ChoiceState, event: TokensArrived, now: float) -> list[Any]:
        if event.position > len(self.output_ids):
            return real(self, event, now)
        before = len(self.output_ids)
        actions = real(self, event, now)
        again = event.token_ids[: before - event.position]
        return [Emit(event.position, again, self.index), *actions] if again else actions

    real = ChoiceState._tokens
    patch.setattr(ChoiceState, "_tokens", tokens)


def token_gap_is_ignored(patch: Patch) -> None:
    """A step batch that is lost goes unnoticed."""

    def tokens(self: ChoiceState, event: TokensArrived, now: float) -> list[Any]:
        if event.position and event.position % 5 == 0:
            return []
        return real(self, event._replace(position=min(event.position, len(self.output_ids))), now)

    real = ChoiceState._tokens
    patch.setattr(ChoiceState, "_tokens", tokens)


def retry_counts_output_as_prompt(patch: Patch) -> None:
    """The attempt after a preemption gets the delivered tokens as a part of the prompt."""

    def build(*args: Any) -> Any:
        work = build_work(*args)
        work.prompt_tokens = len(work.token_ids)
        return work

    patch.setattr("gateway.session.request_driver.build_work", build)


def attempts_outlive_their_gateway(patch: Patch) -> None:
    """Attempts of a lost gateway stay until their grants are requested."""
    patch.setattr(RequestManager, "gateway_lost", lambda self, gateway: gateway.close())
    patch.setattr(PrefillRequestManager, "gateway_lost", lambda self, gateway: gateway.close())


def shared_blocks_are_written(patch: Patch) -> None:
    """Copy-on-write without the copy."""
    patch.setattr(AttemptBlocks, "_writable", lambda self, block: None)


def blocks_are_released_during_the_step(patch: Patch) -> None:
    """The blocks of a sequence that ends are free while a step still writes them."""

    def finish(self: RequestManager, group: Any, outcome: Any) -> None:
        writes = self._step.writes
        self._step.writes = lambda owner: False  # type: ignore[method-assign]
        real_release, group.release = group.release, lambda: None
        try:
            if writes(group):
                self._pool.release(group.rows[0].block_ids)
                group.rows[0].block_ids = list(group.rows[0].block_ids)
                self._groups[group.request].append(group)
            else:
                group.release = real_release
            real(self, group, outcome)
        finally:
            self._step.writes = writes  # type: ignore[method-assign]

    real = RequestManager.finish
    patch.setattr(RequestManager, "finish", finish)


def local_prompt_stops_during_its_step(patch: Patch) -> None:
    """A decode worker promises to write no more of its own prompt while a step still does."""

    def revoked(self: LocalPrefills, ref: Any) -> None:
        prompt = self._prompts.get(ref.key)
        if prompt is None or not self._writes(prompt):
            real(self, ref)
            return
        prompt.revoked = True
        self._grants.stop(ref)

    real = LocalPrefills._revoked
    patch.setattr(LocalPrefills, "_revoked", revoked)


def local_prompt_skips_a_block(patch: Patch) -> None:
    """A decode worker takes a block for cached that nothing was written to."""

    def granted(self: LocalPrefills, grant: SendGrant) -> None:
        prompt, cached = self._prompts.get(grant.ref.key), grant.cached_tokens
        more = prompt is not None and cached + BLOCK_SIZE < len(prompt.token_ids)
        real(self, replace(grant, cached_tokens=cached + BLOCK_SIZE * more))

    real = LocalPrefills._granted
    patch.setattr(LocalPrefills, "_granted", granted)


def quarantined_blocks_stay_in_the_cache(patch: Patch) -> None:
    """Blocks enter the prefix cache when they are granted, before they are verified."""

    def try_grant(self: TransferTable, attempt: Any, **options: Any) -> Any:
        grant = real(self, attempt, **options)
        if grant is not None:
            parent = b""
            for block, key in zip(attempt.open_grant.block_ids, attempt.attached.keys, strict=False):
                self._pool.insert(block, key, parent)
                parent = key
        return grant

    real = TransferTable.try_grant
    patch.setattr(TransferTable, "try_grant", try_grant)


def shared_block_is_not_released(patch: Patch) -> None:
    """One reference too many stays on a shared prefix block."""

    def release(self: BlockPool, blocks: Any) -> None:
        real(self, [b for b in blocks if self._refs[b] != 2])

    real = BlockPool.release
    patch.setattr(BlockPool, "release", release)


def adapters_share_cached_blocks(patch: Patch) -> None:
    """The key of a block leaves out the adapter that computed it."""

    def namespace(self: PrefixIndexReader, job: Any, kv_dtype: str) -> bytes:
        return self._make_namespace(job.tenant, job.request.salt, kv_dtype, b"")

    patch.setattr(PrefixIndexReader, "namespace", namespace)


def later_attempts_forget_the_adapter(patch: Patch) -> None:
    """A request that was recovered goes on with the base model."""
    of = Attempt.from_work.__func__  # type: ignore[attr-defined]

    def from_work(cls: type[Attempt], work: Any, *, max_context: int) -> Attempt:
        attempt = of(cls, work, max_context=max_context)
        return replace(attempt, adapter=b"") if work.id.attempt > 1 else attempt

    patch.setattr(Attempt, "from_work", classmethod(from_work))


def queued_tokens_are_not_released(patch: Patch) -> None:
    """A request that leaves the queue before it is admitted keeps its tokens there."""

    def leave(self: AdmissionQueue, ticket: Any, *args: Any) -> Any:
        if not ticket.admitted:
            ticket.prefilled = True
        return real(self, ticket, *args)

    real = AdmissionQueue.leave
    patch.setattr(AdmissionQueue, "leave", leave)


def one_dead_rank_counts_as_all(patch: Patch) -> None:
    """The death of one process of a writer counts as a proof that the writer has stopped."""

    def died(self: RegisteredWriters, writer: Any, process: Any) -> None:
        processes = self._writers.get(writer, {})
        for other in list(processes.values()):
            other.close()
            real(self, writer, other)

    real = RegisteredWriters._process_died
    patch.setattr(RegisteredWriters, "_process_died", died)


def step_ends_with_rank_0(patch: Patch) -> None:
    """A step of a group is over when rank 0 has written its share."""

    def write(self: SimulatedGroup, writes: Any, duration: float, finish: Callable[[], None]) -> None:
        def first() -> None:
            writes[0]()
            finish()

        real(self, [first, *writes[1:]], duration, lambda: None)

    real = SimulatedGroup.write
    patch.setattr(SimulatedGroup, "write", write)


def stored_blocks_are_not_verified(patch: Patch) -> None:
    """Blocks that tiers hold are believed as they are."""
    patch.setattr(entry, "_digest", lambda head, payload: bytes(16))


def evicted_blocks_are_written_during_their_copy(patch: Patch) -> None:
    """A block is given out while a thread copies it for the tiers."""

    def evicted(self: kv_tiers.KvTiers, key: bytes, block: int) -> None:
        if key != self._copying:
            real(self, key, block)

    real = kv_tiers.KvTiers._evicted
    patch.setattr(kv_tiers.KvTiers, "_evicted", evicted)


def loaded_blocks_are_granted_before_they_are_copied(patch: Patch) -> None:
    """A block enters the prefix cache when it was found in a tier."""
    patch.setattr(tier_writes, "write_block", lambda memory, block, payload: None)


def loaded_block_is_one_place_off(patch: Patch) -> None:
    """A prefill worker loads what tiers have into the blocks before those that lack it."""

    async def fill(self: kv_tiers.KvTiers, keys: Any, first: int, blocks: Any) -> Any:
        return await real(self, keys, first, [*blocks[1:], *blocks[:1]])

    real = kv_tiers.KvTiers.fill
    patch.setattr(kv_tiers.KvTiers, "fill", fill)


def hits_ignore_windowed_blocks(patch: Patch) -> None:
    """A cached prefix is used though the windowed blocks before its end are gone."""
    patch.setattr(window_prefix, "usable_places", lambda keys, end, reach, holds: end)


def windowed_blocks_are_not_copied(patch: Patch) -> None:
    """Copy-on-write copies the full block of a place alone."""
    patch.setattr(WindowRows, "own", lambda self, sequence, place, writable: None)


def ring_is_too_short(patch: Patch) -> None:
    """A chunk of a prompt writes where it still reads."""
    real = WindowGroups.span
    patch.setattr(WindowGroups, "span", lambda self, chunk, size: real(self, chunk, size) - 2)


def windowed_blocks_are_read_while_free(patch: Patch) -> None:
    """Blocks behind the window are given up a place too early."""
    real = WindowGroups.first_kept
    patch.setattr(WindowGroups, "first_kept", lambda self, at, size: max(0, real(self, at, size)) + (at > 20))


def images_share_cached_blocks(patch: Patch) -> None:
    """The key of a block leaves out which image its rows are of."""
    patch.setattr(block_hash, "_rows_within", lambda images, begin, block_size: b"")


def lost_encode_workers_cost_nothing(patch: Patch) -> None:
    """A prompt whose encode worker is lost waits for its rows: neither worker nor gateway moves it."""

    def down(self: ChoiceState, worker_id: str, graceful: bool, now: float) -> Any:
        return [] if worker_id == self.working.get(Role.ENCODE) else real(self, worker_id, graceful, now)

    real = ChoiceState._worker_down
    patch.setattr(ChoiceState, "_worker_down", down)
    patch.setattr(ImageFetching, "failed", lambda self, key, failure: None)


def embeddings_are_kept_without_their_image(patch: Patch) -> None:
    """Embeddings of an image are taken for those of another one."""

    def get(self: EmbeddingCache, digest: bytes) -> Any:
        return next(iter(self._found.values()), None)

    patch.setattr(EmbeddingCache, "get", get)


PLANTED: list[Any] = [
    (hits_ignore_windowed_blocks, "pulls", 40),
    (windowed_blocks_are_not_copied, "crowd", 30),
    (ring_is_too_short, "writers", 60),
    pytest.param(windowed_blocks_are_read_while_free, "everything", 40, marks=pytest.mark.full),
    (one_dead_rank_counts_as_all, "groups", 90),
    (step_ends_with_rank_0, "groups", 10),
    (drafts_are_not_verified, "everything", 40),
    (quarantine_ends_without_proof, "writers", 60),
    (quarantine_ends_by_the_clock, "writers", 250),
    pytest.param(lost_link_counts_as_death, "writers", 250, marks=pytest.mark.full),
    (digests_are_not_checked, "copies", 40),
    (pulled_blocks_are_not_verified, "pulls", 60),
    (tokens_are_delivered_twice, "everything", 40),
    (token_gap_is_ignored, "everything", 10),
    (retry_counts_output_as_prompt, "crowd", 40),
    (attempts_outlive_their_gateway, "everything", 100),
    (shared_blocks_are_written, "crowd", 10),
    (blocks_are_released_during_the_step, "writers", 60),
    (quarantined_blocks_stay_in_the_cache, "everything", 10),
    (queued_tokens_are_not_released, "everything", 60),
    (shared_block_is_not_released, "everything", 10),
    (local_prompt_stops_during_its_step, "writers", 60),
    (local_prompt_skips_a_block, "everything", 10),
    (adapters_share_cached_blocks, "pulls", 40),
    (stored_blocks_are_not_verified, "tiers", 80),
    pytest.param(
        evicted_blocks_are_written_during_their_copy,
        "tiers",
        400,
        marks=(pytest.mark.full, pytest.mark.timeout(900)),
    ),
    (loaded_blocks_are_granted_before_they_are_copied, "tiers", 10),
    (loaded_block_is_one_place_off, "tiers", 40),
    (later_attempts_forget_the_adapter, "everything", 40),
    (images_share_cached_blocks, "pulls", 40),
    (lost_encode_workers_cost_nothing, "everything", 120),
    (embeddings_are_kept_without_their_image, "everything", 10),
]


@pytest.mark.parametrize(
    ("plant", "theme_name", "within"), PLANTED, ids=lambda value: getattr(value, "__name__", None)
)
def test_planted_bug_is_found(
    plant: Callable[[Patch], None], theme_name: str, within: int, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    found = (seed for seed in range(within) if simulate(make_scenario(seed, theme_name)).violation)
    assert next(found, None) is not None, f"{within} seeds do not show it"
