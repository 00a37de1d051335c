"""Records of workers in the directory."""

import dataclasses
import json
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

from diptych.runtime.kv_layout_name import drafter_of, without_draft

Role = Literal["prefill", "decode", "encode"]


class Identity(NamedTuple):
    """Life of a worker's cache. A restart changes the incarnation, a cache clear the epoch.

    Prefix entries count only while their identity is the one in the worker's lease: a crash or a
    clear makes all older entries void at once, without a scan.
    """

    incarnation: int
    epoch: int


@dataclass(frozen=True)
class WorkerLoad:
    """Load of a worker; refreshed once a second (links between processes carry it more often)."""

    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0


@dataclass(frozen=True)
class WorkerRecord:
    """A worker as the router sees it. `address` is host:port of its gRPC services.

    `epoch` is 0 until the directory has given one. Blocks are of `block_size` tokens; `max_context` is in
    tokens. `memory_domain` is equal for workers that compute in one memory; others copy blocks. `replaces`:
    ids of dead workers, by comma, in whose place it was started. `roles`: those, by comma, in which its
    supervisor can start it; empty where it keeps its role. A sequence takes a block for `block_size` tokens,
    and `window_blocks` more for the last `window_places` such stretches. `image_rows`: format of the
    embeddings of images that it makes or takes; empty for a model of text. `encodes`: 1 if it makes them.
    """

    worker_id: str
    role: Role
    address: str
    incarnation: int
    model_digest: str
    model_name: str
    dtype: str
    kv_dtype: str
    kv_layout: str
    block_size: int
    max_context: int
    total_blocks: int
    num_threads: int
    epoch: int = 0
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    replaces: str = ""
    memory_domain: str = ""
    draft_digest: str = ""
    roles: str = ""
    window_blocks: int = 0
    window_places: int = 0
    image_rows: str = ""
    encodes: int = 0

    @property
    def pool_tokens(self) -> int:
        """Most tokens of one sequence that its pool holds."""
        windowed = self.window_blocks * self.window_places
        if self.total_blocks < self.window_places + windowed:
            return self.total_blocks // (1 + self.window_blocks) * self.block_size
        return (self.total_blocks - windowed) * self.block_size

    @property
    def window_reach(self) -> int:
        """Places before the end of a cached prefix whose windowed blocks it needs, to use the prefix."""
        return max(0, self.window_places - 1)

    @property
    def kept(self) -> str:
        """Return what its blocks keep: the type of keys and values, and the draft model with its own."""
        return f"{self.kv_dtype}+{self.draft_digest}" if self.draft_digest else self.kv_dtype

    @property
    def drafter(self) -> str:
        """Return what workers share whose drafters can use one another's keys and values; empty without."""
        return drafter_of(self.kv_layout, self.draft_digest)

    @property
    def own_layout(self) -> str:
        """Return the layout of its blocks without the drafter's segment."""
        return without_draft(self.kv_layout)

    @property
    def dead(self) -> list[str]:
        """The workers that it replaces: their supervisor saw them end."""
        return self.replaces.split(",") if self.replaces else []

    @property
    def other_roles(self) -> list[str]:
        """The roles to which it can change."""
        return [role for role in self.roles.split(",") if role and role != self.role]

    @property
    def identity(self) -> Identity:
        return Identity(self.incarnation, self.epoch)

    def with_load(self, load: WorkerLoad) -> "WorkerRecord":
        return dataclasses.replace(self, **dataclasses.asdict(load))


@dataclass(frozen=True)
class Lease:
    """The value of a worker's lease key: its record, and how far its prefix updates have got."""

    record: WorkerRecord
    prefix_seq: int

    def to_json(self) -> str:
        return json.dumps({"record": vars(self.record), "prefix_seq": self.prefix_seq})

    @classmethod
    def from_json(cls, text: str | bytes) -> "Lease":
        """Parse a lease.

        Raises ValueError for what is none. Unknown fields, of newer workers, are passed over.
        """
        try:
            data = json.loads(text)
            return cls(_record(data["record"]), _checked(data["prefix_seq"], int, "prefix_seq"))
        except (KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"not a worker's lease: {error!r}") from error


def record_to_json(record: WorkerRecord) -> str:
    """Return the record as a worker announces it to its supervisor."""
    return json.dumps(vars(record))


def record_from_json(text: str | bytes) -> WorkerRecord:
    """Return the record in `record_to_json`'s text. Raises ValueError."""
    try:
        return _record(json.loads(text))
    except (KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a worker's record: {error!r}") from error


_FIELDS = {field.name: field for field in dataclasses.fields(WorkerRecord)}


def _record(data: dict[str, Any]) -> WorkerRecord:
    values = {name: value for name, value in data.items() if name in _FIELDS}
    for name, value in values.items():
        _checked(value, int if _FIELDS[name].type is int else str, name)
    if values["role"] not in get_args(Role):
        raise ValueError("not a worker's lease: unknown role")
    # A prefill worker has no blocks.
    if values["block_size"] < 1 or values["max_context"] < 1 or values["total_blocks"] < 0:
        raise ValueError("not a worker's lease: a size is out of range")
    if min(values.get("window_blocks", 0), values.get("window_places", 0)) < 0:
        raise ValueError("not a worker's lease: blocks of a window below 0")
    return WorkerRecord(**values)


def _checked(value: Any, kind: type, name: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"not a worker's lease: {name} is no {kind.__name__}")
    return value
