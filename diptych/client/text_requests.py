"""The requests of Tokenize and Detokenize."""

from collections.abc import Sequence
from typing import TypedDict, Unpack

from diptych.client.options import Prompt, Tool, chat_prompt, is_chat
from diptych.v1 import inference_pb2 as pb


class TokenizeOptions(TypedDict, total=False):
    """`tools` are a chat's, `add_special_tokens` and `return_offsets` a text's."""

    add_special_tokens: bool
    return_tokens: bool
    return_offsets: bool
    tools: Sequence[Tool]


def tokenize_request(prompt: Prompt, model: str, **options: Unpack[TokenizeOptions]) -> pb.TokenizeRequest:
    """Return the request.

    Raises TypeError for token ids, which are tokens already, and for an option that does not exist.
    """
    unknown = options.keys() - TokenizeOptions.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown options: {', '.join(sorted(unknown))}")
    request = pb.TokenizeRequest(
        model=model,
        return_tokens=options.get("return_tokens", False),
        return_offsets=options.get("return_offsets", False),
    )
    if "add_special_tokens" in options:
        request.add_special_tokens = options["add_special_tokens"]
    if isinstance(prompt, str):
        request.text = prompt
    elif is_chat(prompt):
        request.chat.CopyFrom(chat_prompt(prompt, {"tools": options.get("tools", ())}))
    else:
        raise TypeError("what is tokenized is a text or the turns of a chat")
    return request


def detokenize_request(
    token_ids: Sequence[int], model: str, *, skip_special_tokens: bool
) -> pb.DetokenizeRequest:
    return pb.DetokenizeRequest(model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens)
