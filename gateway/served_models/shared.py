"""Agreement of gateways on what is served: what one is told while it serves, the others do as well.

Records lie in the directory as adapters' names do (`diptych.runtime.discovery.shared_names`), and each
gateway has a copy. It follows the copy in a task of its own: no request, and no operator, waits for Redis.
While that is away each gateway goes on with what it has; afterwards the later record of a name counts.

A gateway that starts reads the records before its first request. Settings that are newer than a record count
more: see `gateway.model.shared_record`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from functools import partial
from typing import Final

from diptych.runtime.discovery.shared_names import SharedNames, Values
from diptych.runtime.discovery.store import STORE_ERRORS
from diptych.runtime.errors import DiptychError
from diptych.runtime.task_cancellation import end_task
from gateway.model.shared_record import Kind, SharedRecord, differences, parse_records
from gateway.served_models.service import ModelService

SCOPE: Final = "models"
RETRY_S: Final = 10.0
BEGIN_S: Final = 1.0
"""Time for which a gateway that starts waits for the records."""
_PASSES: Final = 4  # one record may need another one first
_log = logging.getLogger(__name__)


class SharedModels:
    """Models and aliases of this gateway as all gateways of the directory have them.

    Args:
        service: whose models they are; it has what the settings say, and nothing else.
    """

    def __init__(self, service: ModelService, redis_url: str) -> None:
        self._service = service
        self._configured = self._served()
        self._names = SharedNames(redis_url, SCOPE, self._on_change)
        self._records: dict[str, SharedRecord] = {}
        self._outdated: dict[str, SharedRecord] = {}  # that the settings have overtaken
        self._problems: dict[str, str] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        service.on_change = self._record

    async def start(self) -> None:
        """Serve what the records say, if they can be read at once; then follow them."""
        with contextlib.suppress(TimeoutError, *STORE_ERRORS):
            async with asyncio.timeout(BEGIN_S):
                await self._names.synchronise()
        await self._follow_all(at_once=True)
        self._names.start()
        self._task = asyncio.create_task(self._run(), name="shared-models")

    async def close(self) -> None:
        await end_task(self._task)
        await self._names.close()

    def _on_change(self, values: Values) -> None:
        records = parse_records(values)
        if not self._names.has_read:  # these were written before this gateway's settings, or may have been
            self._outdated = {
                key: one for key, one in records.items() if not one.counts_over(self._configured.get(key))
            }
            for key in self._outdated:
                _log.info("%s: the settings are newer than what the gateways share", key)
        for key in self._served():
            if key in self._records and key not in values:  # dropped
                records[key] = SharedRecord(self._records[key].kind, self._records[key].name)
        self._records = records
        self._wake.set()

    def _record(self, change: SharedRecord) -> None:
        """Tell the other gateways what this one was told."""
        configured = self._configured.get(change.key)
        record = change.after(self._records.get(change.key), configured)
        self._records[change.key] = record
        if record.content or configured is not None:
            self._names.put(record.key, record.to_json())
        else:
            self._names.drop(record.key)
        self._wake.set()  # what could not be followed before may be possible now

    def _served(self) -> dict[str, str]:
        """Return what is served here: contents by the keys of records."""
        models = self._service.models
        found = [SharedRecord(Kind.MODEL, core.name, digest=core.digest) for core in models]
        found += [SharedRecord(Kind.ALIAS, one.name, shares=one.shares) for one in models.aliases]
        return {record.key: record.content for record in found}

    def _counts(self, record: SharedRecord) -> bool:
        return self._records.get(record.key) == record and self._outdated.get(record.key) != record

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            try:
                await self._follow_all()
            except Exception:
                _log.exception("the shared models could not be followed; trying on")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await self._wake.wait()

    async def _follow_all(self, *, at_once: bool = False) -> None:
        """Follow all records that count, as far as that is possible now."""
        problems: dict[str, str] = {}
        for _ in range(_PASSES):
            records = [one for one in self._records.values() if self._counts(one)]
            behind = differences(records, self._served())
            problems = {}
            for record in behind:
                try:
                    await self._service.follow(record, partial(self._counts, record), at_once=at_once)
                except DiptychError as error:
                    problems[record.key] = str(error)
            if len(problems) == len(behind):
                break
        for key in problems.keys() - self._problems.keys():
            _log.warning("%s: another gateway was told so, and this one cannot: %s", key, problems[key])
        self._problems = problems
        self._service.problems = [f"{key.partition(':')[2]}: {why}" for key, why in problems.items()]
