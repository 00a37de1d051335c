"""The adapters of this gateway by name, and how many of its requests use each. No I/O.

A name stands for one content at a time. Requests hold the adapter that they began with: a name that gets
another content, or is unloaded, leaves them alone, and the old content is let go once none uses it any more.

Changes are made on the event loop's thread. Look-ups may come from any: they read a dictionary that is never
changed, only replaced.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

from diptych.runtime.errors import InvalidParameter, UnknownAdapter, UnknownModel
from gateway.access.access import Caller
from gateway.adapters.adapter import Adapter
from gateway.model.served_model import ModelCard


class AdapterRegistry:
    """Names, adapters and their users.

    Args:
        card: of the base model, whose names no adapter may have.

    ``on_change`` is called after every change of what is named or used.
    """

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self.on_change: Callable[[], None] = lambda: None
        self._by_name: Mapping[str, Adapter] = MappingProxyType({})
        self._uses: Counter[bytes] = Counter()
        self._used: dict[bytes, Adapter] = {}  # those that requests hold, named or not
        self._unused: dict[bytes, asyncio.Event] = {}  # set when no request holds it any more

    def __iter__(self) -> Iterator[Adapter]:
        """Iterate over what is served, by name."""
        return iter(sorted(self._by_name.values(), key=lambda adapter: adapter.name))

    def get(self, name: str) -> Adapter | None:
        return self._by_name.get(name)

    def visible(self, caller: Caller) -> list[Adapter]:
        """Return what this caller may use, by name."""
        return [adapter for adapter in self if caller.may_use(adapter.name)]

    # --- choice of a request --------------------------------------------------------------------------

    def choose(self, model: str, lora: str, caller: Caller, field: str = "lora") -> Adapter | None:
        """Return the adapter that a request names by ``model`` or ``lora``; None: the base model, or none.

        One that this caller may not use is as good as none: names may be others' secrets.

        Raises:
            UnknownAdapter: ``lora`` names none.
            UnknownModel: ``model`` names something else than ``lora`` or its base model.
            InvalidParameter: both name an adapter, and not the same one.
        """
        if not lora and (not self._by_name or self.card.answers_to(model)):
            return None
        name = lora or model
        adapter = self.get(name) if caller.may_use(name) else None
        if not lora:
            return adapter
        if adapter is None:
            raise UnknownAdapter(lora)
        if model and model != lora and not self.card.answers_to(model):
            if self.get(model) is None:
                raise UnknownModel(model, self.card.name)
            raise InvalidParameter(field, "is another adapter than the one that model names")
        if not model:
            raise InvalidParameter("model", "is required")
        return adapter

    @contextmanager
    def use(self, adapter: Adapter | None) -> Iterator[None]:
        """Hold the adapter that was chosen just now, while its request runs."""
        if adapter is None:
            yield
            return
        digest = adapter.digest
        self._uses[digest] += 1
        self._used[digest] = adapter
        try:
            yield
        finally:
            self._uses[digest] -= 1
            if not self._uses[digest]:
                del self._uses[digest], self._used[digest]
                if (unused := self._unused.pop(digest, None)) is not None:
                    unused.set()
                if self.get(adapter.name) != adapter:  # else workers keep it
                    self.on_change()

    # --- what is served -------------------------------------------------------------------------------

    def put(self, adapter: Adapter) -> None:
        """Serve an adapter under its name, in place of what had it."""
        self._replace({**self._by_name, adapter.name: adapter})

    def remove(self, name: str) -> Adapter | None:
        """Serve nothing under this name any more; return what had it."""
        adapter = self.get(name)
        if adapter is not None:
            self._replace({key: one for key, one in self._by_name.items() if key != name})
        return adapter

    def replace_all(self, adapters: Mapping[str, Adapter]) -> None:
        """Serve these and no others."""
        self._replace(adapters)

    def _replace(self, adapters: Mapping[str, Adapter]) -> None:
        if dict(adapters) != dict(self._by_name):
            self._by_name = MappingProxyType(dict(adapters))
            self.on_change()

    # --- what workers need ----------------------------------------------------------------------------

    @property
    def needed(self) -> dict[bytes, Adapter]:
        """The adapters that workers must have, by digest: what is named, and what requests still hold."""
        return {**self._used, **{adapter.digest: adapter for adapter in self._by_name.values()}}

    def running(self, digest: bytes) -> int:
        """Return how many requests of this gateway hold it."""
        return self._uses.get(digest, 0)

    async def unused(self, digest: bytes) -> None:
        """Wait until no request holds it."""
        if self.running(digest):
            await self._unused.setdefault(digest, asyncio.Event()).wait()

    def leaving(self) -> list[Adapter]:
        """Return those that only running requests keep."""
        named = {adapter.digest for adapter in self._by_name.values()}
        return [adapter for digest, adapter in self._used.items() if digest not in named]
