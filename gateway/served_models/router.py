"""Calls of the frontends, each given to the model that it names: generation, tokens, descriptions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from diptych.runtime.errors import InvalidParameter, UnknownModel
from diptych.v1 import inference_pb2 as pb
from gateway.call import Call
from gateway.model.small_requests import prompt_bytes
from gateway.served_models.core import ModelCore
from gateway.served_models.directory import ModelDirectory
from gateway.tokenizer_service import check_list_models

Named = TypeVar("Named", pb.TokenizeRequest, pb.DetokenizeRequest, pb.GetModelRequest)


class ModelRouter:
    """Router of all calls of a gateway, by what a `Generator` and a `TokenizerService` take."""

    def __init__(self, models: ModelDirectory) -> None:
        self.models = models

    async def stream(
        self, request: pb.GenerateRequest, call: Call, *, resumable: bool = False, assigned: bool = False
    ) -> None:
        """Run ``request`` as `Generator.stream` does; an alias in it becomes the name of its model.

        ``assigned``: `assign` gave it its model.
        """
        with self._generating(request, call, assigned) as core:
            await core.generator.stream(request, call, resumable=resumable)

    async def collect(
        self, request: pb.GenerateRequest, call: Call, *, assigned: bool = False
    ) -> pb.GenerateResponse:
        """Run ``request`` as `Generator.collect` does; otherwise as `stream`."""
        with self._generating(request, call, assigned) as core:
            return await core.generator.collect(request, call)

    @contextmanager
    def _generating(self, request: pb.GenerateRequest, call: Call, assigned: bool) -> Iterator[ModelCore]:
        core, name = self.models.choose(
            request.model,
            call.caller,
            session_id=request.session_id,
            resume_token=request.resume_token,
            lora=request.lora,
            size=None if assigned else partial(prompt_bytes, request),
        )
        if name != request.model:
            request.model = name
        with core.used():
            yield core

    def assign(self, requests: Sequence[pb.GenerateRequest]) -> ModelCore:
        """Return the model for requests that are answered together, in which an alias becomes its name.

        Where the first names nothing that is served, it is the first model: their generation refuses them.
        """
        first = requests[0]
        try:
            size = lambda: max(map(prompt_bytes, requests))  # noqa: E731
            core, name = self.models.choose(first.model, session_id=first.session_id, size=size)
        except (InvalidParameter, UnknownModel):
            return self.models.first
        for request in requests:
            request.model = name
        return core

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        with self._named(request, call) as core:
            return await core.tokenizer_service.tokenize(request, call)

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        with self._named(request, call) as core:
            return await core.tokenizer_service.detokenize(request, call)

    async def get_model(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        """Describe a model, an adapter, or an alias as its model with most weight."""
        asked = request.model
        with self._named(request, call) as core:
            answer = await core.tokenizer_service.get_model(request, call)
        if request.model != asked:
            answer.model.CopyFrom(_of_alias(answer.model, asked))
        return answer

    @contextmanager
    def _named(self, request: Named, call: Call) -> Iterator[ModelCore]:
        core, name = self.models.describe(request.model, call.caller)
        if name != request.model:
            request.model = name
        with core.used():
            yield core

    async def list_models(self, request: pb.ListModelsRequest, call: Call) -> pb.ListModelsResponse:
        """List each model with its adapters that the caller may use, then aliases."""
        check_list_models(request)
        return pb.ListModelsResponse(models=[*self._listed(call)])

    def _listed(self, call: Call) -> Iterable[pb.Model]:
        for core in self.models:
            yield from core.tokenizer_service.listed(call)
        for alias in self.models.aliases:
            core, _ = self.models.describe(alias.name)
            yield _of_alias(core.tokenizer_service.describe(call), alias.name)

    async def cancel_request(self, request: pb.CancelRequestRequest, call: Call) -> pb.CancelRequestResponse:
        """Cancel a live request, whatever its model. An unknown id is no error."""
        return await self.models.first.tokenizer_service.cancel_request(request, call)

    def default_name(self) -> str:
        """Return the name for calls that need none."""
        return self.models.first.name


def _of_alias(model: pb.Model, name: str) -> pb.Model:
    """Return the description of an alias, by that of a model."""
    described = pb.Model()
    described.CopyFrom(model)
    described.name, described.parent = name, model.name
    del described.aliases[:], described.lora_adapters[:]
    return described
