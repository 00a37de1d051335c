"""Scores as clients get them: each token with its text, and its bytes where those are no whole characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from diptych.v1 import inference_pb2 as pb
from gateway.session.session_events import TokenScore
from runtime.tokenizer.tokenizer import Tokenizer


class TokenLogprobs:
    """Of one model. The spelling of each token is made once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spellings: dict[int, tuple[str, bytes]] = {}

    def of_output(self, scored: Iterable[tuple[int, TokenScore]]) -> list[pb.TokenLogprob]:
        """One record for each (token id, score)."""
        return [self._scored(token_id, score) for token_id, score in scored]

    def of_prompt(self, prompt_ids: Sequence[int], scores: Sequence[TokenScore]) -> list[pb.TokenLogprob]:
        """One record a token. The first has no logprob: nothing comes before it to judge it by."""
        records = [self._bare(prompt_ids[0])]
        records += [self._scored(i, score) for i, score in zip(prompt_ids[1:], scores, strict=False)]
        return records

    def _scored(self, token_id: int, score: TokenScore) -> pb.TokenLogprob:
        record = self._bare(token_id)
        record.logprob = score.logprob
        record.rank = score.rank
        for rank, (other, logprob) in enumerate(score.top, 1):
            alternative = self._bare(other)
            alternative.logprob, alternative.rank = logprob, rank
            record.top.append(alternative)
        return record

    def _bare(self, token_id: int) -> pb.TokenLogprob:
        spelling = self._spellings.get(token_id)
        if spelling is None:
            spelling = self._spellings[token_id] = self._spell(token_id)
        text, utf8 = spelling
        return pb.TokenLogprob(token_id=token_id, text=text, utf8=utf8)

    def _spell(self, token_id: int) -> tuple[str, bytes]:
        """Text, and the bytes if the text cannot tell them."""
        piece = self._tokenizer.piece(token_id)
        try:
            return piece.decode(), b""
        except UnicodeDecodeError:
            return piece.decode(errors="replace"), piece
