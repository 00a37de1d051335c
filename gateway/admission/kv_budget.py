"""How much KV memory the requests that run will come to need, against what the decode workers have. Pure.

A request takes room for its prompt when it is computed, and more with every token of its output. Sent to
workers that cannot hold all of it, it is preempted later, or preempts others: work that is done twice, at the
time when there is most of it. So a request counts from its admission with what it will probably hold at its
end: the tokens of its prompt that are not cached, and an output as long as its tenant's were on average, at
most `max_tokens`. All in whole blocks; choices share the full blocks of their prompt.

The average may be wrong for one request. That is what preemption is for: it is rare, and need not be
impossible. What other gateways send to the same workers is not seen here.
"""

from __future__ import annotations

FIRST_GUESS_TOKENS = 256.0  # the output of a tenant of whom none was seen
SMOOTHING = 0.05  # weight of one output in the average


class KvBudget:
    """Of one gateway. Amounts are in tokens.

    `capacity` is what the decode workers can hold together; None = not known, and no limit.
    """

    def __init__(self) -> None:
        self.capacity: int | None = None
        self.reserved = 0
        self._block_size = 1
        self._mean_output: dict[str, float] = {}  # by tenant

    def resize(self, capacity: int | None, block_size: int) -> None:
        """The decode workers have so much, in blocks of so many tokens."""
        self.capacity = capacity
        self._block_size = max(block_size, 1)

    def need(self, prompt_tokens: int, max_tokens: int, sequences: int, tenant: str) -> int:
        """What a request will hold at its end, never more than there is.

        Args:
            prompt_tokens: those to compute.
            max_tokens: the longest that each output can become.
            sequences: outputs that it makes side by side.
        """
        output = min(self._mean_output.get(tenant, FIRST_GUESS_TOKENS), max_tokens)
        shared, own = divmod(prompt_tokens, self._block_size)
        blocks = shared + sequences * -int(-(own + output) // self._block_size)
        need = blocks * self._block_size
        return need if self.capacity is None else min(need, self.capacity)

    def fits(self, need: int) -> bool:
        """Whether a request of this need may run beside the others."""
        return self.capacity is None or self.reserved + need <= self.capacity

    def excess(self, need: float) -> float:
        """By how many times all that there is `need` more would be too much; 0 if it is not."""
        if not self.capacity:
            return 0.0
        return max(self.reserved + need - self.capacity, 0) / self.capacity

    def take(self, need: int) -> None:
        """A request of this need runs; as much is to be given back."""
        self.reserved += need

    def give_back(self, need: int) -> None:
        self.reserved -= need

    def learn(self, tenant: str, output_tokens: float) -> None:
        """One output of the tenant was so long."""
        mean = self._mean_output.get(tenant, output_tokens)
        self._mean_output[tenant] = mean + SMOOTHING * (output_tokens - mean)
