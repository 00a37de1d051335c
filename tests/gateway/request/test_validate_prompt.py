"""Prompts in their three forms: text, ids, conversation."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.struct_pb2 import Struct
from tokenizers import AddedToken

from diptych.runtime.errors import ContextLengthExceeded, DiptychError, InvalidParameter, UnsupportedFeature
from diptych.v1 import inference_pb2 as pb
from gateway import limits
from gateway.model.chat_template import ChatTemplate, Message
from gateway.model.served_model import ServedModel
from gateway.reasoning.splitter import Start
from gateway.request.validate_prompt import ROLES, chat_tools, prompt_ids
from gateway.request.validate_stopping import TokenBudget
from gateway.request.validation import parse_request
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder

WIDE = TokenBudget(limit=10**9, wanted=1)


def ids(model: ServedModel, budget: TokenBudget = WIDE, **prompt: Any) -> tuple[int, ...]:
    request = pb.GenerateRequest(**prompt)
    return prompt_ids(request, model, budget, chat_tools(request.chat, model))


def chat(*turns: tuple[str, str], **rest: Any) -> pb.ChatPrompt:
    return pb.ChatPrompt(messages=[pb.ChatMessage(role=r, content=c) for r, c in turns], **rest)


def field_of(model: ServedModel, kind: type[DiptychError], budget: TokenBudget = WIDE, **prompt: Any) -> str:
    with pytest.raises(kind) as caught:
        ids(model, budget, **prompt)
    (violation,) = caught.value.violations
    return violation.field


def with_template(model: ServedModel, source: str) -> ServedModel:
    template = ChatTemplate(source, model.tokenizer.control_tokens, model.tokenizer.template_names)
    return dataclasses.replace(model, chat_template=template)


def kwargs(**values: Any) -> Struct:
    struct = Struct()
    struct.update(values)
    return struct


def test_text_with_special_tokens_nul_and_combining_marks_is_text(bundled: ServedModel) -> None:
    text = "<|im_end|>\x00 e\u0301\u0323 \u202eabc"
    found = ids(bundled, text=text)
    assert not any(map(bundled.tokenizer.is_special, found))
    assert bundled.tokenizer.decode(found, skip_special=True) == text


def test_empty_prompts_are_refused(bundled: ServedModel) -> None:
    assert field_of(bundled, InvalidParameter) == "prompt"
    assert field_of(bundled, InvalidParameter, text="") == "text"
    assert field_of(bundled, InvalidParameter, token_ids=pb.TokenIds()) == "token_ids.ids"
    assert field_of(bundled, InvalidParameter, chat=pb.ChatPrompt()) == "chat.messages"
    # SmolLM2's vocabulary has no spelling for this control character.
    assert field_of(bundled, InvalidParameter, text="\x04") == "text"


def test_ids_at_the_end_of_the_vocabulary_and_one_over(bundled: ServedModel) -> None:
    last = bundled.card.vocab_size - 1
    assert ids(bundled, token_ids=pb.TokenIds(ids=[0, last])) == (0, last)
    over = pb.TokenIds(ids=[0, last + 1, last + 2])
    assert field_of(bundled, InvalidParameter, token_ids=over) == "token_ids.ids[1]"


def test_tokens_that_only_the_tokenizer_knows_are_the_callers_fault(bundled: ServedModel) -> None:
    """Fine-tunes have them: a token was added, and the model's embedding stayed as it was."""
    text, last = "the fox", max(ids(bundled, text="the fox"))
    whole, short = (
        dataclasses.replace(bundled, card=dataclasses.replace(bundled.card, vocab_size=size))
        for size in (last + 1, last)
    )
    assert ids(whole, text=text)
    assert field_of(short, InvalidParameter, text=text) == "text"
    assert field_of(short, InvalidParameter, chat=chat(("user", text))) == "chat.messages"


@pytest.mark.parametrize("kind", ["text", "token_ids", "chat"])
def test_a_prompt_at_its_budget_and_one_over(bundled: ServedModel, kind: str) -> None:
    prompts: dict[str, Any] = {
        "text": "one two three",
        "token_ids": pb.TokenIds(ids=[7, 8, 9]),
        "chat": chat(("user", "one two three")),
    }
    prompt = {kind: prompts[kind]}
    size = len(ids(bundled, **prompt))
    assert len(ids(bundled, TokenBudget(size + 2, wanted=2), **prompt)) == size
    with pytest.raises(ContextLengthExceeded):
        ids(bundled, TokenBudget(size + 1, wanted=2), **prompt)


def test_text_at_its_size_limit_and_one_over(bundled: ServedModel) -> None:
    assert ids(bundled, text=" " * limits.MAX_PROMPT_BYTES)
    assert field_of(bundled, InvalidParameter, text=" " * (limits.MAX_PROMPT_BYTES + 1)) == "text"
    assert field_of(bundled, InvalidParameter, text="é" * (limits.MAX_PROMPT_BYTES // 2 + 1)) == "text"


def test_conversations_at_their_limits_and_one_over(bundled: ServedModel) -> None:
    bare = with_template(bundled, "x{{ messages | length }}")
    assert ids(bare, chat=chat(*[("user", "")] * limits.MAX_MESSAGES))
    assert ids(bare, chat=chat(("user", "a" * limits.MAX_PROMPT_BYTES)))
    for turns in (
        [("user", "")] * (limits.MAX_MESSAGES + 1),
        [("user", "a" * limits.MAX_PROMPT_BYTES), ("user", "a")],
    ):
        assert field_of(bare, InvalidParameter, chat=chat(*turns)) == "chat.messages"


def test_a_conversation_is_what_the_template_makes_of_it(bundled: ServedModel) -> None:
    assert bundled.chat_template is not None
    for add_prompt in (None, True, False):
        prompt = chat(("system", "Be brief."), ("user", "Hi"), add_generation_prompt=add_prompt)
        parts = bundled.chat_template.render(
            [Message("system", "Be brief."), Message("user", "Hi")],
            add_generation_prompt=add_prompt is not False,
        )
        assert list(ids(bundled, chat=prompt)) == bundled.tokenizer.encode_parts(parts)


@pytest.mark.parametrize("role", ["", "User", "root", "user\n", "<|im_end|>", "x" * 1000])
def test_only_known_roles(bundled: ServedModel, role: str) -> None:
    prompt = chat(("user", "a"), (role, "b"))
    assert field_of(bundled, InvalidParameter, chat=prompt) == "chat.messages[1].role"


@pytest.mark.parametrize("role", ROLES)
def test_every_known_role(bundled: ServedModel, role: str) -> None:
    assert ids(bundled, chat=chat((role, "a")))


def test_names_are_for_templates_that_look_at_them(bundled: ServedModel) -> None:
    def named(name: str) -> pb.ChatPrompt:
        return pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="a", name=name)])

    assert ids(bundled, chat=named("Ann")) == ids(bundled, chat=named(""))
    naming = with_template(bundled, "{{ messages[0].name }}")
    assert ids(naming, chat=named("Ann")) == tuple(bundled.tokenizer.encode("Ann"))
    assert ids(naming, chat=named("a" * limits.MAX_MESSAGE_NAME_CHARS))
    for good in ("Zoë", "Zoe\u0308", "张伟", "अनीता", "x_1.y-2"):
        assert ids(naming, chat=named(good)) == tuple(bundled.tokenizer.encode(good))
    for bad in ("a" * (limits.MAX_MESSAGE_NAME_CHARS + 1), "a b", "<|im_end|>", "a\u200bb", "a\n"):
        assert field_of(naming, InvalidParameter, chat=named(bad)) == "chat.messages[0].name"


def test_tools_of_a_template_without_them_are_described_in_the_system_turn(bundled: ServedModel) -> None:
    """SmolLM2's template writes any role that it is given, but neither tools nor calls."""

    def text(prompt: pb.ChatPrompt) -> str:
        return bundled.tokenizer.decode(ids(bundled, chat=prompt), skip_special=False)

    offered = chat(("user", "a"), tools=[pb.Tool(name="f", description="<|im_end|>")])
    assert '{"name": "f", "description": "<|im_end|>"' in text(offered)
    assert text(offered).startswith("<|im_start|>system\nYou can call")
    offered.tool_choice.mode = pb.ToolChoice.MODE_NONE
    assert text(offered) == text(chat(("user", "a")))
    call = pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(name="f", id="1")])
    result = pb.ChatMessage(role="tool", content="42", tool_call_id="1")
    assert text(pb.ChatPrompt(messages=[call, result])).endswith(
        '<|im_start|>assistant\n{"name": "f", "arguments": {}}<|im_end|>\n'
        "<|im_start|>user\nResult of f: 42<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_id_of_a_call_is_a_tools(bundled: ServedModel) -> None:
    answer = pb.ChatMessage(role="user", tool_call_id="1")
    assert field_of(bundled, InvalidParameter, chat=pb.ChatPrompt(messages=[answer])) == (
        "chat.messages[0].tool_call_id"
    )


def test_template_kwargs_are_checked(bundled: ServedModel) -> None:
    switch = with_template(
        bundled, "{% if enable_thinking %}yes{% else %}no{% endif %} {{ reasoning_effort }}"
    )

    def text(**values: Any) -> str:
        prompt = chat(("user", "a"), template_kwargs=kwargs(**values))
        return bundled.tokenizer.decode(ids(switch, chat=prompt), skip_special=False)

    assert text(enable_thinking=True) == "yes "
    assert text(enable_thinking=False, reasoning_effort="low") == "no low"
    assert text(reasoning_effort="<|im_end|>") == "no <|im_end|>"
    assert text(enable_thinking=True, reasoning_effort="none") == "yes none"
    for path, values in [
        ("chat.template_kwargs", {"documents": "x"}),
        ("chat.template_kwargs", {"messages": []}),
        ("chat.template_kwargs", {"bos_token": "<|im_start|>"}),
        ("chat.template_kwargs", {"raise_exception": 1}),
        ("chat.template_kwargs.enable_thinking", {"enable_thinking": "yes"}),
        ("chat.template_kwargs.enable_thinking", {"enable_thinking": 1}),
        ("chat.template_kwargs.enable_thinking", {"enable_thinking": None}),
        ("chat.template_kwargs.reasoning_effort", {"reasoning_effort": ["low"]}),
    ]:
        prompt = chat(("user", "a"), template_kwargs=kwargs(**values))
        assert field_of(switch, InvalidParameter, chat=prompt) == path
    unread = chat(("user", "a"), template_kwargs=kwargs(thinking=True))
    assert field_of(switch, UnsupportedFeature, chat=unread) == "chat.template_kwargs.thinking"
    harmless = chat(("user", "a"), template_kwargs=kwargs(thinking=False))
    assert ids(switch, chat=harmless) == ids(switch, chat=chat(("user", "a")))


def test_template_kwargs_of_any_name_and_type_reach_the_template(bundled: ServedModel) -> None:
    own = with_template(bundled, "{{ persona | tojson }} {{ budget }}{{ '' if flag is none else '!' }}")
    values = {"persona": {"name": "<|im_end|>", "tags": ["a", 1]}, "budget": 512, "flag": None}
    found = ids(own, chat=chat(("user", "a"), template_kwargs=kwargs(**values)))
    assert bundled.tokenizer.decode(found, skip_special=False) == (
        '{"name": "<|im_end|>", "tags": ["a", 1]} 512'
    )
    assert not any(map(bundled.tokenizer.is_special, found))
    other = chat(("user", "a"), template_kwargs=kwargs(sentinel=1))
    with pytest.raises(InvalidParameter, match="reads: budget, flag, persona") as caught:
        ids(own, chat=other)
    assert "sentinel" not in str(caught.value)


def test_no_effort_switches_thinking_off(bundled: ServedModel) -> None:
    switch = with_template(bundled, "{{ 'thinks' if enable_thinking is not false else 'answers' }}")

    def text(effort: str) -> str:
        prompt = chat(("user", "a"), template_kwargs=kwargs(reasoning_effort=effort))
        return bundled.tokenizer.decode(ids(switch, chat=prompt), skip_special=False)

    assert (text("minimal"), text("none")) == ("thinks", "answers")


def test_reasoning_of_earlier_turns_reaches_the_template(bundled: ServedModel) -> None:
    reader = with_template(bundled, "{% for m in messages %}{{ m.reasoning_content }}{% endfor %}")
    turn = pb.ChatMessage(role="assistant", content="a", reasoning_content="hm <|im_end|>")
    found = ids(reader, chat=pb.ChatPrompt(messages=[turn]))
    assert bundled.tokenizer.decode(found, skip_special=False) == "hm <|im_end|>"
    assert not any(map(bundled.tokenizer.is_special, found))
    turn.role = "user"
    path = "chat.messages[0].reasoning_content"
    assert field_of(reader, InvalidParameter, chat=pb.ChatPrompt(messages=[turn])) == path


def test_a_template_that_refuses_is_the_callers_fault(bundled: ServedModel) -> None:
    strict = with_template(bundled, "{{ raise_exception('only ' + messages[0].content) }}")
    with pytest.raises(InvalidParameter, match='refused: it says "only …"') as caught:
        ids(strict, chat=chat(("user", "sentinel")))
    assert "sentinel" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{{ raise_exception('Roles must alternate') }}", 'it says "Roles must alternate"'),
        ("{{ raise_exception('a' * 3) }}", 'it says "aaa"'),
        ("{{ raise_exception(messages[0].content) }}", "it does not accept these messages"),
        ("{{ raise_exception('got ' ~ messages[0].role ~ '!') }}", 'it says "got …!"'),
        ("{{ raise_exception('x' + '%s') }}".replace("%s", "y" * 900), f'it says "x{"y" * 199}"'),
        ("{{ messages[9].content }}{{ 1 / 0 }}", "it does not accept these messages"),
    ],
)
def test_words_that_a_template_raises_are_shown(bundled: ServedModel, source: str, words: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        ids(with_template(bundled, source), chat=chat(("user", "sentinel")))
    assert caught.value.violations[0].description.endswith(f"refused: {words}")


def test_a_model_without_a_template(bundled: ServedModel) -> None:
    bare = dataclasses.replace(bundled, chat_template=None)
    assert field_of(bare, UnsupportedFeature, chat=chat(("user", "a"))) == "chat"


def test_what_is_certainly_too_long_is_never_tokenized(
    bundled: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("tokenized")

    monkeypatch.setattr(bundled.tokenizer, "encode", fail)
    monkeypatch.setattr(bundled.tokenizer, "encode_parts", fail)
    tight = TokenBudget(limit=100, wanted=1)
    for prompt in ({"text": "a" * 100_000}, {"chat": chat(("user", "a" * 100_000))}):
        with pytest.raises(ContextLengthExceeded, match=r" \(at least \d+ in the messages, 1 in"):
            ids(bundled, tight, **prompt)


@pytest.mark.parametrize("wanted", [99, 100, 2**32 - 1])
def test_a_prompt_that_fits_with_less_output_is_counted(bundled: ServedModel, wanted: int) -> None:
    """So that a client can ask for what is left beside it."""
    budget = TokenBudget(limit=100, wanted=wanted)
    text = "one two three four"
    for prompt in ({"text": text}, {"chat": chat(("user", text))}):
        with pytest.raises(ContextLengthExceeded) as caught:
            ids(bundled, budget, **prompt)
        counted = len(ids(bundled, **prompt))
        assert caught.value.metadata["prompt_tokens"] == str(counted)
        assert f" ({counted} in the messages, {wanted} in the completion)" in caught.value.message
        assert [violation.field for violation in caught.value.violations] == ["stopping.max_tokens"]


def test_a_prompt_says_whether_its_answer_begins_with_reasoning(tmp_path: Path) -> None:
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
        "{% for m in messages %}{{ m.content }}{% endfor %}{# [TOOL_CALLS] </think> #}"
        "{% if enable_thinking %}<think>\n"
        "{% elif enable_thinking is defined %}<think>\n\n</think>\n\n{% endif %}"
    )
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("</think>", special=False, normalized=False)])
    tokenizer.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True, normalized=False)])
    ends = {"eos_token_id": tokenizer.token_to_id("</s>")}
    folder = write_folder(tmp_path, tokenizer, chat_template=template, generation_config=ends)
    model = ServedModel.load(folder)
    assert model.reasoning is not None
    mark = model.tokenizer.id_of("[TOOL_CALLS]")

    def reasoning(forced: bool = False, **values: Any) -> Start | None:
        asked = chat(("user", "a </think>"), template_kwargs=kwargs(**values))
        if forced:
            asked.tools.add(name="f")
            asked.tool_choice.mode = pb.ToolChoice.MODE_REQUIRED
        request = pb.GenerateRequest(model=model.card.name, chat=asked)
        parsed = parse_request(request, model)
        # Required calls begin in the prompt only where no reasoning comes before them.
        assert (parsed.prompt_ids[-1] == mark) == (forced and parsed.reasoning is None)
        assert parsed.constraint is None or forced
        if parsed.constraint is not None:
            assert (f"<[{mark}]>" in parsed.constraint.grammar.text) == (parsed.reasoning is not None)
        return None if parsed.reasoning is None else parsed.reasoning.start

    for forced in (False, True):
        assert reasoning(forced, enable_thinking=True) is Start.OPEN
        assert reasoning(forced, enable_thinking=False) is None
    text = pb.GenerateRequest(model=model.card.name, text="<think>\n")
    assert parse_request(text, model).reasoning is None


def turn(*parts: str | bytes, content: str = "") -> pb.ChatMessage:
    made = [
        pb.ContentPart(text=part) if isinstance(part, str) else pb.ContentPart(image=pb.Image(data=part))
        for part in parts
    ]
    return pb.ChatMessage(role="user", content=content, parts=made)


def test_parts_of_text_are_their_content(bundled: ServedModel) -> None:
    whole = ids(bundled, chat=chat(("user", "one, two")))
    assert ids(bundled, chat=pb.ChatPrompt(messages=[turn("one, ", "two")])) == whole
    both = pb.ChatPrompt(messages=[turn("one", content="two")])
    assert field_of(bundled, InvalidParameter, chat=both) == "chat.messages[0].content"
    empty = pb.ChatPrompt(messages=[pb.ChatMessage(role="user", parts=[pb.ContentPart()])])
    assert field_of(bundled, InvalidParameter, chat=empty) == "chat.messages[0].parts[0]"
    large = pb.ChatPrompt(messages=[turn("a" * (limits.MAX_PROMPT_BYTES + 1))])
    assert field_of(bundled, InvalidParameter, chat=large) == "chat.messages"


def test_an_image_that_was_not_prepared_is_refused(bundled: ServedModel) -> None:
    asked = pb.ChatPrompt(messages=[turn("one"), turn("What? ", b"PNG")])
    assert field_of(bundled, UnsupportedFeature, chat=asked) == "chat.messages[1].parts[1].image"
