"""Images among the tokens of a prompt: what stands for one, where its rows are, and templates without any."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from diptych.runtime.errors import InvalidParameter, UnsupportedFeature
from diptych.runtime.image_rows import pixels_digest
from diptych.v1 import inference_pb2 as pb
from gateway.model.chat_template import ChatTemplate
from gateway.model.images import ImagePlace, ImageSupport, PreparedImage, UnusableImages
from gateway.model.served_model import ServedModel
from gateway.request.parsed_request import ParsedRequest
from gateway.request.validation import parse_request
from gateway.tokenizer_service import tokenize
from tests import mmproj_twins, vision_models

NAMESPACE = bytes(range(32))
SIZE = {"size": {"shortest_edge": 35}, "crop_size": {"height": 35, "width": 35}}


@pytest.fixture(scope="module", params=vision_models.FAMILIES)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = vision_models.write(request.param, tmp_path_factory.mktemp(request.param))
    return ServedModel.load(folder, "m")


def prepared(
    support: ImageSupport, tiles: int = 1, rows: int = 0, columns: int = 0, fill: int = 0
) -> PreparedImage:
    shape = (tiles, 3, *support.spec.tile)
    data = bytes([fill]) * (tiles * 3 * shape[2] * shape[3])
    return PreparedImage(shape, data, rows, columns, pixels_digest(shape, data))


def test_a_pair_of_gguf_files_makes_the_prompts_of_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    pair = mmproj_twins.write("idefics3", vision_models.write("idefics3", folder), tmp_path)
    prompts = []
    for model in (ServedModel.load(folder, "m"), ServedModel.load(pair.text, "m", mmproj=pair.mmproj)):
        support = support_of(model)
        images = [prepared(support, tiles=5, rows=2, columns=2), prepared(support, fill=3)]
        prompts.append(parse(model, *images).prompt_ids)
    assert prompts[0] == prompts[1]
    assert support.mmproj == pair.mmproj


def support_of(model: ServedModel) -> ImageSupport:
    assert model.images is not None
    return model.images


def parse(model: ServedModel, *images: PreparedImage, words: str = "What?") -> ParsedRequest:
    parts = [pb.ContentPart(image=pb.Image(data=b"x")) for _ in images]
    message = pb.ChatMessage(role="user", parts=[*parts, pb.ContentPart(text=words)])
    asked = pb.GenerateRequest(model="m", chat=pb.ChatPrompt(messages=[message]))
    return parse_request(asked, model, images=images)


def test_places_are_those_of_the_images_tokens(served: ServedModel) -> None:
    support = support_of(served)
    one, two = prepared(support, fill=1), prepared(support, fill=2)
    request = parse(served, one, two)
    assert request.images is not None
    spec, ids = support.spec, request.prompt_ids
    assert [place.image for place in request.images.places] == [0, 1]
    assert all(
        set(ids[place.first : place.first + place.rows]) == {spec.token_id} for place in request.images.places
    )
    assert sum(place.rows for place in request.images.places) == ids.count(spec.token_id)
    assert request.images.end == len(ids) - ids[::-1].index(spec.token_id)
    first, second = request.images.image_rows(NAMESPACE)
    assert first.digest != second.digest
    assert first.digest != request.images.image_rows(bytes(32))[0].digest


def test_rows_of_tiles_go_on_in_the_next_place(served: ServedModel) -> None:
    support = support_of(served)
    if support.spec.unit:
        pytest.skip("an image of this family is one tile")
    token, rows = support.spec.token_id, support.spec.rows_per_tile
    image, small = prepared(support, tiles=2), prepared(support)
    ids = [9, *[token] * rows, 9, 9, *[token] * (2 * rows), 9]
    assert support.locate(ids, (image, small)).places == (
        ImagePlace(1, rows, 0, 0),
        ImagePlace(rows + 3, rows, 0, rows),
        ImagePlace(2 * rows + 3, rows, 1, 0),
    )
    with pytest.raises(ValueError, match="rows of images"):
        support.locate(ids[:-2], (image, small))


def test_an_image_on_a_grid_is_in_one_piece_with_its_columns(served: ServedModel) -> None:
    support = support_of(served)
    token, unit = support.spec.token_id, support.spec.unit
    if not unit:
        pytest.skip("tokens of this family have one position")
    shape = (1, 3, 2 * unit, 3 * unit)
    image = PreparedImage(shape, bytes(18 * unit**2), 0, 0, bytes(32))
    assert support.locate([9, *[token] * 6, 9], (image,)).places == (ImagePlace(1, 6, 0, 0, 3),)
    with pytest.raises(ValueError, match="one piece"):
        support.locate([token, 9, *[token] * 5], (image,))


def test_words_that_spell_an_images_token_are_words(served: ServedModel) -> None:
    token = support_of(served).spec.token
    request = parse(served, prepared(support_of(served)), words=f"{token}{token} What?")
    assert request.prompt_ids.count(support_of(served).spec.token_id) == support_of(served).spec.rows_per_tile
    assert parse(served, words=token).images is None


def test_a_template_that_leaves_images_out_is_an_error(served: ServedModel) -> None:
    tokenizer = served.tokenizer
    source = (
        "{% for turn in messages %}{% for part in turn.content if part.type == 'text' %}{{ part.text }}"
        "{% endfor %}{% endfor %}"
    )
    template = ChatTemplate(source, tokenizer.control_tokens, tokenizer.template_names, takes_parts=True)
    deaf = dataclasses.replace(served, chat_template=template)
    with pytest.raises(InvalidParameter, match="does not show each of these images"):
        parse(deaf, prepared(support_of(served)))


def test_tokenize_refuses_images(served: ServedModel) -> None:
    message = pb.ChatMessage(role="user", parts=[pb.ContentPart(image=pb.Image(data=b"x"))])
    with pytest.raises(UnsupportedFeature):
        tokenize(pb.TokenizeRequest(model="m", chat=pb.ChatPrompt(messages=[message])), served)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("processor_config.json", {"image_processor": {"do_resize": False}}, "do_resize must be true"),
        (
            "processor_config.json",
            {"image_processor": {**SIZE, "image_mean": [1, 2]}},
            "image_mean must be three",
        ),
        ("processor_config.json", {"image_processor": {**SIZE, "resample": 9}}, "resample must be a filter"),
        ("processor_config.json", {"image_processor": {}}, "no preprocessor_config.json"),
        ("config.json", {"vision_config": None}, "has no vision_config"),
        ("config.json", {"image_token_id": 5, "image_token_index": 5}, "is not the config's token 5"),
    ],
)
def test_images_that_cannot_be_prepared_are_refused_by_name(
    tmp_path: Path, file: str, change: dict[str, Any], words: str
) -> None:
    folder = vision_models.write("llava", tmp_path / "m")
    vision_models.rewrite(folder / file, change)
    with pytest.raises(UnusableImages, match=words):
        ServedModel.load(folder)


def test_another_encoder_is_refused_by_name(tmp_path: Path) -> None:
    folder = vision_models.write("llava", tmp_path / "m")
    vision_models.rewrite(folder / "config.json", {"vision_config": {"model_type": "pixtral"}})
    with pytest.raises(UnusableImages, match="pixtral"):
        ServedModel.load(folder)
