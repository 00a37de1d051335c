"""Which decode worker holds how much of a prompt already, by the directory's index."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Protocol

from diptych.runtime.block_hash import block_keys, namespace_key
from gateway.attempt.work import Job
from gateway.worker_pool.worker import Worker


class PrefixMatch(Protocol):
    """Leading keys by worker id; does no I/O."""

    def prefix_hits(self, keys: Sequence[bytes]) -> dict[str, int]: ...


class PrefixIndexReader:
    """
    Args:
        secret: of the block hashes; only who has it can make a key.
        model_digest: of the model that all workers serve.
    """

    def __init__(self, index: PrefixMatch, secret: bytes, model_digest: str) -> None:
        self._index = index
        self._secret = secret
        self._model_digest = model_digest
        self._named = functools.lru_cache(maxsize=1024)(self._make_namespace)
        self._last: tuple[bytes, int, tuple[int, ...]] | None = None
        self._last_keys: list[bytes] = []

    def namespace(self, job: Job, kv_dtype: str) -> bytes:
        """Where the request's prefixes are: nobody with another tenant or salt finds them."""
        return self._named(job.tenant, job.request.salt, kv_dtype)

    def hits(self, decode: Iterable[Worker], job: Job, token_ids: tuple[int, ...]) -> dict[str, int]:
        """Leading blocks per decode worker. Key chains differ by namespace and block size: one each."""
        if not job.request.cache_read:
            return {}
        found: dict[str, int] = {}
        for kv_dtype, block_size in dict.fromkeys((w.record.kv_dtype, w.record.block_size) for w in decode):
            keys = self._keys(self.namespace(job, kv_dtype), block_size, token_ids)
            if keys:
                found.update({w: n for w, n in self._index.prefix_hits(keys).items() if n})
        return found

    def _keys(self, namespace: bytes, block_size: int, token_ids: tuple[int, ...]) -> list[bytes]:
        """The last ones are kept: a request is looked up when it is admitted, and mostly routed at once."""
        wanted = namespace, block_size, token_ids
        if wanted != self._last:
            self._last, self._last_keys = wanted, block_keys(namespace, token_ids, block_size)
        return self._last_keys

    def _make_namespace(self, tenant: str, salt: str, kv_dtype: str) -> bytes:
        return namespace_key(
            self._secret, tenant=tenant, salt=salt, model_digest=self._model_digest, kv_dtype=kv_dtype
        )
