"""The whole service with both workers on one GPU says what transformers says."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from pathlib import Path

import pytest
import torch

from tests.end_to_end import reference
from tests.end_to_end.http_requests import many_greedy
from tests.end_to_end.stack import running_stack
from tests.faults.failpoints import Armory
from tests.faults.system import eventually, settle

TOKENS = reference.MOST_TOKENS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_text_through_the_whole_stack_is_that_of_transformers(transport: str) -> None:
    flags = ("--device", "cuda", "--dtype", "fp32", "--kv-memory-mib", "1024", "--transport", transport)
    prompts = reference.prompts()[:30:3]
    with running_stack(*flags) as stack:
        answers = asyncio.run(many_greedy(stack.address, prompts, TOKENS, at_a_time=4))
        stack.wait_idle()
    assert answers == [reference.greedy(prompt, TOKENS) for prompt in prompts]


@pytest.mark.parametrize("sharing", ["turns", "streams", "partition"])
def test_text_through_one_process_for_both_phases_is_that_of_transformers(sharing: str) -> None:
    flags = ("--device", "cuda", "--dtype", "fp32", "--kv-memory-mib", "1024", "--gpu-sharing", sharing)
    prompts = reference.prompts()[:30:3]
    expected = [reference.greedy(prompt, TOKENS) for prompt in prompts]
    with running_stack(
        *flags, env={"DIPTYCH_LOCAL_PREFILL": "never", "DIPTYCH_WORKER_WAIT_TIMEOUT": "150"}
    ) as stack:
        account = stack.account
        assert account["prefill"][0]["pid"] == account["decode"][0]["pid"]
        assert asyncio.run(many_greedy(stack.address, prompts, TOKENS, at_a_time=4)) == expected
        if sharing == "turns":  # the others start by the same code
            asking = threading.Timer(0.3, os.kill, (account["decode"][0]["pid"], signal.SIGKILL))
            asking.start()
        assert asyncio.run(many_greedy(stack.address, prompts, TOKENS, at_a_time=4)) == expected
        if sharing == "turns":
            asking.join()
            eventually(
                lambda: stack.account["decode"][0]["restarts"] == 1, 60.0, "the process is started again"
            )
            settle(stack)
            assert asyncio.run(many_greedy(stack.address, prompts, TOKENS, at_a_time=4)) == expected
        stack.wait_idle()


def test_streams_go_on_after_a_cuda_fault_in_a_prefill_kernel(tmp_path: Path) -> None:
    """Lose the context of the process that computes both phases while 64 streams are on their way."""
    flags = ("--device", "cuda", "--dtype", "fp32", "--kv-memory-mib", "2048", "--gpu-sharing", "turns")
    armory = Armory(tmp_path)
    prompts = [reference.prompts()[:30][number % 30] for number in range(64)]
    expected = [reference.greedy(prompt, TOKENS) for prompt in prompts[:30]]
    with running_stack(*flags, env={**armory.environment, "DIPTYCH_WORKER_WAIT_TIMEOUT": "150"}) as stack:
        pid = stack.account["decode"][0]["pid"]
        armory.arm("prefill.device_fault", "fail", after=3)
        answers = asyncio.run(many_greedy(stack.address, prompts, TOKENS, at_a_time=64))
        assert armory.taken("prefill.device_fault") == pid
        assert answers == [expected[number % 30] for number in range(64)]
        assert "the GPU is lost to a fault of a kernel" in stack.log.read_text()
        eventually(lambda: stack.account["decode"][0]["restarts"] == 1, 60.0, "the process is started again")
        settle(stack)
        stack.wait_idle()
