"""Files and batches on disk, below ``--batch-dir``: what a gateway's death must not lose.

    TENANT/files/ID.jsonl, ID.json        content and record
    TENANT/batches/ID/record.json         what was asked for, and how far it is
                      lock                held by the gateway that runs it
                      cancel              there once a client cancelled it
                      output.jsonl        results so far, one line each, in the order they came
                      errors.jsonl        likewise of requests that failed

TENANT is a digest of the tenant's name. Records are replaced as a whole. A result is appended in one write;
one that a death cut is removed before its line runs again. Only the gateway's user may read any of it. All
calls block: those that read or write much belong into a thread.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Final

from gateway.frontends.batches.lines import whole_results
from gateway.frontends.batches.records import BatchRecord, FileRecord

_FILE_ID: Final = re.compile(r"file-[0-9a-f]{24}[oe]?")
_BATCH_ID: Final = re.compile(r"batch_[0-9a-f]{24}")
OUTPUT, ERRORS = "output.jsonl", "errors.jsonl"
_ENDINGS: Final = {OUTPUT: "o", ERRORS: "e"}


class StoreFull(Exception):
    """Upload for which ``--batch-dir`` has no room."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Most bytes of one file, and of everything."""

    file_bytes: int
    all_bytes: int


class BatchStore:
    """Store in a folder, which is made when it is missing. Raises OSError from every method."""

    def __init__(self, root: Path, limits: StoreLimits) -> None:
        _make_private(root)
        self._root = root
        self.limits = limits

    def _tenant(self, tenant: str) -> Path:
        return self._root / hashlib.sha256(tenant.encode()).hexdigest()[:32]

    def _files(self, tenant: str) -> Path:
        return self._tenant(tenant) / "files"

    def folder(self, tenant: str, batch_id: str) -> Path:
        """Return the folder of a batch. Raises FileNotFoundError for what is no id of one."""
        if not _BATCH_ID.fullmatch(batch_id):
            raise FileNotFoundError(batch_id)
        return self._tenant(tenant) / "batches" / batch_id

    def content(self, tenant: str, file_id: str) -> Path:
        """Return where the content of a file is. Raises FileNotFoundError for what is no id of one."""
        if not _FILE_ID.fullmatch(file_id):
            raise FileNotFoundError(file_id)
        return self._files(tenant) / f"{file_id}.jsonl"

    def used_bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(file.stat().st_size for file in self._root.rglob("*") if file.is_file())

    @contextlib.contextmanager
    def upload(self, tenant: str) -> Iterator[IO[bytes]]:
        """Open a file for the content of an upload, which is removed unless `keep` took it.

        Raises StoreFull.
        """
        if self.used_bytes() >= self.limits.all_bytes:
            raise StoreFull
        folder = self._files(tenant)
        _make_private(folder)
        path = folder / f"{secrets.token_hex(12)}.part"
        try:
            with open(path, "xb", opener=_private) as file:
                yield file
        finally:
            path.unlink(missing_ok=True)

    def keep(self, tenant: str, upload: IO[bytes], filename: str, now: float) -> FileRecord:
        """Make a file of an upload."""
        upload.flush()
        os.fsync(upload.fileno())
        record = FileRecord(
            f"file-{secrets.token_hex(12)}", filename, "batch", os.fstat(upload.fileno()).st_size, int(now)
        )
        os.link(upload.name, self.content(tenant, record.id))
        self._save_file(tenant, record)
        return record

    def _save_file(self, tenant: str, record: FileRecord) -> None:
        _replace(self._files(tenant) / f"{record.id}.json", asdict(record))

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Return the record of a file. Raises FileNotFoundError."""
        return FileRecord(**json.loads(self.content(tenant, file_id).with_suffix(".json").read_bytes()))

    def files(self, tenant: str) -> list[FileRecord]:
        """Return all files of a tenant, the newest first."""
        found = []
        for path in self._files(tenant).glob("file-*.json"):
            with contextlib.suppress(FileNotFoundError):
                found.append(self.file(tenant, path.stem))
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    def delete_file(self, tenant: str, file_id: str) -> None:
        """Delete a file. Raises FileNotFoundError."""
        content = self.content(tenant, file_id)
        content.with_suffix(".json").unlink()
        content.unlink(missing_ok=True)

    def create(self, record: BatchRecord) -> None:
        """Write a new batch, whose id `new_batch_id` made."""
        _make_private(self.folder(record.tenant, record.id))
        self.save(record)

    def save(self, record: BatchRecord) -> None:
        _replace(self.folder(record.tenant, record.id) / "record.json", record.as_json())

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Return a batch. Raises FileNotFoundError."""
        return BatchRecord(**json.loads((self.folder(tenant, batch_id) / "record.json").read_bytes()))

    def batches(self, tenant: str) -> list[BatchRecord]:
        """Return all batches of a tenant, the newest first."""
        found = []
        for path in (self._tenant(tenant) / "batches").glob("batch_*"):
            with contextlib.suppress(FileNotFoundError):
                found.append(self.batch(tenant, path.name))
        return sorted(found, key=lambda record: (record.created_at, record.id), reverse=True)

    def all_batches(self, known: Container[str] = ()) -> Iterator[BatchRecord]:
        """Yield the batches of all tenants, in no order, but for those whose ids are known."""
        for path in self._root.glob("*/batches/batch_*/record.json"):
            if path.parent.name in known:
                continue
            with contextlib.suppress(FileNotFoundError):
                yield BatchRecord(**json.loads(path.read_bytes()))

    def cancel(self, tenant: str, batch_id: str) -> None:
        """Ask the gateway that runs a batch to end it."""
        (self.folder(tenant, batch_id) / "cancel").touch(mode=0o600)

    def is_cancelled(self, tenant: str, batch_id: str) -> bool:
        return (self.folder(tenant, batch_id) / "cancel").exists()

    def lock(self, record: BatchRecord) -> IO[bytes] | None:
        """Return the lock of a batch, which is held until it is closed; None if another gateway has it."""
        path = self.folder(record.tenant, record.id) / "lock"
        file = open(path, "ab", opener=_private)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def results(self, record: BatchRecord, name: str) -> set[str]:
        """Return the ids of all results in OUTPUT or ERRORS; what a death cut is removed from the end."""
        path = self.folder(record.tenant, record.id) / name
        if not path.exists():
            return set()
        with path.open("r+b") as file:
            found, size = whole_results(file)
            file.truncate(size)
        return found

    def open_results(self, record: BatchRecord, name: str) -> IO[bytes]:
        """Open OUTPUT or ERRORS to append to, unbuffered: each write is one result."""
        path = self.folder(record.tenant, record.id) / name
        return open(path, "ab", buffering=0, opener=_private)

    def publish(self, record: BatchRecord, name: str, now: float) -> str | None:
        """Make a file of OUTPUT or ERRORS; returns its id, None without a result. May be done again."""
        file_id = f"file-{record.id.removeprefix('batch_')}{_ENDINGS[name]}"
        source, content = self.folder(record.tenant, record.id) / name, self.content(record.tenant, file_id)
        if source.exists() and not source.stat().st_size:
            source.unlink()
        if source.exists():
            with source.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(source, content)
        if not content.exists():
            return None
        size = content.stat().st_size
        purpose = "batch_output"
        self._save_file(record.tenant, FileRecord(file_id, f"{record.id}_{name}", purpose, size, int(now)))
        return file_id

    def forget_before(self, created_at: float) -> None:
        """Delete ended batches, and files of no running batch, that are older than a time."""
        used = set[str]()
        for record in list(self.all_batches()):
            if record.created_at < created_at and record.ended:
                shutil.rmtree(self.folder(record.tenant, record.id), ignore_errors=True)
            elif not record.ended:
                used.add(record.input_file_id)
        for path in self._root.glob("*/files/file-*.json"):
            if path.stat().st_mtime < created_at and path.stem not in used:
                path.with_suffix(".jsonl").unlink(missing_ok=True)
                path.unlink(missing_ok=True)


def new_batch_id() -> str:
    """Return the id of a new batch."""
    return f"batch_{secrets.token_hex(12)}"


def _make_private(folder: Path) -> None:
    """Make a folder and those above it that are missing, for this user alone."""
    for one in (*reversed(folder.parents), folder):
        if not one.exists():
            one.mkdir(mode=0o700, exist_ok=True)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _replace(path: Path, value: dict[str, Any]) -> None:
    """Write JSON in place of what is there, in one step."""
    fresh = path.with_name(f"{path.name}.{secrets.token_hex(4)}")
    with open(fresh, "xb", opener=_private) as file:
        file.write(json.dumps(value).encode())
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)
