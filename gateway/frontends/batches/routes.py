"""HTTP of files and batches: ``/v1/files`` and ``/v1/batches``. A tenant sees what is its own."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import IO, Any, Final, TypeVar

from aiohttp import BodyPartReader, hdrs, web

from diptych.runtime.errors import DiptychError, InvalidParameter, StorageFull, UnknownObject
from gateway.call import Calls
from gateway.frontends.batches.bodies import BatchBody
from gateway.frontends.batches.records import BatchRecord, FileRecord
from gateway.frontends.batches.store import BatchStore, StoreFull, new_batch_id
from gateway.frontends.openai.body_model import validate_members
from gateway.frontends.openai.endpoints import Read
from gateway.frontends.openai.http_call import HttpCall
from gateway.frontends.openai.json_request import json_response, read_json, refuse
from gateway.request.json_values import parse_body

FILES: Final = "/v1/files"
BATCHES: Final = "/v1/batches"
UPLOAD_S: Final = 600.0
"""Seconds in which an upload must be whole."""
_CHUNK: Final = 256 << 10
_PAGE: Final = (1, 20, 100)  # fewest, default and most objects of a list
_PATH: Final = re.compile(rf"({FILES}|{BATCHES})(?:/([\w-]+)(/content|/cancel)?)?", re.ASCII)

Respond = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
Handle = Callable[[web.BaseRequest, HttpCall], Awaitable[web.StreamResponse]]
_Record = TypeVar("_Record", FileRecord, BatchRecord)


class BatchRoutes:
    """Handlers of the paths below ``/v1/files`` and ``/v1/batches``.

    Args:
        readers: of bodies, by endpoint.
        wake: called when there is a new batch.
    """

    def __init__(
        self, calls: Calls, store: BatchStore, readers: Mapping[str, Read], wake: Callable[[], None]
    ) -> None:
        self._calls = calls
        self._store = store
        self._readers = readers
        self._wake = wake

    def methods(self, path: str) -> Mapping[str, Respond]:
        """Return the handlers of a path by method; empty for a path of others."""
        found = _PATH.fullmatch(path)
        if found is None:
            return {}
        root, name, action = found.groups()
        route = root + ("/{id}" if name else "") + (action or "")
        handlers: dict[str, dict[str, Handle]] = {
            FILES: {"POST": self._upload, "GET": self._files},
            f"{FILES}/{{id}}": {"GET": partial(self._file, name), "DELETE": partial(self._delete, name)},
            f"{FILES}/{{id}}/content": {"GET": partial(self._content, name)},
            BATCHES: {"POST": self._create, "GET": self._batches},
            f"{BATCHES}/{{id}}": {"GET": partial(self._batch, name)},
            f"{BATCHES}/{{id}}/cancel": {"POST": partial(self._cancel, name)},
        }
        return {
            method: partial(self._respond, route, handle)
            for method, handle in handlers.get(route, {}).items()
        }

    async def _respond(self, route: str, handle: Handle, request: web.BaseRequest) -> web.StreamResponse:
        call = HttpCall(route, request, self._calls.clock())
        try:
            with self._calls.account(call):
                return await handle(request, call)
        except DiptychError as error:
            return await call.fail(error)

    async def _upload(self, request: web.BaseRequest, call: HttpCall) -> web.StreamResponse:
        if request.content_type != "multipart/form-data":
            raise InvalidParameter(hdrs.CONTENT_TYPE, "must be multipart/form-data")
        tenant, purpose, filename = call.caller.tenant, "", ""
        try:
            with self._store.upload(tenant) as file:
                async with asyncio.timeout(UPLOAD_S):
                    async for part in await request.multipart():
                        if not isinstance(part, BodyPartReader):
                            raise InvalidParameter("body", "must not be nested")
                        if part.name == "file":
                            filename = (part.filename or "")[:256]
                            await self._receive(part, file)
                        elif part.name == "purpose":
                            purpose = (await part.read_chunk(64)).decode("utf-8", "replace")
                if not filename:
                    raise InvalidParameter("file", "is required")
                if purpose != "batch":
                    raise InvalidParameter("purpose", "must be batch")
                record = await asyncio.to_thread(self._store.keep, tenant, file, filename, time.time())
        except StoreFull:
            raise StorageFull from None
        except TimeoutError:
            raise InvalidParameter("file", f"must be sent within {UPLOAD_S:g} s") from None
        except (ValueError, web.RequestPayloadError):
            raise InvalidParameter("body", "is malformed") from None
        return json_response(record.as_object())

    async def _receive(self, part: BodyPartReader, file: IO[bytes]) -> None:
        most, size = self._store.limits.file_bytes, 0
        while chunk := await part.read_chunk(_CHUNK):
            size += len(chunk)
            if size > most:
                raise InvalidParameter("file", f"must be at most {most} bytes")
            await asyncio.to_thread(file.write, chunk)

    async def _files(self, request: web.BaseRequest, call: HttpCall) -> web.StreamResponse:
        found = await asyncio.to_thread(self._store.files, call.caller.tenant)
        wanted = request.query.get("purpose")
        shown = [record for record in found if wanted in (None, record.purpose)]
        return json_response(_page(request, shown, lambda record: record.as_object()))

    def _known_file(self, tenant: str, name: str) -> FileRecord:
        try:
            return self._store.file(tenant, name)
        except FileNotFoundError:
            raise UnknownObject("file", name) from None

    async def _file(self, name: str, request: web.BaseRequest, call: HttpCall) -> web.StreamResponse:
        return json_response(self._known_file(call.caller.tenant, name).as_object())

    async def _delete(self, name: str, request: web.BaseRequest, call: HttpCall) -> web.StreamResponse:
        record = self._known_file(call.caller.tenant, name)
        batches = await asyncio.to_thread(self._store.batches, call.caller.tenant)
        if any(batch.input_file_id == record.id and not batch.ended for batch in batches):
            raise InvalidParameter("file_id", "is the input of a batch that has not ended: cancel it first")
        self._store.delete_file(call.caller.tenant, record.id)
        return json_response({"id": record.id, "object": "file", "deleted": True})

    async def _content(self, name: str, request: web.BaseRequest, call: HttpCall) -> web.StreamResponse:
        record = self._known_file(call.caller.tenant, name)
        path = self._store.content(call.caller.tenant, record.id)
        return await _send_file(request, path, record.num_bytes, call.id_header())

    async def _create(self, request: web.BaseRequest, call: HttpCall) -> web.StreamResponse:
        data = await read_json(request)
        if isinstance(data, web.Response):
            return data
        body = validate_members(BatchBody, parse_body(data))
        if body.endpoint not in self._readers:
            raise InvalidParameter("endpoint", f"must be one of {', '.join(self._readers)}")
        caller = call.caller
        try:
            self._store.file(caller.tenant, body.input_file_id)
        except FileNotFoundError:
            raise InvalidParameter("input_file_id", "is no file of yours") from None
        if await asyncio.to_thread(self._store.used_bytes) >= self._store.limits.all_bytes:
            raise StorageFull
        record = BatchRecord(
            new_batch_id(),
            caller.tenant,
            caller.quota_usage.name,
            body.endpoint,
            body.input_file_id,
            int(time.time()),
            body.metadata,
        )
        await asyncio.to_thread(self._store.create, record)
        self._wake()
        return json_response(record.as_object())

    def _known_batch(self, tenant: str, name: str) -> BatchRecord:
        try:
            return self._store.batch(tenant, name)
        except FileNotFoundError:
            raise UnknownObject("batch", name) from None

    def _shown(self, record: BatchRecord) -> dict[str, Any]:
        return record.as_object(cancelling=self._store.is_cancelled(record.tenant, record.id))

    async def _batch(self, name: str, request: web.BaseRequest, call: HttpCall) -> web.StreamResponse:
        return json_response(self._shown(self._known_batch(call.caller.tenant, name)))

    async def _batches(self, request: web.BaseRequest, call: HttpCall) -> web.StreamResponse:
        found = await asyncio.to_thread(self._store.batches, call.caller.tenant)
        return json_response(_page(request, found, self._shown))

    async def _cancel(self, name: str, request: web.BaseRequest, call: HttpCall) -> web.StreamResponse:
        record = self._known_batch(call.caller.tenant, name)
        if record.ended:
            raise InvalidParameter("batch_id", f"is of a batch that is {record.status}")
        self._store.cancel(call.caller.tenant, name)
        return json_response(self._shown(record))


def _page(
    request: web.BaseRequest, records: Sequence[_Record], show: Callable[[_Record], dict[str, Any]]
) -> dict[str, Any]:
    """Return the page of a list that ``limit`` and ``after`` ask for. Raises InvalidParameter."""
    fewest, default, most = _PAGE
    limit, after = request.query.get("limit", str(default)), request.query.get("after")
    if not (limit.isascii() and limit.isdecimal() and fewest <= int(limit[:6]) <= most):
        raise InvalidParameter("limit", f"must be from {fewest} to {most}")
    ids = [record.id for record in records]
    if after is not None and after not in ids:
        raise InvalidParameter("after", "is no id of this list")
    begin = 0 if after is None else ids.index(after) + 1
    shown = records[begin : begin + int(limit)]
    return {
        "object": "list",
        "data": [show(record) for record in shown],
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": begin + len(shown) < len(records),
    }


async def _send_file(
    request: web.BaseRequest, path: Path, size: int, headers: Mapping[str, str]
) -> web.StreamResponse:
    """Send the content of a file. Raises CancelledError when the client is gone."""
    response = web.StreamResponse(headers=headers)
    response.content_type = "application/jsonl"
    response.content_length = size
    try:
        with path.open("rb") as file:
            await response.prepare(request)
            while chunk := await asyncio.to_thread(file.read, _CHUNK):
                await response.write(chunk)
            await response.write_eof()
    except ConnectionError as error:
        raise asyncio.CancelledError("the client is gone") from error
    return response


def is_of_batches(path: str) -> bool:
    """Return whether a path is one of files or batches."""
    return _PATH.fullmatch(path) is not None


async def no_batches(request: web.BaseRequest) -> web.StreamResponse:
    """Say that a gateway without ``--batch-dir`` has neither files nor batches."""
    return refuse(HTTPStatus.BAD_REQUEST, "this gateway has no --batch-dir", "unsupported_feature")
