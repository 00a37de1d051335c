"""Log-probabilities of a prompt and its outputs: collected, ranked for ``best_of``, written into messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from gateway.attempt.types import TokenLogprob
from gateway.cooperative_yield import Yielder


class PromptLogprobs:
    """Scores of one prompt's tokens, in order and once, as the prefill worker sends them."""

    def __init__(self, prompt_tokens: int) -> None:
        self._expected = prompt_tokens - 1  # the first token has no context to be scored in
        self.scores: list[TokenLogprob] = []  # of the tokens from position 1 on

    @property
    def complete(self) -> bool:
        return len(self.scores) >= self._expected

    def add(self, first: int, scores: Sequence[TokenLogprob]) -> bool:
        """Add scores from position ``first`` on; those that a later attempt repeats are dropped.

        Returns False if scores are missing before these, or if there are more than the prompt has tokens.
        """
        known = len(self.scores) + 1 - first
        if known < 0 or first < 1:
            return False
        self.scores += scores[known:]
        return len(self.scores) <= self._expected


def best_outputs(logprobs: Sequence[float], count: int) -> list[int]:
    """Return the indexes of the ``count`` likeliest outputs, likeliest first; of equals the lower index.

    Args:
        logprobs: of each whole output, the sum over its tokens.
        count: number of outputs to keep.
    """
    return sorted(range(len(logprobs)), key=lambda index: -logprobs[index])[:count]


class LogprobWriter:
    """Writer of log-probability records: each token with its text, and its bytes where no text can tell them.

    The spelling of each token is made once per model.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spellings: dict[int, tuple[str, bytes]] = {}

    async def add(
        self,
        message: pb.OutputDelta | pb.PromptInfo,
        scored: Iterable[tuple[int, TokenLogprob]],
        turns: Yielder,
    ) -> None:
        """Add one record for each (token id, score) to ``message``."""
        for token_id, score in scored:
            self._add(message, token_id, score)
            await turns.done(1 + len(score.top))

    async def add_prompt(
        self, info: pb.PromptInfo, prompt_ids: Sequence[int], scores: Sequence[TokenLogprob], turns: Yielder
    ) -> None:
        """Add one record per prompt token to ``info``. The first has no logprob: it has no context."""
        text, utf8 = self._spelling(prompt_ids[0])
        info.logprobs.add(token_id=prompt_ids[0], text=text, utf8=utf8)
        await self.add(info, zip(prompt_ids[1:], scores, strict=False), turns)

    def _add(self, message: pb.OutputDelta | pb.PromptInfo, token_id: int, score: TokenLogprob) -> None:
        # Created inside the message: a record created outside would be copied into it.
        text, utf8 = self._spelling(token_id)
        record = message.logprobs.add(
            token_id=token_id, text=text, utf8=utf8, logprob=score.logprob, rank=score.rank
        )
        add = record.top.add
        for rank, (other, logprob) in enumerate(score.top, 1):
            text, utf8 = self._spelling(other)
            add(token_id=other, text=text, utf8=utf8, logprob=logprob, rank=rank)

    def _spelling(self, token_id: int) -> tuple[str, bytes]:
        """Return the token's text, and its bytes if they are no valid text."""
        spelling = self._spellings.get(token_id)
        if spelling is None:
            spelling = self._spellings[token_id] = self._spell(token_id)
        return spelling

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        piece = self._tokenizer.piece(token_id)
        try:
            return piece.decode(), b""
        except UnicodeDecodeError:
            return piece.decode(errors="replace"), piece
