"""RPCs of `AdminService` about adapters, of every model."""

from __future__ import annotations

from collections.abc import Iterator

from diptych.v1 import admin_pb2 as pb
from gateway.adapters.adapter import Adapter
from gateway.served_models.core import ModelCore
from gateway.served_models.directory import ModelDirectory


class AdapterOperations:
    """RPCs as functions of messages; one object serves all calls."""

    def __init__(self, models: ModelDirectory) -> None:
        self._models = models

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Serve an adapter once all linked workers of its model have it."""
        core = self._models.for_adapter(request.model)
        adapter = await core.adapter_service.load(request.name, request.path, replace=request.replace)
        return pb.LoadAdapterResponse(adapter=_described(core, adapter))

    async def unload_adapter(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Serve an adapter no more, and answer when workers have forgotten it."""
        await self._models.with_adapter(request.name).adapter_service.unload(request.name)
        return pb.UnloadAdapterResponse()

    async def list_adapters(self, _: pb.ListAdaptersRequest) -> pb.ListAdaptersResponse:
        return pb.ListAdaptersResponse(adapters=self._all())

    def _all(self) -> Iterator[pb.Adapter]:
        for core in self._models:
            yield from (_described(core, adapter) for adapter in core.adapter_service.served())
        for core in self._models:
            yield from (_described(core, one, draining=True) for one in core.adapter_service.leaving())


def _described(core: ModelCore, adapter: Adapter, *, draining: bool = False) -> pb.Adapter:
    service = core.adapter_service
    return pb.Adapter(
        name=adapter.name,
        digest=adapter.digest.hex(),
        path=adapter.path,
        rank=adapter.rank,
        workers=service.workers_with(adapter),
        running=service.running(adapter),
        draining=draining,
        refusals=service.refusals(adapter),
        model=core.name,
    )
