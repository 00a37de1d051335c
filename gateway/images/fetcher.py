"""Remote images, fetched on threads beside the event loop: so many at a time, of a tenant and of all.

Off unless `--allow-image-urls` names hosts. A caller's URL is an instruction to this server to make a request
from where it stands, so that what may be asked of whom is decided in `url_rules` and `download`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final
from weakref import WeakValueDictionary

from diptych.runtime.errors import ImageMemory, QueueFull
from gateway.images.download import Download, Judge, Resolve, resolve
from gateway.images.memory import ByteBudget
from gateway.images.url_rules import RefusedUrl, UrlRules, is_public

MOST_AT_ONCE: Final = 32
TENANT_AT_ONCE: Final = 4
MAX_WAITING: Final = 64
"""URLs of one tenant that are fetched or wait for it."""
FETCHED, REFUSED = "fetched", "refused"


def _uncounted(outcome: str) -> None:
    """Count nothing."""


class _Share:
    """Downloads of one tenant, kept alive by those that wait for them."""

    def __init__(self) -> None:
        self.places = asyncio.Semaphore(TENANT_AT_ONCE)
        self.waiting = 0


def _end(share: _Share, running: asyncio.Future[bytes]) -> None:
    share.places.release()
    if not running.cancelled():
        running.exception()  # not reported where the caller has left


class ImageFetcher:
    """Fetches the images at callers' URLs; one object per gateway."""

    def __init__(
        self,
        rules: UrlRules,
        timeout_s: float,
        count: Callable[[str], None] = _uncounted,
        *,
        resolve: Resolve = resolve,
        judge: Judge = is_public,
    ) -> None:
        """Fetch what `rules` allow.

        Args:
            timeout_s: for one image, its wait for others of the tenant included.
            count: called with FETCHED or REFUSED for each URL.
            resolve: returns a host's addresses.
            judge: returns whether an address may be connected to.
        """
        self._rules, self._timeout_s, self._count = rules, timeout_s, count
        self._resolve, self._judge = resolve, judge
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, "image-url")
        self._shares: WeakValueDictionary[str, _Share] = WeakValueDictionary()

    async def fetch(self, url: str, budget: ByteBudget, tenant: str) -> bytes:
        """Return the file at a URL, whose bytes are taken from `budget`.

        Raises RefusedUrl, QueueFull, ImageMemory.
        """
        share = self._shares.get(tenant)
        if share is None:
            share = self._shares[tenant] = _Share()
        if share.waiting >= MAX_WAITING:
            raise QueueFull()
        share.waiting += 1
        try:
            data = await self._fetch(url, budget, share)
        except (RefusedUrl, ImageMemory):
            self._count(REFUSED)
            raise
        finally:
            share.waiting -= 1
        self._count(FETCHED)
        return data

    def close(self) -> None:
        """Start no more downloads; no call may be running."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _fetch(self, url: str, budget: ByteBudget, share: _Share) -> bytes:
        target = self._rules.target(url)
        until = time.monotonic() + self._timeout_s
        download = Download(self._rules, target, budget, until, self._resolve, self._judge)
        try:
            async with asyncio.timeout(self._timeout_s):
                await share.places.acquire()
                # The place is free when the thread is: a name that is looked up cannot be given up.
                running = asyncio.get_running_loop().run_in_executor(self._threads, download.run)
                running.add_done_callback(partial(_end, share))
                return await asyncio.shield(running)
        except TimeoutError:
            raise RefusedUrl(f"takes longer to fetch than {self._timeout_s:g} s") from None
        finally:
            download.stop()
