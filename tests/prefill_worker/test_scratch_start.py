"""Scratch at the start of a real worker, and the longest legal prompt in the least of it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

from diptych.runtime.settings import CANNOT_START
from tests.diptych.worker_process.both_workers import BLOCK, SHAPE, VOCABULARY, greedy, house
from tests.diptych.worker_process.scripted_gateway import Gateway, work
from tests.end_to_end import tiny_model


def test_worker_with_too_little_scratch_ends_with_the_flag_and_the_least(tmp_path: Path) -> None:
    model = tiny_model.write(tmp_path / "model")
    command = [sys.executable, "-m", "prefill_worker", "--model", str(model), "--dtype", "fp32"]
    command += ["--scratch-blocks", "3", "--max-model-len", "512", "--grpc-port", "0", "--http-port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 1
    assert "Traceback" not in ended.stderr
    why = "they hold 48 tokens, and a prompt may have 512 (--max-model-len): 32 blocks are the least"
    assert ended.stderr.strip().endswith(f"{CANNOT_START}--scratch-blocks 3: {why}")


async def test_longest_legal_prompts_fit_the_least_scratch() -> None:
    """Several at once take turns; none ends with an error."""
    context = SHAPE.max_context
    prompts = [tuple((7 * n + i) % VOCABULARY for i in range(context - 1)) for n in range(3)]
    async with house("tcp", blocks=4 * context // BLOCK, scratch=context // BLOCK, chunk=64) as made:
        gateway, (decode,), (prefill,) = Gateway(made), made.decodes, made.prefills
        heard = [
            gateway.start(decode, prefill, work((f"r{n}", 1), prompt, 1)) for n, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*(one.ended.wait() for one in heard))
        assert [tuple(one.tokens) for one in heard] == [greedy(prompt, 1) for prompt in prompts]
        assert await made.empty() == []
        await gateway.close()
