"""LoRA adapters in workers of several processes: the text of transformers with merged weights."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from diptych.client import CallFailed, Client
from diptych.v1 import admin_pb2 as admin
from diptych.v1 import admin_pb2_grpc
from kernels.cpu import library
from tests.adapters import write_adapter
from tests.end_to_end import tiny_model
from tests.end_to_end.rank_hosts import serving_across_hosts
from tests.end_to_end.rank_processes import Degrees, processes, resumed, serving
from tests.end_to_end.test_adapters import MODEL, SERVED, A, Adapted, B, ids_of
from tests.end_to_end.tiny_system import Served

TOKENS = 24
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((5, 33, 100))]
ASKED = [(name, prompt) for prompt in PROMPTS for name in SERVED]
LAST = tiny_model.prompt(9, 20)

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not library.library_path().exists(), reason="the native step was not built"),
]


def degrees(tensor: int, pipeline: int = 1) -> Degrees:
    return {"tensor-parallel": tensor, "pipeline-parallel": pipeline}


class Model:
    """A model and two adapters on disk."""

    def __init__(self, folder: Path, **sizes: int) -> None:
        self.folder = tiny_model.write(folder / "model", **ODD, **sizes)
        base = tiny_model.oracle(self.folder)
        self.adapters = {
            A: write_adapter(folder / "a", base, seed=1, rank=4),
            B: write_adapter(folder / "b", base, seed=2, rank=9, targets=("q_proj", "v_proj", "down_proj")),
        }
        self.flags = ["--model-name", MODEL, "--max-loras", "2"]
        self.flags += [f"--lora={name}={path}" for name, path in self.adapters.items()]


@contextlib.contextmanager
def adapted(
    folder: Path, prefill: Degrees, decode: Degrees, transport: str = "shared_memory", backend: str = "native"
) -> Iterator[Adapted]:
    model = Model(folder)
    with serving(model.folder, prefill, decode, transport, backend=backend, flags=model.flags) as stack:
        yield Adapted(stack, model.folder, model.adapters)


def check_all(served: Adapted) -> None:
    """Ask everything at once: rows of two adapters and of the base share the steps."""
    for (name, prompt), answer in zip(ASKED, served.ask(ASKED), strict=True):
        assert ids_of(answer) == served.greedy(name, prompt), name
    for prompt in PROMPTS:  # the control: each of the others would be noticed
        assert len({tuple(served.greedy(name, prompt)) for name in SERVED}) == len(SERVED)


def change_adapters(served: Adapted) -> None:
    """Unload one adapter, load another in its place, and one that no worker can compute."""
    with served.admin() as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)
        stub.UnloadAdapter(admin.UnloadAdapterRequest(name=A), timeout=60)
        with Client(served.stack.address, retries=0) as client, pytest.raises(CallFailed):
            client.generate(LAST, lora=A, max_tokens=2)
        stub.LoadAdapter(admin.LoadAdapterRequest(name="c", path=str(served.adapters[A])), timeout=60)
        [answer] = served.ask([("c", LAST)])
        assert ids_of(answer) == served.greedy(A, LAST)


def check_other_features(served: Adapted) -> None:
    """Grammars with an adapter and without, beams and log-probabilities: rank 0 has the logits for them."""
    with Client(served.stack.address, model=MODEL, retries=0) as client:
        for name in SERVED:
            found = client.generate(LAST, lora=name if name != MODEL else "", regex="[ab]{6}", max_tokens=9)
            assert re.fullmatch("[ab]{6}", found.text), name
    asked = Served(served.stack, served.folder, MODEL)
    prompt = torch.tensor([LAST])
    with torch.inference_mode():
        beams = served.oracle(MODEL).generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=3,
            do_sample=False,
            max_new_tokens=8,
            pad_token_id=0,
            eos_token_id=asked.ends,
        )
    [answer] = asked.ask([LAST], sampling={"beam_width": 3}, stopping={"max_tokens": 8})
    assert ids_of(answer) == beams[0, len(LAST) :].tolist()
    [answer] = asked.ask(
        [LAST], sampling={"temperature": 0}, stopping={"max_tokens": 4}, response={"logprobs": 1}
    )
    scores = tiny_model.log_softmax(served.folder, [*LAST, *ids_of(answer)])
    for place, one in enumerate(answer.outputs[0].logprobs, start=len(LAST) - 1):
        assert one.logprob == pytest.approx(float(scores[place].max()), abs=1e-4)


def check_resumed(served: Adapted, victim: int) -> None:
    served.stack.wait_idle(120)
    expected = served.greedy(A, PROMPTS[2], TOKENS)
    assert resumed(served.stack, PROMPTS[2], TOKENS, victim, lora=A) == expected


@pytest.mark.full
def test_two_adapters_and_the_base_from_one_process_to_two_ranks_and_after_a_ranks_death(
    tmp_path: Path,
) -> None:
    with adapted(tmp_path, degrees(1), degrees(2)) as served:
        check_all(served)
        check_other_features(served)
        before = processes(served.stack, "decode")
        check_resumed(served, victim=1)
        assert not {*before} & {*processes(served.stack, "decode")}
        change_adapters(served)


@pytest.mark.full
@pytest.mark.parametrize("backend", ["native", "torch"])
@pytest.mark.parametrize(
    ("prefill", "decode", "transport"),
    [
        (degrees(2), degrees(1), "shared_memory"),
        (degrees(2), degrees(3), "tcp"),
        (degrees(3), degrees(1), "shared_memory"),
        (degrees(1, 2), degrees(2), "shared_memory"),
    ],
    ids=["2-1", "2-3", "3-1", "1x2-2"],
)
def test_any_degree_to_any_other(
    tmp_path: Path, prefill: Degrees, decode: Degrees, transport: str, backend: str
) -> None:
    with adapted(tmp_path, prefill, decode, transport, backend) as served:
        check_all(served)
        check_resumed(served, victim=int(decode["tensor-parallel"]) - 1)
        change_adapters(served)


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_ranks_on_the_triton_step_compute_adapters(tmp_path: Path) -> None:
    """Ranks compute as on GPUs, with memories of their own and the kernels in Triton's interpreter."""
    model = Model(tmp_path, num_hidden_layers=2, max_position_embeddings=128)
    two = {"tensor-parallel": 2, "own-memories": True}
    with serving(model.folder, two, two, "tcp", backend="triton", flags=model.flags) as stack:
        served = Adapted(stack, model.folder, model.adapters)
        asked = [(name, PROMPTS[0]) for name in SERVED]
        answers = [ids_of(answer) for answer in served.ask(asked)]
        assert answers == [served.greedy(*one) for one in asked]
        assert len({tuple(answer) for answer in answers}) == len(SERVED)
        change_adapters(served)


@pytest.mark.full
def test_ranks_of_other_hosts_load_adapters(tmp_path: Path) -> None:
    model = Model(tmp_path)
    with serving_across_hosts(model.folder, degrees(2), degrees(2), tmp_path, *model.flags) as (stack, _):
        served = Adapted(stack, model.folder, model.adapters)
        check_all(served)
        change_adapters(served)
