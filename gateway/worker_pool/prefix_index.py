"""The look-up of a prompt's cached prefixes on the workers, in the directory's index."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from diptych.runtime.block_hash import block_keys, namespace_key
from diptych.runtime.image_rows import ImageRows
from gateway.attempt.work import Job
from gateway.worker_pool.prefix_held import NOTHING, Held
from gateway.worker_pool.registry import Worker


class PrefixIndex(Protocol):
    """The index of cached blocks: how many leading keys each worker holds. Does no I/O.

    `tier_hits` counts what follows the hits and lies in a worker's tiers.
    """

    def prefix_hits(self, keys: Sequence[bytes]) -> dict[str, int]: ...
    def tier_hits(self, keys: Sequence[bytes], hits: Mapping[str, int]) -> dict[str, int]: ...


class PrefixIndexReader:
    """The look-up of requests in a prefix index.

    Args:
        secret: of the block hashes; without it no key can be made.
        model_digest: of the model that all workers serve.
    """

    def __init__(self, index: PrefixIndex, secret: bytes, model_digest: str) -> None:
        self._index = index
        self._secret = secret
        self._model_digest = model_digest
        self._cached_namespace = functools.lru_cache(maxsize=1024)(self._make_namespace)
        self._last: tuple[bytes, int, tuple[int, ...], tuple[ImageRows, ...]] | None = None
        self._last_keys: list[bytes] = []

    def namespace(self, job: Job, kept: str) -> bytes:
        """Return the key of the request's block hashes; another tenant, salt or adapter has another one.

        `kept` is `WorkerRecord.kept` of the worker whose blocks are meant, or its `kv_dtype` for those that
        lack its drafter's segment.
        """
        adapter = job.request.adapter
        return self._cached_namespace(
            job.tenant, job.request.salt, kept, b"" if adapter is None else adapter.digest
        )

    def hits(
        self, workers: Iterable[Worker], job: Job, token_ids: tuple[int, ...], *, drafted: bool = True
    ) -> dict[str, Held]:
        """Return the leading cached blocks by worker, of whichever role; the last token is always computed.

        `drafted`: those that have the segment of the worker's drafter, if there is one; else those without.

        Key chains differ by what blocks keep (`WorkerRecord.kept`) and by block size, so each pair of them
        is looked up once.
        """
        if not job.request.cache_read or job.request.prompt_logprobs is not None:
            return {}  # cached tokens have no logits
        found: dict[str, Held] = {}
        records = [worker.record for worker in workers]
        kept_of = [(one.kept if drafted else one.kv_dtype, one.block_size) for one in records]
        for kept, block_size in dict.fromkeys(kept_of):
            namespace, images = self.namespace(job, kept), job.request.images
            rows = () if images is None else images.image_rows(namespace)
            keys = self._keys(namespace, block_size, token_ids, rows)[: (len(token_ids) - 1) // block_size]
            if keys:
                cached = self._index.prefix_hits(keys)
                tiered = self._index.tier_hits(keys, cached)
                held = ((w, Held(cached.get(w, 0), tiered.get(w, 0))) for w in cached.keys() | tiered)
                found.update({w: one for w, one in held if one != NOTHING})
        return found

    def _keys(
        self, namespace: bytes, block_size: int, token_ids: tuple[int, ...], images: tuple[ImageRows, ...]
    ) -> list[bytes]:
        """Return the block keys; the last ones are kept, for most requests are routed once admitted."""
        wanted = namespace, block_size, token_ids, images
        if wanted != self._last:
            self._last = wanted
            self._last_keys = block_keys(namespace, token_ids, block_size, images=images)
        return self._last_keys

    def _make_namespace(self, tenant: str, salt: str, kept: str, adapter: bytes) -> bytes:
        return namespace_key(
            self._secret,
            tenant=tenant,
            salt=salt,
            model_digest=self._model_digest,
            kv_dtype=kept,
            adapter=adapter,
        )
