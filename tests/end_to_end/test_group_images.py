"""Images in workers of several processes: transformers' own answers, with the encoder inside and apart."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kernels.cpu import library
from tests import vision_models
from tests.end_to_end.rank_hosts import serving_across_hosts
from tests.end_to_end.rank_processes import Degrees, serving
from tests.end_to_end.test_images import MODEL, Served, ask, conversations, ids, request

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not library.library_path().exists(), reason="the native step was not built"),
]
ONE: Degrees = {"tensor-parallel": 1, "sum-parts": 2}
TWO: Degrees = {"tensor-parallel": 2}
STAGES: Degrees = {"pipeline-parallel": 2, "sum-parts": 2}
EVERY = [*vision_models.FAMILIES, "llava_qwen2", "qwen2_vl", "qwen3_vl"]


@contextlib.contextmanager
def seeing(
    family: str,
    folder: Path,
    prefill: Degrees,
    decode: Degrees,
    backend: str,
    transport: str | None,
) -> Iterator[Served]:
    """Serve a model of a family; `transport` is that of an encode worker's rows and of blocks, None: the
    prefill worker encodes.
    """
    vision_models.write(family, folder)
    flags = ["--model-name", MODEL, "--set", "gateway.max-images=4"]
    flags += [] if transport is None else ["--encode", "1"]
    with serving(
        folder, prefill, decode, transport or "shared_memory", backend=backend, flags=flags
    ) as stack:
        oracle, processor = vision_models.oracle(family, folder), vision_models.processor(family, folder)
        yield Served(family, folder, stack, oracle, processor, transport)


def check(served: Served) -> None:
    """Ask alone and all at once: prompts with images share steps with text, and with cached ones."""
    turns = conversations(served)
    expected = [served.expected(one)[1] for one in turns]
    alone = [ask(served.stack, request(one, cache={"salt": "alone"}))[0] for one in turns]
    assert [ids(one) for one in alone] == expected
    (again,) = ask(served.stack, request(turns[2], cache={"salt": "alone"}))
    assert ids(again) == expected[2]
    assert again.usage.cached_prompt_tokens > 0
    mixed = ask(served.stack, *(request(one, cache={"salt": f"m{n}"}) for n in range(2) for one in turns))
    assert [ids(one) for one in mixed] == expected * 2
    # The control: with the two images swapped the answer is another one.
    (role, (first, words, second, rest)), *_ = turns[1]
    assert served.expected([(role, [second, words, first, rest])])[1] != expected[1]


@pytest.mark.full
def test_two_ranks_to_two_stages_answer_as_transformers(tmp_path: Path) -> None:
    """Positions on grids and rows behind layers (Qwen3-VL), of an encoder inside the prefill worker."""
    with seeing("qwen3_vl", tmp_path, TWO, STAGES, "native", None) as served:
        check(served)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        (ONE, TWO, "tcp"),
        (TWO, ONE, "shared_memory"),
        (TWO, TWO, None),
        (STAGES, TWO, "shared_memory"),
        ({**TWO, "pipeline-parallel": 2}, ONE, None),
    ],
    ids=["1-2", "2-1", "2-2", "1x2-2", "2x2-1"],
)
def test_any_degree_to_any_other_answers_as_transformers(
    family: str, tmp_path: Path, prefill: Degrees, decode: Degrees, transport: str | None, backend: str
) -> None:
    with seeing(family, tmp_path, prefill, decode, backend, transport) as served:
        check(served)


@pytest.mark.full
@pytest.mark.parametrize("family", ["qwen3_vl", "gemma3"])
def test_ranks_of_other_hosts_answer_as_transformers(family: str, tmp_path: Path) -> None:
    folder = vision_models.write(family, tmp_path / "model")
    flags = ["--model-name", MODEL, "--set", "gateway.max-images=4", "--encode", "1"]
    with serving_across_hosts(folder, TWO, TWO, tmp_path, *flags) as (stack, _):
        oracle, processor = vision_models.oracle(family, folder), vision_models.processor(family, folder)
        check(Served(family, folder, stack, oracle, processor, "tcp"))
