"""The tree of cached blocks: which block holds the tokens that a key stands for.

A key (opaque here, a keyed hash chain outside) names one full block and, through the chain, all before it. A
node's parent is the block before it, so that cached prefixes form a forest. Three facts keep it sound:

- It is prefix-closed: a node is only ever removed when it has no children, or together with all of them.
- A node is *pinned* while its block is referenced or any descendant is pinned. A sequence may hold a child
  without holding the parent's block (it computed its own copy of the parent before losing the race to insert
  it).
- Only an unpinned leaf can be evicted; the least recently released goes first. Every unpinned node can be
  reached by evicting leaves, so the count of unpinned nodes is exactly what allocation may still reclaim.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

ROOT = b""


@dataclass
class _Node:
    key: bytes
    block: int
    parent: bytes
    children: dict[bytes, None] = field(default_factory=dict)
    referenced: bool = False
    pinned_children: int = 0
    last_use: int = 0

    @property
    def pinned(self) -> bool:
        return self.referenced or self.pinned_children > 0


class PrefixCache:
    """Keys to blocks, with leaf-first eviction in order of last use. The pool tells it which blocks are
    referenced.
    """

    def __init__(self) -> None:
        self._nodes: dict[bytes, _Node] = {}
        self._key_of: dict[int, bytes] = {}
        self._heap: list[tuple[int, bytes]] = []
        self._clock = 0
        self._unpinned = 0

    def __len__(self) -> int:
        return len(self._nodes)

    @property
    def evictable(self) -> int:
        """Blocks that eviction can reclaim, now or after evicting their children."""
        return self._unpinned

    def keys(self) -> list[bytes]:
        """Return all cached keys, parents before children."""
        return list(self._nodes)

    def block_of(self, key: bytes) -> int | None:
        """Return the block under `key`, None if it is not cached."""
        node = self._nodes.get(key)
        return None if node is None else node.block

    def place_of(self, key: bytes) -> tuple[int, bytes] | None:
        """Return the block under `key` and the key before it, None if it is not cached."""
        node = self._nodes.get(key)
        return None if node is None else (node.block, node.parent)

    def key_of(self, block: int) -> bytes | None:
        """Return the key under which `block` is cached, None if it is not."""
        return self._key_of.get(block)

    def leading(self, keys: Sequence[bytes]) -> Iterator[int]:
        """Yield the blocks of the longest cached prefix of `keys`."""
        for key in keys:
            node = self._nodes.get(key)
            if node is None:
                return
            yield node.block

    def add(self, block: int, key: bytes, parent: bytes, *, referenced: bool) -> bool:
        """Cache `block` under `key`; False if the key is taken or its parent is not cached (any more)."""
        if key in self._nodes or (parent != ROOT and parent not in self._nodes):
            return False
        node = _Node(key, block, parent)
        self._nodes[key] = node
        self._key_of[block] = key
        self._unpinned += 1
        if parent != ROOT:
            self._nodes[parent].children[key] = None
        self._touch(node)
        if referenced:
            self._set_referenced(node, True)
        else:
            self._offer(node)
        return True

    def set_referenced(self, block: int, referenced: bool) -> None:
        """Note that the pool's reference count of a cached block left or reached zero."""
        self._set_referenced(self._nodes[self._key_of[block]], referenced)

    def evict(self) -> tuple[bytes, int] | None:
        """Remove the least recently used unpinned leaf and return its key and block; None if there is
        none.
        """
        while self._heap:
            last_use, key = heapq.heappop(self._heap)
            node = self._nodes.get(key)
            # Entries are not removed when a node is used again: they are recognised as stale here.
            if node is None or node.pinned or node.children or node.last_use != last_use:
                continue
            self._drop(node)
            return node.key, node.block
        return None

    def discard(self, key: bytes) -> list[tuple[bytes, int]]:
        """Remove `key` and everything below it, pinned or not; children come before parents."""
        if key not in self._nodes:
            return []
        order, pending = [], [key]
        while pending:
            node = self._nodes[pending.pop()]
            order.append(node)
            pending.extend(node.children)
        dropped = []
        for node in reversed(order):
            if node.referenced:
                self._set_referenced(node, False)
            self._drop(node)
            dropped.append((node.key, node.block))
        return dropped

    def clear(self) -> list[tuple[bytes, int]]:
        """Remove everything and return it."""
        dropped = [(node.key, node.block) for node in self._nodes.values()]
        self._nodes.clear()
        self._key_of.clear()
        self._heap.clear()
        self._unpinned = 0
        return dropped

    def _touch(self, node: _Node) -> None:
        self._clock += 1
        node.last_use = self._clock

    def _set_referenced(self, node: _Node, referenced: bool) -> None:
        if node.referenced == referenced:
            return
        was_pinned = node.pinned
        node.referenced = referenced
        self._touch(node)
        # Pins travel to the root only as far as they change something: releasing a chain of n blocks costs n,
        # not n².
        current: _Node | None = node
        while current is not None and current.pinned != was_pinned:
            self._unpinned += -1 if current.pinned else 1
            if not current.pinned:
                self._offer(current)
            parent = self._nodes.get(current.parent)
            if parent is None:
                break
            step = 1 if current.pinned else -1
            was_pinned = parent.pinned
            parent.pinned_children += step
            current = parent

    def _offer(self, node: _Node) -> None:
        """Make an unpinned leaf a candidate for eviction."""
        if node.pinned or node.children:
            return
        heapq.heappush(self._heap, (node.last_use, node.key))
        if len(self._heap) > 2 * len(self._nodes) + 64:
            self._heap = [
                (n.last_use, n.key) for n in self._nodes.values() if not n.pinned and not n.children
            ]
            heapq.heapify(self._heap)

    def _drop(self, node: _Node) -> None:
        del self._nodes[node.key]
        del self._key_of[node.block]
        self._unpinned -= 1
        parent = self._nodes.get(node.parent)
        if parent is not None:
            parent.children.pop(node.key, None)
            self._offer(parent)

    def invariants(self) -> None:
        """Raise RuntimeError if the forest is not prefix-closed or a count disagrees with a recount."""
        unpinned = 0
        for node in self._nodes.values():
            if node.parent != ROOT:
                parent = self._nodes.get(node.parent)
                if parent is None or node.key not in parent.children:
                    raise RuntimeError("a cached block without its parent")
            if not node.children.keys() <= self._nodes.keys():
                raise RuntimeError("a cached block names a child that is gone")
            if node.pinned_children != sum(self._nodes[c].pinned for c in node.children):
                raise RuntimeError("the count of pinned children is wrong")
            if self._key_of.get(node.block) != node.key:
                raise RuntimeError("a block and its key disagree")
            unpinned += not node.pinned
        if unpinned != self._unpinned or len(self._key_of) != len(self._nodes):
            raise RuntimeError("the count of evictable blocks is wrong")
        offered = set(self._heap)
        for node in self._nodes.values():
            if not node.pinned and not node.children and (node.last_use, node.key) not in offered:
                raise RuntimeError("an unpinned leaf that eviction cannot find")
