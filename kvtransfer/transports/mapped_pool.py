"""Memory of another process and its page of flags, mapped to be written."""

from __future__ import annotations

from diptych.engine.kv.kv_memory import KVLayout
from kvtransfer.transports.memory_mapping import ExportedPool, Flags, MemoryMapping


class MappedPool:
    """Blocks of a decode worker, or of one of its ranks, and the flags that say which are written."""

    def __init__(self, pool: ExportedPool, layout: KVLayout, num_blocks: int, mapping: MemoryMapping) -> None:
        """Map what a registration brought, of which the flags come first. Raises ValueError, OSError,
        RuntimeError.
        """
        if not pool.fds:
            raise ValueError("the decode worker sent no flags")
        self.memory = mapping.map(ExportedPool(pool.handle, pool.fds[1:]), layout, num_blocks)
        self.flags = Flags.open(pool.fds[0], num_blocks)
        self._mapping = mapping
        try:
            mapping.register_flags(self.flags)
        except BaseException:
            self.flags.close()
            raise

    def close(self) -> None:
        """Give the page of flags back; the memory is unmapped when nothing refers to it."""
        try:
            self._mapping.unregister_flags(self.flags)
        finally:
            self.flags.close()
