"""What needs no worker: Tokenize, Detokenize, ListModels, GetModel, CancelRequest.

Free of any protocol, like the generator: a door parses its wire and catches `DiptychError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from diptych.parameters import OFF, PARAMETERS, SAMPLING_NUMBERS
from diptych.v1 import inference_pb2 as pb
from gateway import tokenizer_service as text_calls
from gateway.call import Call
from gateway.cooperative_yield import PORTION, Yielder, slices
from gateway.model.model_card import ModelCard
from gateway.model.served_model import ServedModel
from gateway.request import field_checks
from gateway.request.structured_output import STRUCTURED_OUTPUTS
from gateway.session.live_requests import LiveRequests
from gateway.tokenizer_pool import TokenizerPool


class TextRpcs:
    """One object serves all calls.

    Args:
        token_limit: prompt and output together, as the workers have it now; None without workers.
        block_size: of the workers' KV blocks, likewise.
    """

    def __init__(
        self,
        model: ServedModel,
        live: LiveRequests,
        texts: TokenizerPool,
        *,
        token_limit: Callable[[], int | None],
        block_size: Callable[[], int | None],
    ) -> None:
        self._model = model
        self._live = live
        self._texts = texts
        self._token_limit = token_limit
        self._block_size = block_size

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        work = partial(text_calls.tokenize, request, self._model)
        found = await self._texts.read(request, call.caller.tenant, work)
        return await tokenized(found, self._model.card.max_context)

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        work = partial(text_calls.detokenize, request, self._model)
        text = await self._texts.read(request, call.caller.tenant, work)
        return pb.DetokenizeResponse(text=text)

    async def list_models(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        text_calls.check_list_models(request)
        return pb.ListModelsResponse(models=[self.describe()])

    async def get_model(self, request: pb.GetModelRequest) -> pb.GetModelResponse:
        field_checks.model_name(request.model, self._model.card)
        return pb.GetModelResponse(model=self.describe())

    async def cancel_request(self, request: pb.CancelRequestRequest, call: Call) -> pb.CancelRequestResponse:
        """No error for an id that is not there: the request may have ended a moment ago."""
        request_id = field_checks.existing_request_id(request.request_id)
        was_running = self._live.cancel(call.caller.tenant, request_id)
        return pb.CancelRequestResponse(was_running=was_running)

    def describe(self) -> pb.Model:
        """The served model, as the public API has it."""
        card = self._model.card
        limit = min(self._token_limit() or card.max_context, card.max_context)
        model = pb.Model(
            name=card.name,
            aliases=card.aliases,
            max_context_length=card.max_context,
            max_output_tokens=limit - 1,  # after the shortest prompt
            vocab_size=card.vocab_size,
            eos_token_ids=card.eos_token_ids,
            capabilities=pb.Capabilities(
                max_logprobs=int(PARAMETERS["logprobs"].high or 0),
                max_n=int(PARAMETERS["n"].high or 0),
                structured_outputs=STRUCTURED_OUTPUTS if card.eos_token_ids else (),
                priority=True,
                cache_salt=True,
                chat=card.has_chat_template,
            ),
            tokenizer_digest=card.tokenizer_digest,
            default_sampling=_default_sampling(card),
        )
        block_size = self._block_size()
        if block_size is not None:
            model.kv_block_size = block_size
        return model


async def tokenized(found: text_calls.Tokenized, max_context: int) -> pb.TokenizeResponse:
    """A message of many offsets is made in turns with everybody's tokens."""
    response = pb.TokenizeResponse(token_ids=found.ids, tokens=found.tokens, max_context_length=max_context)
    turns = Yielder()
    for some in slices(found.offsets, PORTION):
        for start, end in some:
            response.offsets.add(start=start, end=end)
        await turns.done(len(some))
    return response


def _default_sampling(card: ModelCard) -> pb.SamplingParams:
    """Return the values that apply where a request has none; a seed is random."""
    names = SAMPLING_NUMBERS.keys() - {"seed"}
    values = {name: getattr(card.defaults, name, OFF[name]) for name in names}
    return pb.SamplingParams(**values, n=1)
