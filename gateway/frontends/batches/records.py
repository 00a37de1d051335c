"""Records of files and batches, as they lie on disk and as clients see them. Times are Unix seconds."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, get_args

WINDOW_S: Final = 24 * 3600
"""OpenAI's one completion window: 24h."""
Status = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
ENDED: Final = frozenset({"failed", "completed", "expired", "cancelled"})
STATUSES: Final = frozenset(get_args(Status))


@dataclass(frozen=True, slots=True)
class FileRecord:
    """File of a tenant."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int

    def as_object(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
        }


@dataclass(slots=True)
class BatchRecord:
    """Batch of a tenant: what was asked for, and how far it is.

    Args:
        key: name of the API key that made it, whose quota its requests count towards.
        times: when each status began, by its name.
        ending: the status that it will have once its results are files.
        errors: faults of the input.
    """

    id: str
    tenant: str
    key: str
    endpoint: str
    input_file_id: str
    created_at: int
    metadata: dict[str, str] | None = None
    status: Status = "validating"
    ending: Status = "completed"
    times: dict[str, int] = field(default_factory=dict)
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: list[dict[str, Any]] = field(default_factory=list)

    @property
    def expires_at(self) -> int:
        return self.created_at + WINDOW_S

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    def move(self, status: Status, now: float) -> None:
        """Enter a status. Raises ValueError once the batch has ended."""
        if self.ended:
            raise ValueError(f"a batch that is {self.status} stays so")
        self.status = status
        self.times[status] = int(now)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def as_object(self, *, cancelling: bool = False) -> dict[str, Any]:
        """Return what clients see. ``cancelling``: it was asked to end and has not yet."""
        status = "cancelling" if cancelling and not self.ended else self.status
        stamps = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": self.errors} if self.errors else None,
            "input_file_id": self.input_file_id,
            "completion_window": "24h",
            "status": status,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{f"{name}_at": self.times.get(name) for name in stamps},
            "request_counts": {"total": self.total, "completed": self.completed, "failed": self.failed},
            "metadata": self.metadata,
        }
