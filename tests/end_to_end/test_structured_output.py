"""Each way to constrain an output, through the whole system with the bundled model, against plain loops.

The loops take at each step the likeliest of all tokens that leave the text a beginning of what is asked for.
"""

from __future__ import annotations

import codecs
import inspect
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
import pytest
import regex
import torch
from transformers import DynamicCache

from diptych.v1 import inference_pb2 as pb
from diptych.v1 import inference_pb2_grpc as rpc
from tests.end_to_end.json_prefix import is_object, may_become_object
from tests.end_to_end.reference import MODEL, chat_ids, reference_model, tokenizer
from tests.end_to_end.stack import Stack

MAX_TOKENS = 40
SPACE = r"(?: |\n[ \t]{0,24})?"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["name", "age", "kind"],
    "additionalProperties": False,
}
STRING = r'"(?:[^"\\\x00-\x1f\x7f]|\\["\\bfnrt]|\\u00(?:[01][0-9a-fA-F]|7[fF]))*"'
SCHEMA_REGEX = SPACE.join(
    [
        *(r"\{", '"name"', ":", STRING, ",", '"age"', ":", "-?(?:0|[1-9][0-9]*)", ","),
        *('"kind"', ":", '(?:"cat"|"dog")', r"\}"),
    ]
)
SENTENCE = r"[A-Z][a-z]+ is [a-z ]{5,30}(?:\.|!)"
CHOICES = ["It is Paris, I believe", "It is Paris", "Rome"]
SUM = 'root ::= sum " = " [0-9]{1,3}\nsum ::= part (" + " part)*\npart ::= [0-9]{1,2} | "(" sum ")"'


@dataclass(frozen=True)
class Language:
    """What is asked for, and the oracle's idea of it."""

    question: str
    asked: pb.StructuredOutput
    may_begin: Callable[[str], bool]
    whole: Callable[[str], bool]


def by_regex(pattern: str) -> tuple[Callable[[str], bool], Callable[[str], bool]]:
    compiled = regex.compile(pattern)
    return (
        lambda text: compiled.fullmatch(text, partial=True) is not None,
        lambda text: compiled.fullmatch(text) is not None,
    )


def sum_state(text: str) -> str | None:
    """Where a reader of sums stands after `text`; None where there is no sum that begins so."""
    state, depth = "part", 0
    for char in text:
        digit = char in "0123456789"
        after = state in ("one digit", "two digits", "closed")
        if state == "part" and char == "(":
            depth += 1
        elif state == "part" and digit:
            state = "one digit"
        elif state == "one digit" and digit:
            state = "two digits"
        elif after and char == ")" and depth:
            state, depth = "closed", depth - 1
        elif after and char == " ":
            state = "space"
        elif state == "space" and (char == "+" or (char == "=" and not depth)):
            state = char
        elif state in ("+", "=") and char == " ":
            state = "part" if state == "+" else "result 0"
        elif state.startswith("result") and digit and state != "result 3":
            state = f"result {int(state[-1]) + 1}"
        else:
            return None
    return state


def sum_begins(text: str) -> bool:
    return sum_state(text) is not None


def sum_whole(text: str) -> bool:
    return sum_state(text) in ("result 1", "result 2", "result 3")


LANGUAGES = {
    "json_object": Language(
        "Describe a cat as JSON.", pb.StructuredOutput(json_object=True), may_become_object, is_object
    ),
    "json_schema": Language(
        "Describe Alice's cat as JSON.",
        pb.StructuredOutput(json_schema=json.dumps(SCHEMA)),
        *by_regex(SCHEMA_REGEX),
    ),
    "regex": Language("What is Paris?", pb.StructuredOutput(regex=SENTENCE), *by_regex(SENTENCE)),
    "choice": Language(
        "What is the capital of France?",
        pb.StructuredOutput(choice=pb.StructuredOutput.Choices(values=CHOICES)),
        lambda text: any(choice.startswith(text) for choice in CHOICES),
        lambda text: text in CHOICES,
    ),
    "ebnf_grammar": Language(
        "What is one plus (two plus three)?", pb.StructuredOutput(ebnf_grammar=SUM), sum_begins, sum_whole
    ),
}
LONG_FORM = {"json_object", "json_schema"}
"""Long answers, for each token of which the oracle tries thousands. Seeded outputs have these modes, too."""


def oracle(language: Language) -> tuple[list[int], bool]:
    """The tokens, and whether the text is complete; by transformers and by trying."""
    model = reference_model()
    (eos,) = tokenizer().eos_token_ids
    given, output, data = list(chat_ids(language.question)), list[int](), b""
    # Called `past_key_values` before transformers 5.24, which warns of that name.
    named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    cache = {named: DynamicCache(config=model.config)}
    after = After(language, data)
    while len(output) < MAX_TOKENS:
        with torch.inference_mode():
            step = model(torch.tensor([given]), use_cache=True, **cache)
        order = torch.argsort(step.logits[0, -1], descending=True, stable=True).tolist()
        chosen = next(token for token in order if after.fits(token))
        if chosen == eos:
            return output, True
        output.append(chosen)
        data += tokenizer().piece(chosen)
        given, after = [chosen], After(language, data)
        if after.fits(eos) and not any(after.fits(token) for token in order if token != eos):
            return output, True
    return output, False


class After:
    """Which tokens may follow what was written, tried one by one.

    Where a text may not go on with a character it may not go on with the thousands of tokens that begin with
    it either: one look at each character spares most of the others.
    """

    def __init__(self, language: Language, data: bytes) -> None:
        self._language, self._data = language, data
        self._words = tokenizer()
        (self._eos,) = self._words.eos_token_ids
        self._begins: dict[int, bool] = {}

    def fits(self, token: int) -> bool:
        if token == self._eos:
            return self._language.whole(self._data.decode("utf-8", "replace"))
        piece = self._words.piece(token)
        if not piece or self._words.is_special(token):
            return False
        first = piece[0]
        if first < 0x80:  # a character of its own
            if first not in self._begins:
                self._begins[first] = self._may_be(self._data + piece[:1])
            if not self._begins[first]:
                return False
        return self._may_be(self._data + piece)

    def _may_be(self, data: bytes) -> bool:
        try:
            text = codecs.getincrementaldecoder("utf-8")().decode(data)
        except UnicodeDecodeError:
            return False
        complete = len(text.encode()) == len(data)
        # Half a character may become any: one that every text here takes in a string, and nowhere else.
        return self._language.may_begin(text if complete else text + "é")


@pytest.fixture(scope="module")
def stack(bundled: Stack) -> Stack:
    return bundled


@pytest.fixture(scope="module")
def stub(stack: Stack) -> Iterator[rpc.InferenceServiceStub]:
    with grpc.insecure_channel(stack.address) as channel:
        yield rpc.InferenceServiceStub(channel)


def request(language: Language, **rest: object) -> pb.GenerateRequest:
    fields: dict[str, object] = {
        "sampling": {"temperature": 0.0},
        "stopping": {"max_tokens": MAX_TOKENS},
    } | rest
    return pb.GenerateRequest(
        model=MODEL,
        chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content=language.question)]),
        structured_output=language.asked,
        **fields,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize(
    "mode", [pytest.param(m, marks=pytest.mark.full if m in LONG_FORM else ()) for m in LANGUAGES]
)
def test_is_the_likeliest_text_that_fits(stub: rpc.InferenceServiceStub, mode: str) -> None:
    language = LANGUAGES[mode]
    expected, complete = oracle(language)
    free = stub.Generate(request(Language(language.question, pb.StructuredOutput(), all, all)), timeout=60)
    answer = stub.Generate(request(language), timeout=60)
    (output,) = answer.outputs
    (eos,) = tokenizer().eos_token_ids
    assert [token for token in output.token_ids if token != eos] == expected
    assert output.finish_reason == (pb.FINISH_REASON_STOP if complete else pb.FINISH_REASON_LENGTH)
    assert language.may_begin(output.text)
    assert language.whole(output.text) == complete
    assert not language.whole(free.outputs[0].text), "the model does so anyway: this proves nothing"
    # Streamed, the same; what ignores the end of sequence or wants more tokens ends where the text ends.
    pieces = stub.StreamGenerate(request(language), timeout=60)
    assert "".join(piece.outputs[0].text for piece in pieces) == output.text
    if complete:
        stubborn = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
        again = stub.Generate(request(language, stopping=stubborn), timeout=60).outputs[0]
        assert language.whole(again.text)
        assert again.finish_reason == pb.FINISH_REASON_STOP


def test_seeded_outputs_all_fit(stub: rpc.InferenceServiceStub) -> None:
    for mode in ("json_object", "json_schema", "ebnf_grammar", "regex"):
        language = LANGUAGES[mode]
        sampling = {"temperature": 1.5, "seed": 3, "n": 4}
        answer = stub.Generate(request(language, sampling=sampling, stopping={"max_tokens": 120}), timeout=60)
        ended = [output for output in answer.outputs if output.finish_reason == pb.FINISH_REASON_STOP]
        assert ended or mode == "json_object", mode  # an object can go on for long
        assert all(language.whole(output.text) for output in ended)
        assert all(language.may_begin(output.text) for output in answer.outputs)
        assert len({output.text for output in answer.outputs}) > 1


def test_min_tokens_and_stop_strings_beside_a_grammar(stub: rpc.InferenceServiceStub) -> None:
    one = Language("Count.", pb.StructuredOutput(regex="(one )+"), *by_regex("(one )+"))
    counted = stub.Generate(request(one, stopping={"max_tokens": 30, "min_tokens": 9}), timeout=60).outputs[0]
    assert len(counted.token_ids) >= 9
    # Nothing can follow a complete choice, whatever the least number of tokens.
    short = stub.Generate(request(LANGUAGES["choice"], stopping={"min_tokens": 30}), timeout=60).outputs[0]
    assert short.text in CHOICES
    stopped = stub.Generate(request(LANGUAGES["choice"], stopping={"stop": [" is"]}), timeout=60).outputs[0]
    assert (stopped.text, stopped.stop_text) == ("It", " is")


def test_beams_fit(stub: rpc.InferenceServiceStub) -> None:
    sampling = {"beam_width": 3, "n": 3}
    for mode in ("choice", "json_schema"):
        language = LANGUAGES[mode]
        answer = stub.Generate(request(language, sampling=sampling), timeout=60)
        for output in answer.outputs:
            assert language.may_begin(output.text)


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"json_schema": "{" * 10_000}, "structured_output.json_schema"),
        ({"json_schema": '{"type": "array", "uniqueItems": true}'}, "structured_output.json_schema"),
        ({"json_schema": '{"$ref": "#"}'}, "structured_output.json_schema"),
        ({"regex": "("}, "structured_output.regex"),
        ({"regex": r"[^\s\S]"}, "structured_output.regex"),
        ({"regex": ""}, "structured_output.regex"),
        ({"ebnf_grammar": "root ::= nothing"}, "structured_output.ebnf_grammar"),
        ({"ebnf_grammar": "root ::= root"}, "structured_output.ebnf_grammar"),
        ({"choice": {"values": []}}, "structured_output.choice.values"),
        ({"structural_tag": "x"}, "structured_output.structural_tag"),
    ],
)
def test_what_cannot_be_matched_is_refused_before_anything_runs(
    stack: Stack, stub: rpc.InferenceServiceStub, asked: dict[str, object], field: str
) -> None:
    steps = stack.metric("prefill", "diptych_engine_step_tokens_total")
    with pytest.raises(grpc.RpcError) as refused:
        stub.Generate(
            pb.GenerateRequest(model=MODEL, text="a", structured_output=asked),
            timeout=60,  # type: ignore[arg-type]
        )
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details().startswith(f"{field}")
    assert stack.metric("prefill", "diptych_engine_step_tokens_total") == steps


def test_a_grammar_that_cannot_go_on_is_a_failed_precondition(stub: rpc.InferenceServiceStub) -> None:
    digits = tokenizer().encode("0123456789")
    asked = request(LANGUAGES["choice"], sampling={"allowed_token_ids": digits})
    with pytest.raises(grpc.RpcError) as refused:
        stub.Generate(asked, timeout=60)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
