"""Models that come, are replaced and go while the gateway serves, and names that come to stand for others.

A new name is served at once. A model that takes the place of another content under its name does so when it
has workers of both roles, so that no request finds it without. What is replaced or unloaded serves the
requests that it has. What one gateway is told the others do as well: `gateway.served_models.shared`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final

from diptych.runtime.errors import InvalidParameter, NoReadyWorker, UnknownModel
from diptych.runtime.settings import StartupError
from gateway.config import GatewaySettings
from gateway.model.aliases import BadAlias, ModelAlias
from gateway.model.name_rule import NAME_RULE, valid_name
from gateway.model.named_models import NamedModel
from gateway.model.shared_record import Kind, SharedRecord
from gateway.served_models.core import ModelCore
from gateway.served_models.directory import ModelDirectory
from gateway.served_models.loading import LoadedModel, load_model

MAX_MODELS: Final = 256
READY_S: Final = 60.0
"""Time in which a model that replaces another one must have workers."""
FOLLOW_READY_S: Final = 10.0
"""Time for a replacement that has workers at another gateway already."""
FORGET_S: Final = 1.0  # a request is counted a moment after it has let its model go
_LOOK_S: Final = 0.05
_log = logging.getLogger(__name__)


class ModelService:
    """Operations on the models of a gateway.

    Args:
        forget: called with a name some time after its last request: what was counted under it may go.
    """

    def __init__(
        self, models: ModelDirectory, settings: GatewaySettings, forget: Callable[[str], None]
    ) -> None:
        self.models = models
        self.on_change: Callable[[SharedRecord], None] = lambda change: None  # called with what it was told
        self.problems: list[str] = []  # what it could not do as other gateways did
        self._settings = settings
        self._forget = forget
        self._turn = asyncio.Lock()  # of operators: two loads of one name must not pass each other
        self._discarding: set[asyncio.Task[None]] = set()

    async def load(self, name: str, path: str) -> ModelCore:
        """Serve the model at ``path`` as ``name``; return it at once where it does so already.

        Raises:
            InvalidParameter: the name or the files are none that can be served.
            NoReadyWorker: it is to replace another content, and no workers of it came in time.
        """
        if not valid_name(name):
            raise InvalidParameter("name", NAME_RULE)
        if not path or not Path(path).is_absolute():
            raise InvalidParameter("path", "must be absolute")
        async with self._turn:
            loaded = await self._readable(name, path)
            core = self._served_already(loaded) or await self._serve(loaded, READY_S)
            self.on_change(SharedRecord(Kind.MODEL, name, path, core.digest))
            return core

    async def unload(self, name: str) -> None:
        """Serve a model no more; return when its requests have ended.

        Raises UnknownModel, InvalidParameter.
        """
        async with self._turn:
            discarding = self._remove(name)
            self.on_change(SharedRecord(Kind.MODEL, name))
        await asyncio.shield(discarding)  # also if the operator stops waiting

    def set_alias(self, name: str, shares: ModelAlias | None) -> None:
        """Let a name stand for models, or with None for nothing. Raises InvalidParameter, UnknownModel."""
        self._set_alias(name, shares)
        self.on_change(SharedRecord(Kind.ALIAS, name, shares=() if shares is None else shares.shares))

    async def follow(self, change: SharedRecord, counts: Callable[[], bool], *, at_once: bool) -> None:
        """Do what another gateway was told, and do not wait for requests that it ends.

        Args:
            counts: returns whether the change still counts.
            at_once: a model takes its name before it has workers, for no request has come yet.

        Raises:
            InvalidParameter, UnknownModel, NoReadyWorker: it cannot be done here, or not yet.
        """
        async with self._turn:
            if not counts():
                return
            if change.kind is Kind.ALIAS:
                self._set_alias(change.name, change.alias() if change.shares else None)
            elif change.digest:
                loaded = await self._readable(change.name, change.path)
                if loaded.digest != change.digest:
                    raise InvalidParameter("path", f"{change.path} has other content at another gateway")
                if self._served_already(loaded) is None:
                    await self._serve(loaded, 0.0 if at_once else FOLLOW_READY_S)
            else:
                self._remove(change.name)

    async def close(self) -> None:
        """Stop waiting for requests of models that leave; the models are closed with the others."""
        for task in list(self._discarding):
            task.cancel()
        await asyncio.gather(*self._discarding, return_exceptions=True)

    async def _readable(self, name: str, path: str) -> LoadedModel:
        """Return the model at ``path``, if it may have the name. Raises InvalidParameter."""
        if not self.models.is_free(name):
            raise InvalidParameter("name", "is an alias, or a name of another model or its adapter")
        loaded = await self._read(name, path)
        if self._served_already(loaded) is None and len(self.models) >= MAX_MODELS:
            raise InvalidParameter("name", f"{MAX_MODELS} models are served, which is the most")
        return loaded

    def _served_already(self, loaded: LoadedModel) -> ModelCore | None:
        """Return the model of this name and content; None: it is not served. Raises InvalidParameter."""
        served = next((core for core in self.models if core.digest == loaded.digest), None)
        if served is not None and served.name != loaded.model.card.name:
            raise InvalidParameter("path", f"is the model {served.name}: let an alias stand for it")
        return served

    def _remove(self, name: str) -> asyncio.Task[None]:
        core = next((core for core in self.models if core.name == name), None)
        if core is None:
            raise UnknownModel(name, *(core.name for core in self.models))
        self.models.remove(core)
        _log.info("model %s: unloads %s", name, core.digest[:12])
        return self._discard(core)

    def _set_alias(self, name: str, shares: ModelAlias | None) -> None:
        if shares is None:
            self.models.drop_alias(name)
        else:
            try:
                self.models.set_alias(shares)
            except BadAlias as error:
                raise InvalidParameter("alias", str(error)) from None
        _log.info("alias %s: %s", name, "gone" if shares is None else shares.shares)

    async def _read(self, name: str, path: str) -> LoadedModel:
        try:
            return await asyncio.to_thread(load_model, self._settings, NamedModel(name, path))
        except (StartupError, ValueError, OSError) as error:
            raise InvalidParameter("path", str(error)) from None

    async def _serve(self, loaded: LoadedModel, ready_s: float) -> ModelCore:
        """Serve a model. One that replaces another has so long to have workers; 0 = it needs none."""
        core = self.models.make(loaded)
        core.adapter_service.start(())
        core.start()
        if ready_s and any(one.name == core.name for one in self.models):
            try:
                async with asyncio.timeout(ready_s):
                    while core.why_not_ready():  # noqa: ASYNC110
                        await asyncio.sleep(_LOOK_S)
            except BaseException as error:
                missing = core.worker_pool.registry.missing_role()
                await asyncio.shield(self._discard(core))
                if isinstance(error, TimeoutError):
                    raise NoReadyWorker("" if missing is None else missing.value) from None
                raise
        before = self.models.add(core)
        _log.info("model %s: serves %s from %s", core.name, core.digest[:12], core.path)
        if before is not None:
            self._discard(before)
        return core

    def _discard(self, core: ModelCore) -> asyncio.Task[None]:
        async def discard() -> None:
            await self.models.discard(core)
            await asyncio.sleep(FORGET_S)
            if self.models.get(core.name) is None:
                self._forget(core.name)

        task = asyncio.create_task(discard(), name=f"unload {core.name}")
        self._discarding.add(task)
        task.add_done_callback(self._discarding.discard)
        return task
