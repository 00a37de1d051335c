"""Outcomes as a test wants them, from the moments at which output came."""

from collections.abc import Sequence

from diptych.bench.request import BenchRequest, Outcome, Reply, RequestFailed, ServerTimes


def answered(
    arrivals: Sequence[float],
    *,
    sent: float = 0.0,
    tokens: int | None = None,
    asked: int | None = None,
    prompt: int = 3,
    cached: int = 0,
    server: ServerTimes | None = None,
) -> Outcome:
    count = len(arrivals) if tokens is None else tokens
    request = BenchRequest((1,) * prompt, count if asked is None else asked)
    reply = Reply(tuple(arrivals), prompt, count, cached, "", server)
    return Outcome(request, sent, sent, arrivals[-1], reply)


def failed(code: str, *, sent: float = 0.0, ended: float = 1.0) -> Outcome:
    return Outcome(BenchRequest((1,), 1), sent, sent, ended, None, RequestFailed(code, "why"))
