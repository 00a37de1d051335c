"""A system whose tier is a bucket: found again by the next system, and frozen in the middle."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from tests.end_to_end import tiny_model
from tests.end_to_end.stack import Stack, running_stack
from tests.faults.test_redis_tier import BLOCK, LENGTH, PROMPTS, SECRET, TOKENS, answers, cached, tokens
from tests.s3_server import ENVIRONMENT, S3Server

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def bucket() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="module")
def system(
    bucket: S3Server, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], AbstractContextManager[Stack]]:
    """Return a starter of systems over the bucket, which share their secret."""
    model = tiny_model.write(tmp_path_factory.mktemp("tiny"))
    flags = ["--model", str(model), "--model-name", "tiny", "--dtype", "fp32", "--prefill-chunk", "48"]
    flags += ["--kv-blocks", "64", "--kv-tier", f"{bucket.url}&size=64m"]
    return lambda: running_stack(*flags, env={"DIPTYCH_SECRET": SECRET, **ENVIRONMENT})


def test_next_system_finds_the_blocks_and_a_frozen_bucket_costs_no_answer(
    bucket: S3Server, system: Callable[[], AbstractContextManager[Stack]]
) -> None:
    with system() as stack:
        said = tokens(answers(stack))
        stack.wait_idle()
        whole = len(PROMPTS) * ((LENGTH + TOKENS - 1) // BLOCK)
        deadline = time.monotonic() + 60
        while len(bucket.objects) < whole:
            assert time.monotonic() < deadline, f"{len(bucket.objects)} of {whole} blocks were stored"
            time.sleep(0.1)
    with system() as stack:
        strangers = answers(stack, salt="another")
        assert (tokens(strangers), cached(strangers)) == (said, [0] * len(PROMPTS))
        found = answers(stack)
        assert (tokens(found), cached(found)) == (said, [(LENGTH - 1) // BLOCK * BLOCK] * len(PROMPTS))
    with system() as stack:
        bucket.freeze()
        try:
            assert tokens(answers(stack)) == said
        finally:
            bucket.thaw()
