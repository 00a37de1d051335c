"""Workers of several processes: any degree to any degree, the same tokens as one process with the same parts.

The tiny models have odd heads: 3 KV heads for 6 query heads, which two parts divide unevenly, and one KV head
for more ranks than that.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from decode_worker.config import DecodeSettings
from diptych.client import Client
from diptych.runtime.settings_sources import BadSettings
from prefill_worker.config import PrefillSettings
from tests.end_to_end import reference, tiny_model
from tests.end_to_end.rank_processes import GREEDY, alone, answer, kill, processes
from tests.end_to_end.stack import Stack, running_stack

TOKENS = 24
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96}
ONE_KV_HEAD = {"num_attention_heads": 6, "num_key_value_heads": 1, "hidden_size": 96}
PROMPTS = [tiny_model.prompt(seed, length) for seed, length in enumerate((5, 33, 100))]
NO_LOCAL_PREFILL = (
    "--set",
    "decode.max-local-prefill-tokens=0",
    "--set",
    "decode.max-fallback-prefill-tokens=0",
)


@contextlib.contextmanager
def serving(
    model: str | Path, prefill: int, decode: int, transport: str = "shared_memory"
) -> Iterator[Stack]:
    """Run a system of two groups, of which no process is left at the end."""
    flags = ["--model", str(model), "--dtype", "fp32", "--prefill-chunk", "48", "--kv-blocks", "96"]
    flags += ["--set", f"prefill.tensor-parallel={prefill}", "--set", f"decode.tensor-parallel-size={decode}"]
    env = {"DIPTYCH_WORKER_WAIT_TIMEOUT": "300"}
    with running_stack(*flags, "--transport", transport, *NO_LOCAL_PREFILL, env=env) as stack:
        assert len(processes(stack, "prefill")) == prefill
        assert len(processes(stack, "decode")) == decode
        yield stack
        stack.wait_idle(120)
        pids = [pid for role in ("prefill", "decode") for pid in processes(stack, role)]
    until = time.monotonic() + 10
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def resumed(stack: Stack, prompt: list[int], victim: int) -> list[int]:
    """Return the tokens of a stream in the middle of which rank `victim` of the decode worker is killed."""
    tokens: list[int] = []
    with Client(stack.address, retries=0) as client:
        killed = False
        for chunk in client.stream(prompt, max_tokens=TOKENS, timeout_s=300, **GREEDY):
            tokens += chunk.token_ids
            if not killed and len(tokens) >= 8:
                kill(processes(stack, "decode")[victim])
                killed = True
    return tokens


def test_two_ranks_to_two_are_one_process_and_a_stream_outlives_a_rank(tmp_path: Path) -> None:
    """Uneven heads; rank 1 dies, which is not the process that holds the links."""
    model = tiny_model.write(tmp_path, **ODD)
    expected = alone(model, 2, PROMPTS, TOKENS)
    with serving(model, 2, 2) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        before = processes(stack, "decode")
        assert resumed(stack, PROMPTS[2], victim=1) == expected[2]
        stack.wait_idle(120)
        assert not {*before} & {*processes(stack, "decode")}
        assert answer(stack, PROMPTS[1], TOKENS) == expected[1]


@pytest.mark.full
@pytest.mark.parametrize("sizes", [ODD, ONE_KV_HEAD], ids=["odd", "one-kv-head"])
@pytest.mark.parametrize("transport", ["shared_memory", "tcp"])
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (3, 1), (2, 3)])
def test_any_degree_to_any_other_is_one_process(
    tmp_path: Path, prefill: int, decode: int, transport: str, sizes: dict[str, int]
) -> None:
    model = tiny_model.write(tmp_path, **sizes)
    expected = alone(model, 6 if decode == 3 else max(prefill, decode), PROMPTS, TOKENS)
    with serving(model, prefill, decode, transport) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in PROMPTS] == expected
        assert stack.metric("prefill", "diptych_kv_transfer_duration_seconds_count") >= len(PROMPTS)
        for victim in range(decode):
            assert resumed(stack, PROMPTS[2], victim) == expected[2]
            stack.wait_idle(120)


@pytest.mark.full
@pytest.mark.parametrize(("prefill", "decode"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_the_bundled_model_at_any_degree_is_one_process(prefill: int, decode: int) -> None:
    """Nine query heads, three KV heads."""
    model = reference.model_file()
    prompts = [list(reference.prompts()[index]) for index in (5, 12, 21)]
    expected = alone(model, max(prefill, decode), prompts, TOKENS)
    with serving("bundled", prefill, decode) as stack:
        assert [answer(stack, prompt, TOKENS) for prompt in prompts] == expected
        assert resumed(stack, prompts[2], victim=decode - 1) == expected[2]


@pytest.fixture
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let settings come from flags alone."""
    for name in [name for name in os.environ if name.startswith("DIPTYCH_")]:
        monkeypatch.delenv(name)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--tensor-parallel", "2", "--backend", "native"), "--backend native"),
        (("--tensor-parallel", "2", "--quantization", "int8"), "--quantization int8"),
        (("--tensor-parallel", "2", "--sum-parts", "3"), "--sum-parts 3 is no multiple"),
        (("--tensor-parallel", "2", "--transport", "gloo"), "--transport gloo"),
        (("--tensor-parallel", "2", "--device", "cuda"), "groups compute on CPUs so far"),
        (("--sum-parts", "2", "--kv-cache-dtype", "fp8", "--backend", "torch"), "--kv-cache-dtype fp8"),
        (("--sum-parts", "2", "--speculative-tokens", "3"), "--speculative-tokens 3"),
        (("--sum-parts", "2", "--speculative-model", "bundled"), "--speculative-model bundled"),
        (("--tensor-parallel", "2", "--kv-tier", "ram:1g"), "--kv-tier ram:1g"),
    ],
)
def test_what_does_not_work_with_groups_is_refused_by_name(
    flags: tuple[str, ...], named: str, no_variables: None
) -> None:
    with pytest.raises(BadSettings) as refused:
        DecodeSettings.read_argv(flags)
    assert named in str(refused.value.faults[0])


def test_a_prefill_group_refuses_a_draft_model_by_name(no_variables: None) -> None:
    with pytest.raises(BadSettings) as refused:
        PrefillSettings.read_argv(("--tensor-parallel", "2", "--speculative-model", "bundled"))
    assert "--speculative-model bundled" in str(refused.value.faults[0])
