"""Model card: names, sampling defaults, and the budget of a parsed request."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from diptych.runtime.settings_sources import BadSettings
from diptych.v1 import inference_pb2 as pb
from gateway.config import GatewaySettings
from gateway.model.chat_template import Message
from gateway.model.served_model import ModelCard, SamplingDefaults, ServedModel
from gateway.model.template_file import read_template
from gateway.request.validation import parse_request
from tests.diptych.runtime.tokenizer.small_models import byte_level, write_folder


def test_model_card_of_the_bundled_model(bundled: ServedModel) -> None:
    card = bundled.card
    assert (card.name, card.aliases) == ("SmolLM2-135M-Instruct", ("SmolLM2-135M-Instruct.Q4_1",))
    assert (card.max_context, card.vocab_size, card.eos_token_ids) == (8192, 49152, (2,))
    assert card.defaults == SamplingDefaults()
    assert card.has_chat_template
    assert card.tokenizer_digest == bundled.tokenizer.digest


@pytest.mark.parametrize(
    ("file", "name", "aliases"),
    [
        ("Qwen2.5-0.5B-Instruct-Q4_K_M.gguf", "Qwen2.5-0.5B-Instruct", ("Qwen2.5-0.5B-Instruct-Q4_K_M",)),
        ("m.IQ2_XXS.gguf", "m", ("m.IQ2_XXS",)),
        ("m-f16.gguf", "m", ("m-f16",)),
        ("Llama-3.2-1B.gguf", "Llama-3.2-1B", ()),
    ],
)
def test_model_name_comes_from_the_file(
    bundled: ServedModel, tmp_path: Path, file: str, name: str, aliases: object
) -> None:
    (tmp_path / file).touch()
    card = ModelCard.from_tokenizer(bundled.tokenizer, tmp_path / file)
    assert (card.name, card.aliases) == (name, aliases)


def test_configured_model_name_has_no_alias(bundled_path: Path) -> None:
    card = ServedModel.load(bundled_path, name="house-model").card
    assert (card.name, card.aliases) == ("house-model", ())
    assert card.answers_to("house-model")
    assert not card.answers_to("SmolLM2-135M-Instruct")


def test_model_folder_name_is_kept(tmp_path: Path) -> None:
    model = ServedModel.load(write_folder(tmp_path / "Llama-3.2-1B", byte_level()))
    assert (model.card.name, model.card.aliases) == ("Llama-3.2-1B", ())
    assert not model.card.has_chat_template
    assert model.chat_template is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_p": 0.9}, SamplingDefaults(temperature=0.0, top_p=0.9)),
        ({"do_sample": True}, SamplingDefaults(temperature=1.0)),
        (
            {
                "do_sample": True,
                "temperature": 0.7,
                "top_p": 0.8,
                "top_k": 20,
                "min_p": 0.1,
                "repetition_penalty": 1.1,
            },
            SamplingDefaults(0.7, 0.8, 20, 0.1, 1.1),
        ),
        (
            {
                "do_sample": True,
                "temperature": math.nan,
                "top_p": 3,
                "top_k": "x",
                "min_p": -1,
                "repetition_penalty": 0,
            },
            SamplingDefaults(temperature=1.0),
        ),
        (
            {"do_sample": True, "temperature": None, "top_p": 0, "top_k": -1},
            SamplingDefaults(temperature=1.0),
        ),
    ],
)
def test_sampling_defaults_come_from_the_generation_config(
    config: dict[str, object], expected: SamplingDefaults
) -> None:
    assert SamplingDefaults.from_generation_config(config) == expected


def test_parsed_request_has_output_budget_and_stop_ids(bundled: ServedModel) -> None:
    def parsed(**stopping: object) -> tuple[int, tuple[int, ...]]:
        request = pb.GenerateRequest(
            model=bundled.card.name,
            token_ids=pb.TokenIds(ids=[5] * 10),
            stopping=pb.StoppingCriteria(**stopping),  # type: ignore[arg-type]
        )
        found = parse_request(request, bundled)
        return found.output_budget(50), found.worker_stop_ids((2, 3))

    assert parsed() == (40, (2, 3))
    assert parsed(max_tokens=7, stop_token_ids=[9, 3]) == (7, (2, 3, 9))
    assert parsed(max_tokens=60, ignore_eos=True, stop_token_ids=[9]) == (40, (9,))
    assert parsed(ignore_eos=True) == (40, ())


def test_chat_template_of_a_file_replaces_those_of_the_model(tmp_path: Path) -> None:
    templates = {"chat_template": [{"name": n, "template": n} for n in ("default", "tool_use")]}
    folder = write_folder(
        tmp_path / "m", byte_level(), tokenizer_config=templates, generation_config={"eos_token_id": 5}
    )
    own = ServedModel.load(folder)
    end = own.tokenizer.id_of("<|im_end|>")
    assert own.card.eos_token_ids == (5,)
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}<|im_end|>é", encoding="utf-8")
    model = ServedModel.load(folder, chat_template=read_template(path))
    assert model.chat_template is not None
    parts = model.chat_template.render([Message("user", "hi")], add_generation_prompt=False)
    assert "".join(one if isinstance(one, str) else one.text for one in parts) == "hi<|im_end|>é"
    assert model.tokenizer.tool_template is None
    assert model.card.eos_token_ids == (5, end), "what ends a turn of it ends an output"


@pytest.mark.parametrize(
    ("data", "message"),
    [(None, "cannot be read: No such file"), (b"\xff\xfe", "is not UTF-8 text"), (b" \n", "is empty")],
)
def test_chat_template_file_that_is_none_is_refused_by_its_flag(
    tmp_path: Path, data: bytes | None, message: str
) -> None:
    path = tmp_path / "t.jinja"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(BadSettings, match=rf"(?s)chat.template.*t\.jinja {message}"):
        GatewaySettings.read_argv(["--chat-template", str(path), "--insecure"])
