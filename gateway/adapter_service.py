"""Loading and unloading adapters while the gateway serves, and what it agrees on with other gateways.

An adapter is served once every linked worker has it: a load that one of them refuses changes nothing, and its
answer says why. An unload takes the name away at once, lets requests end, and then frees the workers' memory.
Names and digests are shared through the directory: what one gateway loads or unloads, the others do as well,
and only the files' own digest decides what a worker serves. Without a directory each gateway has its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from diptych.runtime.adapter_files import BadAdapter, read_adapter
from diptych.runtime.discovery.shared_names import SharedNames, Values
from diptych.runtime.errors import AdapterExists, AdapterRefused, InvalidParameter, UnknownAdapter
from diptych.runtime.settings import StartupError
from gateway.adapters.adapter import Adapter
from gateway.adapters.registry import AdapterRegistry
from gateway.model.name_rule import MAX_NAME_CHARS, NAME_RULE, valid_name
from gateway.worker_pool.adapter_loads import AdapterLoads

MAX_ADAPTERS: Final = 4096
FORGET_S: Final = 1.0  # a request is counted a moment after it has let its adapter go
_log = logging.getLogger(__name__)


class AdapterService:
    """Operations on the adapters of a gateway.

    Args:
        adapters: those that it serves.
        loads: of its workers.
        max_rank: of an adapter.
        redis_url, model_digest: where they are shared, and among whom.
        forget: called with a name some time after its last request: what was counted under it may go.
        is_taken: returns whether a name is that of another model, or of its adapter.
    """

    def __init__(
        self,
        adapters: AdapterRegistry,
        loads: AdapterLoads,
        max_rank: int,
        redis_url: str,
        model_digest: str,
        forget: Callable[[str], None] = lambda name: None,
        is_taken: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self._forget = forget
        self._is_taken = is_taken
        self._adapters = adapters
        self._loads = loads
        self._max_rank = max_rank
        self._shared = SharedNames(redis_url, f"adapters:{model_digest}", self._on_shared)
        self._turn = asyncio.Lock()  # of operators: two loads of one name must not pass each other
        adapters.on_change = loads.reconcile

    def start(self, configured: Sequence[Adapter]) -> None:
        """Serve what the configuration names, and follow the other gateways. Raises StartupError."""
        for adapter in configured:
            if self._adapters.card.answers_to(adapter.name):
                raise StartupError(f"--lora {adapter.name}: is a name of the base model")
            if self._is_taken(adapter.name):
                raise StartupError(f"--lora {adapter.name}: is a name of another model")
            self._serve(adapter)
        self._shared.start()

    async def close(self) -> None:
        await self._shared.close()

    async def load(self, name: str, path: str, *, replace: bool = False) -> Adapter:
        """Serve the adapter at ``path`` as ``name``, when every linked worker has loaded it.

        Raises:
            InvalidParameter: the name or the files are none that can be served.
            AdapterExists: another content has the name, and ``replace`` is not set.
            AdapterRefused: a worker cannot load it; then none keeps it.
        """
        self._check_name(name)
        if not path or not Path(path).is_absolute():
            raise InvalidParameter("path", "must be absolute: workers look for it on their own hosts")
        try:
            adapter = await asyncio.to_thread(self.read, name, path)
        except BadAdapter as error:
            raise InvalidParameter("path", str(error)) from None
        async with self._turn:
            before = self._adapters.get(name)
            if before is not None and before.digest != adapter.digest and not replace:
                raise AdapterExists(name)
            if before is None and sum(1 for _ in self._adapters) >= MAX_ADAPTERS:
                raise InvalidParameter("name", f"{MAX_ADAPTERS} adapters are served, which is the most")
            try:
                refusals = await self._loads.load_all(adapter)
            except asyncio.CancelledError:  # the operator left: nothing else would unload it
                self._let_go(adapter)
                raise
            if refusals:
                self._let_go(adapter)
                raise AdapterRefused("; ".join(refusals))
            self._serve(adapter)
            if before is not None and before.digest != adapter.digest:
                self._let_go(before)
        _log.info("adapter %s: serves %s from %s", name, adapter.short_digest, path)
        return adapter

    async def unload(self, name: str) -> None:
        """Serve nothing under ``name`` any more; returns when workers have forgotten what had it.

        Raises UnknownAdapter.
        """
        adapter = self._adapters.remove(name)
        if adapter is None:
            raise UnknownAdapter(name)
        self._shared.drop(name)
        _log.info("adapter %s: unloads %s", name, adapter.short_digest)
        self._forget_later(name)
        self._loads.drop(adapter.digest)  # also if the operator stops waiting
        await self._adapters.unused(adapter.digest)
        if adapter.digest not in self._adapters.needed:
            await self._loads.unload_all(adapter.digest)

    def served(self) -> list[Adapter]:
        """Return what is served, by name."""
        return list(self._adapters)

    def leaving(self) -> list[Adapter]:
        """Return what only running requests keep."""
        return self._adapters.leaving()

    def workers_with(self, adapter: Adapter) -> list[str]:
        return self._loads.workers_with(adapter.digest)

    def refusals(self, adapter: Adapter) -> list[str]:
        """Return why workers do not have it, each with its worker."""
        return self._loads.refusals(adapter.digest)

    def running(self, adapter: Adapter) -> int:
        """Return how many requests of this gateway use its content."""
        return self._adapters.running(adapter.digest)

    def read(self, name: str, path: str) -> Adapter:
        """Read an adapter's files; may take a second. Raises BadAdapter."""
        return read_named(name, path, self._max_rank)

    def _check_name(self, name: str) -> None:
        if not valid_name(name):
            raise InvalidParameter("name", NAME_RULE)
        if self._adapters.card.answers_to(name):
            raise InvalidParameter("name", "is a name of the base model")
        if self._is_taken(name):
            raise InvalidParameter("name", "is a name of another model, or of its adapter")

    def _serve(self, adapter: Adapter) -> None:
        self._adapters.put(adapter)
        self._shared.put(adapter.name, adapter.to_json())

    def _let_go(self, adapter: Adapter) -> None:
        """Let workers forget a content that has no name any more, when its requests are over."""
        if all(one.digest != adapter.digest for one in self._adapters):
            self._loads.drop(adapter.digest)
            self._loads.reconcile()

    def _forget_later(self, name: str) -> None:
        asyncio.get_running_loop().call_later(FORGET_S, self._forget_unused, name)

    def _forget_unused(self, name: str) -> None:
        if any(adapter.name == name for adapter in self._adapters.leaving()):
            self._forget_later(name)
        elif self._adapters.get(name) is None:
            self._forget(name)

    def _on_shared(self, values: Values) -> None:
        """Serve what the gateways have agreed on."""
        before = {adapter.digest: adapter for adapter in self._adapters}
        self._adapters.replace_all(_parsed(values, self._adapters))
        for adapter in before.values():
            if self._adapters.get(adapter.name) is None:
                self._forget_later(adapter.name)
        for digest in before.keys() - {adapter.digest for adapter in self._adapters}:
            self._let_go(before[digest])


def read_named(name: str, path: str, max_rank: int) -> Adapter:
    """Read the adapter at ``path``. Raises BadAdapter."""
    files = read_adapter(Path(path))
    if files.rank is not None and files.rank > max_rank:
        raise BadAdapter(f"the adapter at {path} has rank {files.rank}, and --max-lora-rank is {max_rank}")
    return Adapter(name, files.digest, str(path), files.rank or 0)


def read_configured(given: Sequence[tuple[str, str]], max_rank: int) -> list[Adapter]:
    """Read the adapters of the configuration, (name, path) each. Raises StartupError."""
    found: dict[str, Adapter] = {}
    for name, path in given:
        if name in found:
            raise StartupError(f"--lora {name}: given twice")
        try:
            found[name] = read_named(name, str(Path(path).expanduser().absolute()), max_rank)
        except BadAdapter as error:
            raise StartupError(f"--lora {name}: {error}") from None
    return list(found.values())


def _parsed(values: Mapping[str, dict[str, Any]], registry: AdapterRegistry) -> dict[str, Adapter]:
    """Return the adapters among shared values; others, of newer gateways or of none, are passed over."""
    found = {}
    for name, value in values.items():
        if len(name) > MAX_NAME_CHARS or registry.card.answers_to(name):
            continue
        try:
            found[name] = Adapter.from_json(name, value)
        except ValueError:
            _log.debug("passed over the shared adapter %.64r", name)
    return found
