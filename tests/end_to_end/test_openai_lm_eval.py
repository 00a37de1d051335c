"""lm-evaluation-harness through its `local-completions`, against what transformers says of the same tokens.

It needs far more packages than anything else here, so it lives in a virtual environment of its own:
`make test-lm-eval` makes that, names its program in LM_EVAL, and runs this file.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import pre_tokenizers

from tests.end_to_end.reference import ROOT, greedy, model_file, reference_model
from tests.end_to_end.stack import running_stack

TASKS = Path(__file__).parent / "lm_eval_tasks"
LM_EVAL = os.environ.get("LM_EVAL", "")

pytestmark = pytest.mark.skipif(not LM_EVAL, reason="make test-lm-eval runs it")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """transformers' own, from the bundled file; see tests/gateway/conftest.py on the pre-tokenizer."""
    from transformers import AutoTokenizer

    file = model_file()
    found = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    found.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return found


@pytest.fixture(scope="module")
def samples(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What lm-eval logged, by task."""
    folder = tmp_path_factory.mktemp("lm-eval")
    shutil.copytree(TASKS, folder / "tasks")
    paragraphs = [" ".join(text.split()) for text in (ROOT / "LICENSE").read_text().split("\n\n")]
    lines = [json.dumps({"text": text}) for text in paragraphs if len(text) > 300][:4]
    (folder / "tasks" / "licence.jsonl").write_text("\n".join(lines))
    tokenizer.save_pretrained(folder / "tokenizer")
    with running_stack("--dtype", "fp32", "--kv-memory-mib", "256") as stack:
        run_lm_eval(folder, stack.account["gateway"]["http_port"])
        stack.wait_idle()
    found = {}
    for task in ("diptych_facts", "diptych_licence", "diptych_sequel"):
        (log,) = (folder / "out").rglob(f"samples_{task}_*.jsonl")
        found[task] = [json.loads(line) for line in log.read_text().splitlines()]
    return found


def run_lm_eval(folder: Path, port: int) -> None:
    """Four prompts a request, two requests at a time."""
    settings = {
        "model": "SmolLM2-135M-Instruct",
        "base_url": f"http://127.0.0.1:{port}/v1/completions",
        "tokenizer": str(folder / "tokenizer"),
        "num_concurrent": "2",
        "max_retries": "1",
    }
    command = [LM_EVAL, "run", "--model", "local-completions", "--batch_size", "4", "--log_samples"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in settings.items())]
    command += ["--tasks", "diptych_facts,diptych_licence,diptych_sequel"]
    command += ["--include_path", str(folder / "tasks"), "--output_path", str(folder / "out")]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    done = subprocess.run(
        command,
        cwd=folder / "tasks",
        env={**os.environ, **offline},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def loglikelihood(context: list[int], continuation: list[int]) -> tuple[float, bool]:
    """Of the continuation, and whether each of its tokens is the likeliest."""
    ids = torch.tensor([context + continuation])
    with torch.no_grad():
        scores = torch.log_softmax(reference_model()(ids).logits[0, len(context) - 1 : -1], dim=-1)
    wanted = torch.tensor(continuation)
    sums = scores.gather(1, wanted[:, None]).sum().item()
    return sums, bool((scores.argmax(dim=-1) == wanted).all())


def test_choices_are_as_likely_as_transformers_says(samples: dict[str, Any], tokenizer: Any) -> None:
    assert len(samples["diptych_facts"]) == 6
    for sample in samples["diptych_facts"]:
        context = tokenizer.encode(sample["doc"]["question"], add_special_tokens=False)
        for choice, ((value, is_greedy),) in zip(sample["doc"]["choices"], sample["resps"], strict=True):
            whole = tokenizer.encode(f"{sample['doc']['question']} {choice}", add_special_tokens=False)
            expected, expected_greedy = loglikelihood(context, whole[len(context) :])
            assert float(value) == pytest.approx(expected, abs=1e-3)
            assert str(is_greedy) == str(expected_greedy)
    assert sum(sample["acc"] for sample in samples["diptych_facts"]) >= 4  # the model knows some of them


def test_paragraphs_are_as_surprising(samples: dict[str, Any], tokenizer: Any) -> None:
    assert len(samples["diptych_licence"]) == 4
    for sample in samples["diptych_licence"]:
        text = sample["doc"]["text"]
        prefix = [tokenizer.bos_token_id]  # the harness's own choice
        expected, _ = loglikelihood(prefix, tokenizer.encode(text, add_special_tokens=False))
        value, num_bytes = sample["bits_per_byte"]
        assert num_bytes == len(text.encode())
        assert value == pytest.approx(expected, rel=1e-4)
        assert math.isfinite(value)


def test_sequels_are_greedy(samples: dict[str, Any], tokenizer: Any) -> None:
    assert len(samples["diptych_sequel"]) == 6
    for sample in samples["diptych_sequel"]:
        ids = tuple(tokenizer.encode(sample["doc"]["question"], add_special_tokens=False))
        text = tokenizer.decode(greedy(ids, 8))
        assert sample["resps"] == [[text.split(",")[0]]]
