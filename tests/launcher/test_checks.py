"""The directory that `up` is given, asked before anything starts. Without a server: test_cli.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from launcher.checks import BadOptions, check_directory
from tests.gateway.running_gateway import valkey


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with valkey() as found:
        yield found


def with_login(url: str, login: str) -> str:
    return f"redis://{login}@{url.removeprefix('redis://')}"


async def test_one_that_answers_will_do(url: str) -> None:
    await check_directory(url)


async def test_a_login_that_may_not_ask_finds_it_there(url: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.acl_setuser(
            "quiet", enabled=True, passwords=["+word"], categories=["+@all"], commands=["-ping"]
        )
    await check_directory(with_login(url, "quiet:word"))


async def test_a_login_that_is_refused_is_told_from_silence(url: str) -> None:
    with pytest.raises(BadOptions, match="refuses this login") as refused:
        await check_directory(with_login(url, "nobody:s3cret"))
    assert "s3cret" not in str(refused.value)
