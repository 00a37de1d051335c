"""Model files as their users have them, through the whole system: ends, names, contexts, refusals."""

from __future__ import annotations

import copy
import json
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import openai
import pytest
import torch
from safetensors.torch import save_file

from diptych.client import Client
from lab.peers.bf16_folder import main as write_bf16_folder
from tests import bundled_oracle
from tests.diptych.runtime.odd_models import CASES
from tests.end_to_end import reference
from tests.end_to_end.stack import Stack, http_root, running_stack
from tests.forms import sampled

ROOT = Path(__file__).parents[2]
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
BASE_END = 0  # <|endoftext|>; the end of a turn is token 2, <|im_end|>
CONTEXT = 200


def write_oracle(folder: Path) -> None:
    """Write the weights that the oracle has read already, in bf16."""
    model = bundled_oracle.model()
    assert model.config.tie_word_embeddings
    rounded = {name: tensor.bfloat16() for name, tensor in model.model.state_dict(prefix="model.").items()}
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    config = copy.deepcopy(model.config)
    config.dtype = torch.bfloat16
    del config.quantization_config
    config.save_pretrained(folder)
    bundled_oracle.tokenizer().save_pretrained(folder)


def cached_folder(root: Path, write: Callable[[Path], None]) -> Path:
    """Write the bundled weights as a snapshot of the Hugging Face cache that declares its base's end."""
    folder = root / "models--HuggingFaceTB--SmolLM2-135M-Instruct" / "snapshots" / "8f14e45fceea167a"
    folder.mkdir(parents=True)
    write(folder)
    for name in ("config.json", "generation_config.json"):
        fields = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
        (folder / name).write_text(json.dumps({**fields, "eos_token_id": BASE_END}))
    return folder


def base_end_gguf(root: Path) -> Path:
    """Write the bundled file with its base's end in the metadata."""
    path, key = root / "SmolLM2-135M-Instruct.Q4_1.gguf", b"tokenizer.ggml.eos_token_id"
    shutil.copyfile(reference.model_file(), path)
    with path.open("r+b") as file:
        head = file.read(8 << 20)
        place = head.index(key) + len(key)
        assert struct.unpack_from("<II", head, place) == (4, 2)
        file.seek(place + 4)
        file.write(struct.pack("<I", BASE_END))
    return path


WRITERS: dict[str, Callable[[Path], None]] = {
    "folder": write_oracle,
    "folder of lab.peers": partial(write_bf16_folder, reference.model_file()),
}


@pytest.fixture(scope="module", params=sampled([*WRITERS, "gguf"], ["folder"]))
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    root = tmp_path_factory.mktemp("model")
    flags = ["--max-model-len", str(CONTEXT), "--device", "cpu"]
    if request.param in WRITERS:
        folder = cached_folder(root, WRITERS[request.param])
        with running_stack("--model", ".", *flags, env={"PYTHONPATH": str(ROOT)}, cwd=folder) as stack:
            yield stack
    else:
        with running_stack("--model", str(base_end_gguf(root)), *flags) as stack:
            yield stack


def test_answer_ends_with_its_turn_though_the_files_name_the_bases_end(served: Stack) -> None:
    with openai.OpenAI(base_url=f"{http_root(served)}/v1", api_key="none") as client:
        for name in ("SmolLM2-135M-Instruct", client.models.list().data[0].id):
            answer = client.chat.completions.create(
                model=name,
                messages=QUESTION,  # type: ignore[arg-type]
                max_tokens=100,
                temperature=0,
            )
            [choice] = answer.choices
            assert choice.finish_reason == "stop"
            assert "Paris" in str(choice.message.content)
            assert answer.usage is not None
            assert answer.usage.completion_tokens < 60


def test_ignore_eos_still_writes_on_past_every_end(served: Stack) -> None:
    with Client(served.address) as client:
        answer = client.generate(QUESTION, max_tokens=60, temperature=0.0, ignore_eos=True)
        assert len(answer.token_ids) == 60
        [model] = client.models()
        assert model.eos_token_ids == (BASE_END, 2)


def test_structured_output_ends_with_its_grammar(served: Stack) -> None:
    with Client(served.address) as client:
        answer = client.generate(QUESTION, max_tokens=60, temperature=0.0, regex="[A-Z][a-z]{3,8}")
        assert answer.finish_reason == "stop"


def test_max_model_len_is_the_context_in_lists_and_errors(served: Stack) -> None:
    with Client(served.address) as client:
        assert client.models()[0].max_context_length == CONTEXT
    with openai.OpenAI(base_url=f"{http_root(served)}/v1", api_key="none", max_retries=0) as http:
        [listed] = http.models.list().data
        assert listed.id == "SmolLM2-135M-Instruct"
        assert listed.model_dump()["max_model_len"] == CONTEXT

        def ask(tokens: int) -> openai.types.Completion:
            return http.completions.create(
                model=listed.id,
                prompt=[5] * tokens,
                max_tokens=10,
                temperature=0,
                extra_body={"ignore_eos": True},
            )

        answer = ask(CONTEXT - 10)
        assert answer.usage is not None
        assert answer.usage.total_tokens == CONTEXT
        with pytest.raises(openai.BadRequestError, match=str(CONTEXT)):
            ask(CONTEXT - 9)


WRONG = ("lfs_weights", "split", "only_pickles", "architecture")
ALONE = ("gateway", "prefill_worker", "decode_worker")
SAMPLE = [("diptych", "lfs_weights"), *zip(ALONE, WRONG[1:], strict=True)]


@pytest.mark.parametrize(("module", "case"), sampled(product(("diptych", *ALONE), WRONG), SAMPLE))
def test_program_says_what_its_model_is_in_one_line(module: str, case: str, tmp_path: Path) -> None:
    write, said = CASES[case]
    command = [sys.executable, "-m", module, *(["up"] if module == "diptych" else ["--log-level=error"])]
    done = subprocess.run(
        [*command, "--grpc-port=0", "--http-port=0", f"--model={write(tmp_path)}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    [line] = done.stderr.splitlines()
    assert re.search(said, line)
