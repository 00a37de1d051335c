"""Scores as clients get them: each token with its text, and its bytes where those are no whole characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diptych.runtime.tokenizer.tokenizer import Tokenizer
from diptych.v1 import inference_pb2 as pb
from gateway.attempt.types import TokenLogprob
from gateway.cooperative_yield import Yielder


class TokenLogprobs:
    """Of one model. The spelling of each token is made once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spellings: dict[int, tuple[str, bytes]] = {}

    async def add(
        self,
        message: pb.OutputDelta | pb.PromptInfo,
        scored: Iterable[tuple[int, TokenLogprob]],
        turns: Yielder,
    ) -> None:
        """One record for each (token id, score)."""
        for token_id, score in scored:
            self._add(message, token_id, score)
            await turns.done(1 + len(score.top))

    async def add_prompt(
        self, info: pb.PromptInfo, prompt_ids: Sequence[int], scores: Sequence[TokenLogprob], turns: Yielder
    ) -> None:
        """One record a token. The first has no logprob: nothing comes before it to judge it by."""
        text, utf8 = self._spelling(prompt_ids[0])
        info.logprobs.add(token_id=prompt_ids[0], text=text, utf8=utf8)
        await self.add(info, zip(prompt_ids[1:], scores, strict=False), turns)

    def _add(self, message: pb.OutputDelta | pb.PromptInfo, token_id: int, score: TokenLogprob) -> None:
        # Made where they belong: put together outside, every record would be copied into its message.
        text, utf8 = self._spelling(token_id)
        record = message.logprobs.add(
            token_id=token_id, text=text, utf8=utf8, logprob=score.logprob, rank=score.rank
        )
        add = record.top.add
        for rank, (other, logprob) in enumerate(score.top, 1):
            text, utf8 = self._spelling(other)
            add(token_id=other, text=text, utf8=utf8, logprob=logprob, rank=rank)

    def _spelling(self, token_id: int) -> tuple[str, bytes]:
        """Text, and the bytes if the text cannot tell them."""
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
