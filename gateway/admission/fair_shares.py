"""How much of the queue each tenant holds, and who may add to it while it is full. Pure; in prompt tokens."""

from __future__ import annotations


class FairShares:
    """One tenant may fill the queue as long as it is alone. When it is full, who waits with less than an
    equal share of it still comes in, and who has more does not: so a flood keeps nobody else out. The
    overshoot that this makes is gone before anybody who has more than a share adds to the queue again.

    Args:
        size: of the queue. There are never more than twice as many tokens, but for one request where nothing
            waits, which is always taken.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[str, int] = {}  # by tenant; nobody has 0
        self.total = 0

    def fits(self, tenant: str, tokens: int) -> bool:
        """Whether a request of this tenant may wait, too. The first one may be longer than its share."""
        wanted = self.total + tokens
        if not self.total or wanted <= self._size:
            return True
        if wanted > 2 * self._size:
            return False
        held = self._held.get(tenant, 0)
        tenants = len(self._held) + (not held)
        return not held or held + tokens <= self._size / tenants

    def take(self, tenant: str, tokens: int) -> None:
        self._held[tenant] = self._held.get(tenant, 0) + tokens
        self.total += tokens

    def give_back(self, tenant: str, tokens: int) -> None:
        self._held[tenant] -= tokens
        self.total -= tokens
        if not self._held[tenant]:
            del self._held[tenant]
