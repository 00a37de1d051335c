"""RPCs of `AdminService` about models, and aliases of models."""

from __future__ import annotations

from diptych.runtime.errors import InvalidParameter
from diptych.v1 import admin_pb2 as pb
from gateway.model.aliases import BadAlias, ModelAlias, Share
from gateway.served_models.core import ModelCore
from gateway.served_models.directory import ModelDirectory
from gateway.served_models.service import ModelService


class ModelOperations:
    """RPCs as functions of messages; one object serves all calls."""

    def __init__(self, service: ModelService) -> None:
        self._service = service

    async def load_model(self, request: pb.LoadModelRequest) -> pb.LoadModelResponse:
        """Serve a model; of one that replaces another, answer when it has workers."""
        core = await self._service.load(request.name, request.path)
        return pb.LoadModelResponse(model=describe(core))

    async def unload_model(self, request: pb.UnloadModelRequest) -> pb.UnloadModelResponse:
        """Serve a model no more, and answer when its requests have ended."""
        await self._service.unload(request.name)
        return pb.UnloadModelResponse()

    async def list_served_models(self, _: pb.ListServedModelsRequest) -> pb.ListServedModelsResponse:
        """List models and aliases, and what could not be done here that other gateways were told."""
        models = self._service.models
        return pb.ListServedModelsResponse(
            models=described(models), aliases=map(_alias, models.aliases), problems=self._service.problems
        )

    async def set_model_alias(self, request: pb.SetModelAliasRequest) -> pb.SetModelAliasResponse:
        """Let a name stand for models, or for nothing."""
        alias, shares = request.alias, None
        if alias.shares:
            parts = tuple(Share(share.model, share.weight) for share in alias.shares)
            try:
                shares = ModelAlias(alias.name, parts)
            except BadAlias as error:
                raise InvalidParameter("alias", str(error)) from None
        self._service.set_alias(alias.name, shares)
        return pb.SetModelAliasResponse()


def described(models: ModelDirectory) -> list[pb.ServedModel]:
    """Return all models, those that leave last."""
    return [*map(describe, models), *(describe(core, leaving=True) for core in models.leaving)]


def describe(core: ModelCore, *, leaving: bool = False) -> pb.ServedModel:
    """Return a model as operators see it."""
    why = core.why_not_ready()
    return pb.ServedModel(
        name=core.name,
        digest=core.digest,
        path=core.path,
        running=core.running,
        ready=not why,
        detail=why,
        leaving=leaving,
    )


def _alias(alias: ModelAlias) -> pb.ModelAlias:
    shares = (pb.ModelShare(model=share.model, weight=share.weight) for share in alias.shares)
    return pb.ModelAlias(name=alias.name, shares=shares)
