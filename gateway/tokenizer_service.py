"""Calls that need no worker: Tokenize, Detokenize, GetModel, CancelRequest, and what ListModels lists.

Free of any protocol, like `gateway.generate`: a frontend parses its wire format and catches `DiptychError`.
Errors are those of `gateway.request.validation`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from diptych.parameters import OFF, PARAMETERS, SAMPLING_NUMBERS
from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.adapters.adapter import Adapter
from gateway.adapters.registry import AdapterRegistry
from gateway.call import Call
from gateway.cooperative_yield import PORTION, Yielder, slices
from gateway.images.intake import ImageIntake
from gateway.model.images import IMAGE, TEXT, PreparedImage
from gateway.model.served_model import ModelCard, ServedModel
from gateway.request import field_checks
from gateway.request.structured_output import STRUCTURED_OUTPUTS
from gateway.request.validate_prompt import chat_parts, chat_tools, check_text, given_ids
from gateway.request.validation import skips_special
from gateway.session.live_requests import LiveRequests
from gateway.tokenizer_pool import TokenizerPool


class TokenizerService:
    """Service of the calls that need no worker; one object serves all calls of a model.

    Args:
        digest: of the model's files.
        token_limit: returns the workers' current bound of prompt and output together; None without workers.
        block_size: returns the tokens per KV block of the workers, likewise.
        images: what takes the images of conversations; without it they are refused.
    """

    def __init__(
        self,
        model: ServedModel,
        digest: str,
        adapters: AdapterRegistry,
        live: LiveRequests,
        pool: TokenizerPool,
        *,
        token_limit: Callable[[], int | None],
        block_size: Callable[[], int | None],
        images: ImageIntake | None = None,
    ) -> None:
        self._model = model
        self._digest = digest
        self._adapters = adapters
        self._live = live
        self._pool = pool
        self._token_limit = token_limit
        self._block_size = block_size
        self._images = images

    async def tokenize(self, request: pb.TokenizeRequest, call: Call) -> pb.TokenizeResponse:
        adapter = self._adapter(request.model, call) is not None
        images: tuple[PreparedImage, ...] = ()
        if self._images is not None and request.WhichOneof("prompt") == "chat":
            images = await self._images.prepare(request.chat, call.caller.tenant)
        work = partial(tokenize, request, self._model, adapter=adapter, images=images)
        found = await self._pool.run(request, call.caller.tenant, work)
        return await tokenize_response(found, self._model.card.max_context)

    async def detokenize(self, request: pb.DetokenizeRequest, call: Call) -> pb.DetokenizeResponse:
        adapter = self._adapter(request.model, call)
        work = partial(detokenize, request, self._model, adapter=adapter is not None)
        text = await self._pool.run(request, call.caller.tenant, work)
        return pb.DetokenizeResponse(text=text)

    def listed(self, call: Call) -> list[pb.Model]:
        """Return the model, then the adapters that the caller may use."""
        adapters = self._adapters.visible(call.caller)
        base = self.describe(call)
        return [base, *(_of_adapter(base, one.name) for one in adapters)]

    async def get_model(self, request: pb.GetModelRequest, call: Call) -> pb.GetModelResponse:
        adapter = self._adapter(request.model, call)
        if adapter is None:
            field_checks.model_name(request.model, self._model.card)
        base = self.describe(call)
        return pb.GetModelResponse(model=base if adapter is None else _of_adapter(base, adapter.name))

    def _adapter(self, name: str, call: Call) -> Adapter | None:
        """Return the adapter that a call names, if it is one's."""
        return self._adapters.choose(name, "", call.caller)

    async def cancel_request(self, request: pb.CancelRequestRequest, call: Call) -> pb.CancelRequestResponse:
        """Cancel a live request. An unknown id is no error: the request may have just ended."""
        request_id = field_checks.existing_request_id(request.request_id)
        was_running = self._live.cancel_request(call.caller.tenant, request_id)
        return pb.CancelRequestResponse(was_running=was_running)

    def describe(self, call: Call) -> pb.Model:
        """Return the served model as the public API shows it to this caller."""
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
                tool_calls=self._model.tools.call_format.name if self._model.tools.call_format else "",
                reasoning=self._model.reasoning.name if self._model.reasoning else "",
                input_modalities=(TEXT,) if self._model.images is None else (TEXT, IMAGE),
            ),
            tokenizer_digest=card.tokenizer_digest,
            digest=self._digest,
            lora_adapters=[adapter.name for adapter in self._adapters.visible(call.caller)],
            default_sampling=_default_sampling(card),
        )
        block_size = self._block_size()
        if block_size is not None:
            model.kv_block_size = block_size
        return model


def _of_adapter(base: pb.Model, name: str) -> pb.Model:
    """Return the model that an adapter makes of its base."""
    model = pb.Model()
    model.CopyFrom(base)
    model.name, model.parent = name, base.name
    del model.aliases[:], model.lora_adapters[:]
    return model


class Tokenized(NamedTuple):
    """Tokens of a prompt. ``tokens`` and ``offsets`` are empty unless the request wants them.

    An offset is [start, end) in characters.
    """

    ids: list[int]
    tokens: list[str]
    offsets: list[tuple[int, int]]


def tokenize(
    request: pb.TokenizeRequest,
    model: ServedModel,
    *,
    adapter: bool = False,
    images: tuple[PreparedImage, ...] = (),
) -> Tokenized:
    """Return the ids that a generation request with the same prompt would run on.

    ``adapter``: it names one, which has its base model's tokenizer. ``images``: the conversation's, in order.
    """
    if not adapter:
        field_checks.model_name(request.model, model.card)
    kind = request.WhichOneof("prompt")
    if kind == "text":
        return _tokenize_text(request, model)
    if kind != "chat":
        raise InvalidParameter("prompt", "one of text and chat is required")
    if request.add_special_tokens:
        raise UnsupportedFeature("add_special_tokens", "the chat template writes its own special tokens")
    if request.return_offsets:
        raise UnsupportedFeature("return_offsets", "a chat prompt has no text to give positions in")
    parts = chat_parts(request.chat, model, chat_tools(request.chat, model), images)
    ids = model.tokenizer.encode_parts(parts)
    tokens = [model.tokenizer.token_text(token_id) for token_id in ids] if request.return_tokens else []
    return Tokenized(ids, tokens, [])


def detokenize(request: pb.DetokenizeRequest, model: ServedModel, *, adapter: bool = False) -> str:
    """Return the text of the request's ids; empty without ids. ``adapter``: as of `tokenize`."""
    if not adapter:
        field_checks.model_name(request.model, model.card)
    if len(request.token_ids) > limits.MAX_DETOKENIZE_IDS:
        raise InvalidParameter("token_ids", f"must have at most {limits.MAX_DETOKENIZE_IDS} ids")
    skip_special = skips_special(request)
    if not request.token_ids:
        return ""
    ids = given_ids("token_ids", request.token_ids, model.card.vocab_size, budget=None)
    return model.tokenizer.decode(ids, skip_special)


def check_list_models(request: pb.ListModelsRequest) -> None:
    """Validate paging. One page holds every model: no page token is ever issued."""
    if request.page_size < 0:
        raise InvalidParameter("page_size", "must not be negative")
    if request.page_token:
        raise InvalidParameter("page_token", "is not one that this server gave")


def _tokenize_text(request: pb.TokenizeRequest, model: ServedModel) -> Tokenized:
    check_text("text", request.text)
    add_special = request.add_special_tokens if request.HasField("add_special_tokens") else True
    found = model.tokenizer.encode_with_offsets(request.text, add_special)
    return Tokenized(
        found.ids,
        found.tokens if request.return_tokens else [],
        found.offsets if request.return_offsets else [],
    )


async def tokenize_response(found: Tokenized, max_context: int) -> pb.TokenizeResponse:
    """Return the response, yielding to other requests between portions of the offsets."""
    response = pb.TokenizeResponse(token_ids=found.ids, tokens=found.tokens, max_context_length=max_context)
    yielder = Yielder()
    for some in slices(found.offsets, PORTION):
        for start, end in some:
            response.offsets.add(start=start, end=end)
        await yielder.done(len(some))
    return response


def _default_sampling(card: ModelCard) -> pb.SamplingParams:
    """Return the sampling parameters of a request without any; a seed is random."""
    names = SAMPLING_NUMBERS.keys() - {"seed"}
    values = {name: getattr(card.defaults, name, OFF[name]) for name in names}
    return pb.SamplingParams(**values, n=1)
