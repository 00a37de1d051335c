"""Options → the request of the protocol."""

from __future__ import annotations

import array
import json
from typing import Any

import numpy as np
import pytest

from diptych.client import Options, Tool, ToolCall, chat
from diptych.client.options import build_request
from diptych.client.text_requests import tokenize_request
from diptych.v1 import inference_pb2 as pb

WEATHER = Tool("weather", "What it is like outside", {"type": "object"})


def made(prompt: Any = "Once", **options: Any) -> pb.GenerateRequest:
    return build_request(prompt, "small", options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"n": 3, "best_of": 5, "logit_bias": {7: -1.5}, "allowed_token_ids": [1, 2], "bad_words": ["no"]},
            {
                "sampling": pb.SamplingParams(
                    n=3, best_of=5, logit_bias={7: -1.5}, allowed_token_ids=[1, 2], bad_words=["no"]
                )
            },
        ),
        ({"beam_width": 4}, {"sampling": pb.SamplingParams(beam_width=4)}),
        (
            {"logprobs": 0, "prompt_logprobs": 2, "echo": True, "stream_interval": 8, "return_text": False},
            {
                "response": pb.ResponseOptions(
                    logprobs=0, prompt_logprobs=2, echo_prompt=True, stream_interval=8, text=False
                )
            },
        ),
        (
            {"return_token_ids": False, "skip_special_tokens": False, "timings": False},
            {"response": pb.ResponseOptions(token_ids=False, skip_special_tokens=False, timings=False)},
        ),
        (
            {"cache_salt": "a", "bypass_cache_read": True, "bypass_cache_write": True},
            {"cache": pb.CacheOptions(salt="a", bypass_read=True, bypass_write=True)},
        ),
        (
            {"priority": 0, "session_id": "s", "request_id": "r"},
            {"priority": 0, "session_id": "s", "request_id": "r"},
        ),
        (
            {"ignore_eos": False, "include_stop_in_output": True, "time_limit_s": 1.25},
            {
                "stopping": pb.StoppingCriteria(
                    ignore_eos=False,
                    include_stop_in_output=True,
                    time_limit={"seconds": 1, "nanos": 250_000_000},
                )
            },
        ),
        ({"json_schema": {"type": "object"}}, {"structured_output": {"json_schema": '{"type": "object"}'}}),
        ({"json_schema": "{}"}, {"structured_output": {"json_schema": "{}"}}),
        ({"json_object": True}, {"structured_output": {"json_object": True}}),
        ({"regex": "a+"}, {"structured_output": {"regex": "a+"}}),
        ({"grammar": 'root ::= "a"'}, {"structured_output": {"ebnf_grammar": 'root ::= "a"'}}),
        ({"choice": ["yes", "no"]}, {"structured_output": {"choice": {"values": ["yes", "no"]}}}),
        ({"choice": []}, {"structured_output": {"choice": {}}}),  # the server's to refuse
    ],
)
def test_every_option_has_its_field(options: Options, expected: dict[str, Any]) -> None:
    plain = pb.GenerateRequest(model="small", text="Once", sampling={}, stopping={}, response={}, cache={})
    plain.structured_output.SetInParent()
    plain.MergeFrom(pb.GenerateRequest(**expected))
    request = made(**options)
    request.structured_output.SetInParent()
    assert request == plain


@pytest.mark.parametrize(
    "options",
    [{"stop": "END", "bad_words": "no", "choice": "yes"}, {"stop": "", "bad_words": "", "choice": ""}],
)
def test_one_text_is_no_list_of_its_characters(options: dict[str, str]) -> None:
    request = made(**options)
    assert list(request.stopping.stop) == [options["stop"]]
    assert list(request.sampling.bad_words) == [options["bad_words"]]
    assert list(request.structured_output.choice.values) == [options["choice"]]


def test_every_option_is_one_that_the_builder_knows() -> None:
    """A word of no type that fits is refused for that, or for its place, but never as unknown."""
    refusals = [_refusal(name) for name in Options.__annotations__]
    assert sum("unknown options" in refusal for refusal in refusals) == 0
    assert _refusal("temprature") == "unknown options: temprature (temperature?)"
    assert _refusal("model").endswith(": model (it is an argument of the client: Client(address, model=…))")
    assert _refusal("zzz") == "unknown options: zzz"


@pytest.mark.parametrize("prompt", [5, None, 2.5])
def test_prompt_of_no_known_form_is_refused_by_name(prompt: Any) -> None:
    with pytest.raises(TypeError, match=f"prompt: a text, .* token ids, not {type(prompt).__name__}"):
        build_request(prompt, "m", {})


def _refusal(name: str) -> str:
    try:
        made(**{name: None})
    except (TypeError, AttributeError) as error:
        return str(error)
    return ""


def test_tools_and_the_turns_of_their_calls() -> None:
    call = ToolCall("c1", "weather", '{"city": "Paris"}')
    history = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1"}]
    kwargs = {"enable_thinking": False}
    request = made(
        chat("And now?", history=history),
        tools=[WEATHER],
        tool_choice=WEATHER,
        parallel_tool_calls=False,
        template_kwargs=kwargs,
        add_generation_prompt=False,
    )
    [tool] = request.chat.tools
    assert (tool.name, json.loads(tool.parameters_json_schema)) == ("weather", {"type": "object"})
    assert request.chat.tool_choice == pb.ToolChoice(
        mode=pb.ToolChoice.MODE_NAMED, name="weather", parallel=False
    )
    assert request.chat.messages[0].tool_calls[0].arguments_json == call.arguments_json
    assert request.chat.messages[1].tool_call_id == "c1"
    assert dict(request.chat.template_kwargs) == kwargs
    assert request.chat.HasField("add_generation_prompt")
    assert not request.chat.add_generation_prompt
    assert call.arguments == {"city": "Paris"}


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("auto", pb.ToolChoice.MODE_AUTO),
        ("none", pb.ToolChoice.MODE_NONE),
        ("required", pb.ToolChoice.MODE_REQUIRED),
    ],
)
def test_tool_choices(mode: str, expected: int) -> None:
    assert made(chat("Hi"), tools=[WEATHER], tool_choice=mode).chat.tool_choice.mode == expected


@pytest.mark.parametrize(
    ("prompt", "options", "what"),
    [
        ("Once", {"temprature": 1.0}, "temprature"),
        ("Once", {"regex": "a", "json_object": True}, "json_object, regex"),
        ("Once", {"tools": [WEATHER]}, "tools"),
        ([1, 2], {"template_kwargs": {}}, "template_kwargs"),
        (chat("Hi"), {"tool_choice": "maybe"}, "tool_choice"),
    ],
)
def test_contradicting_options_are_refused(prompt: Any, options: dict[str, Any], what: str) -> None:
    with pytest.raises(TypeError, match=what):
        made(prompt, **options)


@pytest.mark.parametrize(
    ("prompt", "options", "name"),
    [
        ("Once", {"max_tokens": "a"}, "max_tokens"),
        ("Once", {"max_tokens": -1}, "max_tokens"),
        ("Once", {"temperature": 0.5, "seed": 1.5}, "seed"),
        ("Once", {"stop": 5}, "stop"),
        ("Once", {"priority": "high"}, "priority"),
        ([1, -2], {}, "prompt"),
        ([1, "a"], {}, "prompt"),
    ],
)
def test_a_value_without_a_place_in_its_field_is_told_with_the_name(
    prompt: Any, options: dict[str, Any], name: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{name}: "):
        made(prompt, **options)


def test_token_ids_come_in_any_sequence() -> None:
    for ids in ((1, 2), range(1, 3), np.array([1, 2]), array.array("q", [1, 2])):
        assert list(made(ids).token_ids.ids) == [1, 2]


def test_tokenize_request_is_built() -> None:
    text = tokenize_request("Once", "small", add_special_tokens=False, return_offsets=True)
    assert text == pb.TokenizeRequest(
        model="small", text="Once", add_special_tokens=False, return_offsets=True
    )
    turns = tokenize_request(chat("Hi"), "small", tools=[WEATHER], return_tokens=True)
    assert [tool.name for tool in turns.chat.tools] == ["weather"]
    assert not turns.HasField("add_special_tokens")
    with pytest.raises(TypeError, match="tokenized"):
        tokenize_request([1, 2], "small")
    with pytest.raises(TypeError, match="retrun_tokens"):
        tokenize_request("Once", "small", retrun_tokens=True)  # type: ignore[call-arg]
