"""Remote images: a real server on this host, whose address the fetcher is made to take for public."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv6Address, ip_address

import pytest

from diptych.runtime.errors import ImageMemory, QueueFull
from gateway.images import fetcher as fetcher_module
from gateway.images.download import Download, Judge
from gateway.images.fetcher import FETCHED, REFUSED, ImageFetcher
from gateway.images.memory import ByteBudget, HeldMemory
from gateway.images.url_rules import RefusedUrl, UrlRules, is_public
from tests.gateway.images.remote_images import FILE, ImageHost, image_host, private_urls

LOOPBACK = ip_address("127.0.0.1")
NAMES = {
    "images.test": ["127.0.0.1"],
    "localhost": ["127.0.0.1", "::1"],
    "rebound.test": ["127.0.0.1"],
    "metadata.test": ["169.254.169.254"],
    "mixed.test": ["1.1.1.1", "10.0.0.1"],
    "none.test": [],
}


def as_if_public(address: IPv4Address | IPv6Address) -> bool:
    return address == LOOPBACK or is_public(address)


def resolve(host: str, port: int) -> list[str]:
    if host not in NAMES:
        raise socket.gaierror("unknown name")
    return NAMES[host]


@pytest.fixture
def host() -> Iterator[ImageHost]:
    with image_host() as made:
        yield made


def fetching(
    host: ImageHost, *, timeout_s: float = 20.0, judge: Judge = as_if_public, counted: list[str] | None = None
) -> ImageFetcher:
    rules = UrlRules((*(f"{name}:{host.port}" for name in NAMES), "*"))
    count = (counted if counted is not None else []).append
    return ImageFetcher(rules, timeout_s, count, resolve=resolve, judge=judge)


async def fetch(fetcher: ImageFetcher, host: ImageHost, path: str, num_bytes: int = 100_000) -> bytes:
    try:
        return await fetcher.fetch(f"http://images.test:{host.port}/{path}", ByteBudget(num_bytes), "tenant")
    finally:
        fetcher.close()


async def test_an_image_is_fetched_with_no_more_said_than_needed(host: ImageHost) -> None:
    counted: list[str] = []
    assert await fetch(fetching(host, counted=counted), host, "image?token=1") == FILE
    assert set(host.heads[0]) == {"host", "accept", "accept-encoding", "connection", "user-agent"}
    assert host.heads[0]["host"] == f"images.test:{host.port}"
    assert counted == [FETCHED]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("long", "more bytes"),
        ("endless", "more bytes"),
        ("zipped", "compresses"),
        ("cut", "cut off"),
        ("missing", "status 404"),
        ("to/http://localhost:%PORT/image", "another host"),
        ("to/http://127.0.0.1:%PORT/image", "must be an http"),
        ("to/file:///etc/passwd", "must be an http"),
        ("again", "more than 3 times"),
    ],
)
async def test_what_is_no_whole_image_of_its_host_is_refused_in_words(
    host: ImageHost, path: str, words: str
) -> None:
    counted: list[str] = []
    with pytest.raises(RefusedUrl, match=words):
        await fetch(fetching(host, counted=counted), host, path)
    assert counted == [REFUSED]


async def test_a_redirect_within_the_host_is_followed(host: ImageHost) -> None:
    assert await fetch(fetching(host), host, "to//image") == FILE
    assert host.settled() == 2


async def test_a_host_that_drips_is_left_at_the_end_of_its_time(host: ImageHost) -> None:
    fetcher = fetching(host, timeout_s=0.3)
    with pytest.raises(RefusedUrl, match=r"takes longer to fetch than 0\.3 s"):
        await fetch(fetcher, host, "drip")


async def test_of_200_private_addresses_none_is_connected_to(host: ImageHost) -> None:
    """The same addresses are connected to where private ones are taken for public: the host does count."""
    for judge, reached in ((is_public, False), (lambda address: True, True)):
        fetcher = fetching(host, judge=judge, timeout_s=2.0)
        outcomes = []
        for url in private_urls(host.port, 60 if reached else 200):
            try:
                outcomes.append(await fetcher.fetch(url, ByteBudget(100_000), "tenant"))
            except RefusedUrl:
                outcomes.append(None)
        fetcher.close()
        assert (host.settled() > 0) is reached
        assert any(outcomes) is reached


async def test_a_name_is_resolved_once_and_each_of_its_addresses_judged(host: ImageHost) -> None:
    asked: list[str] = []

    def rebinding(name: str, port: int) -> list[str]:
        asked.append(name)
        return ["127.0.0.1"] if len(asked) == 1 else ["10.0.0.1"]

    rules = UrlRules((f"rebound.test:{host.port}",))
    fetcher = ImageFetcher(rules, 20.0, resolve=rebinding, judge=as_if_public)
    assert await fetcher.fetch(f"http://rebound.test:{host.port}/image", ByteBudget(100_000), "a") == FILE
    assert asked == ["rebound.test"]
    with pytest.raises(RefusedUrl, match="without a public address"):
        await fetcher.fetch(f"http://rebound.test:{host.port}/image", ByteBudget(100_000), "a")
    fetcher.close()
    fetcher = fetching(host)
    for name in ("mixed.test", "none.test"):
        with pytest.raises(RefusedUrl, match="without a public address"):
            await fetcher.fetch(f"http://{name}/image", ByteBudget(100_000), "a")
    fetcher.close()


async def test_a_tenant_waits_for_its_own_downloads_and_no_other_tenant_does(
    host: ImageHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "MAX_WAITING", 6)
    fetcher = fetching(host)
    url = f"http://images.test:{host.port}"
    slow = [asyncio.create_task(fetcher.fetch(f"{url}/drip", ByteBudget(9), "greedy")) for _ in range(6)]
    while host.connections < fetcher_module.TENANT_AT_ONCE:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(QueueFull):
        await fetcher.fetch(f"{url}/image", ByteBudget(100_000), "greedy")
    assert await fetcher.fetch(f"{url}/image", ByteBudget(100_000), "other") == FILE
    assert host.settled() == fetcher_module.TENANT_AT_ONCE + 1
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert await fetcher.fetch(f"{url}/image", ByteBudget(100_000), "greedy") == FILE
    fetcher.close()


@pytest.mark.parametrize("path", ["image", "endless"])
async def test_files_of_all_requests_are_held_within_one_bound(host: ImageHost, path: str) -> None:
    """One of known length does not begin, one of unknown length ends; those before are not touched."""
    memory, counted = HeldMemory(3 * len(FILE) - 1), list[str]()
    fetcher = fetching(host, counted=counted)
    url = f"http://images.test:{host.port}"
    budgets = [ByteBudget(1 << 20, memory) for _ in range(3)]
    for budget in budgets[:2]:
        assert await fetcher.fetch(f"{url}/image", budget, "tenant") == FILE
    with pytest.raises(ImageMemory):
        await fetcher.fetch(f"{url}/{path}", budgets[2], "tenant")
    assert memory.held_bytes == 2 * len(FILE)
    for budget in budgets:
        budget.close()
    assert memory.held_bytes == 0
    assert not budgets[0].take(1)
    assert await fetcher.fetch(f"{url}/image", ByteBudget(1 << 20, memory), "tenant") == FILE
    assert counted == [FETCHED, FETCHED, REFUSED, FETCHED]
    fetcher.close()


async def test_a_download_that_was_given_up_before_its_thread_looks_up_no_name() -> None:
    asked: list[str] = []

    def recording(name: str, port: int) -> list[str]:
        asked.append(name)
        return ["10.0.0.1"]

    rules = UrlRules(("*",))
    target = rules.target("http://images.test/image")
    for given_up, names in ((True, []), (False, ["images.test"])):
        download = Download(rules, target, ByteBudget(9), time.monotonic() + 60.0, recording)
        if given_up:
            download.stop()
        with pytest.raises(RefusedUrl):
            download.run()
        assert asked == names
