"""Who is on this gateway's list of workers, and what those that are linked can do together."""

from __future__ import annotations

from collections.abc import Iterator

from gateway.admission.capacity import Capacity
from gateway.attempt.types import Role
from gateway.worker_pool.links import LinkDown
from gateway.worker_pool.worker import KV_FORMAT, Worker

PREFILLING_SEQUENCES = 8  # on their way through one prefill worker
UNKNOWN_BATCH = 65536  # a worker that does not say how many sequences it runs sets no limit


class WorkerRegistry:
    """Workers by id, linked or not."""

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        """Over a copy: workers may come and go meanwhile."""
        return iter(list(self._workers.values()))

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    def get(self, worker_id: str) -> Worker | None:
        return self._workers.get(worker_id)

    def listed(self, worker_id: str) -> Worker:
        """Raises LinkDown for one that is not there (any more)."""
        worker = self._workers.get(worker_id)
        if worker is None:
            raise LinkDown(worker_id)
        return worker

    def add(self, worker: Worker) -> None:
        self._workers[worker.record.worker_id] = worker

    def remove(self, worker_id: str) -> Worker:
        return self._workers.pop(worker_id)

    def replaced(self, worker_id: str) -> bool:
        """Whether a linked worker was started in the place of this one, which is dead."""
        return any(worker_id in w.record.dead for w in self.linked())

    # --- those that are linked ------------------------------------------------------------------------

    def linked(self) -> list[Worker]:
        """All workers whose link is up."""
        return [w for w in self._workers.values() if w.link.up]

    def linked_to(self, worker_id: str) -> bool:
        worker = self._workers.get(worker_id)
        return worker is not None and worker.link.up

    def serving(self, role: Role) -> list[Worker]:
        """Workers of a role whose link is up; only those that are welcome, as long as there are any."""
        linked = [w for w in self.linked() if w.record.role == role.value]
        return [w for w in linked if w.welcome] or [w for w in linked if w.leased] or linked

    def missing_role(self) -> Role | None:
        """The role that has no worker, None when a request can be served: one compatible pair is linked."""
        prefill, decode = self.serving(Role.PREFILL), self.serving(Role.DECODE)
        if not prefill:
            return Role.PREFILL
        formats = {w.kv_format for w in prefill}
        return None if any(w.kv_format in formats for w in decode) else Role.DECODE

    def why_not_ready(self) -> str:
        """In what the pairs of linked workers differ, or which role has none; empty where a pair fits."""
        missing = self.missing_role()
        prefill, decode = self.serving(Role.PREFILL), self.serving(Role.DECODE)
        if missing is None:
            return ""
        if not prefill or not decode:
            return f"no {missing.value} worker is linked"
        one, other = prefill[0].record, decode[0].record
        differ = [name for name in KV_FORMAT if getattr(one, name) != getattr(other, name)]
        values = (f"{name} {getattr(one, name)} and {getattr(other, name)}" for name in differ)
        return f"{one.worker_id} and {other.worker_id} do not fit together: {', '.join(values)}"

    def capacity(self) -> Capacity:
        """Beside the sequences in decode batches there are the few whose prompts are being computed. There is
        none while a role is missing.
        """
        if self.missing_role() is not None:
            return Capacity(0, 0)
        prefill, decode = self.serving(Role.PREFILL), self.serving(Role.DECODE)
        batches = [w.load.max_running or UNKNOWN_BATCH for w in decode]
        return Capacity(
            sum(batches) + PREFILLING_SEQUENCES * len(prefill),
            len(prefill),
            kv_tokens=sum(w.kv_tokens for w in decode),
            block_size=self.block_size() or 1,
        )

    def token_limit(self) -> int | None:
        """Most tokens, prompt and output together, that some linked decode worker takes; None without one."""
        return max((w.max_tokens for w in self.serving(Role.DECODE)), default=None)

    def block_size(self) -> int | None:
        return next((w.record.block_size for w in self.serving(Role.DECODE)), None)
