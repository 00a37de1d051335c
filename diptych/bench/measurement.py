"""The figures of one run, under the names that vLLM's and SGLang's serving benchmarks give them.

TTFT and end-to-end latency (`e2el`; SGLang says `e2e_latency`) count from sending to the first and the last
output. ITL is the gap between two messages with output, TPOT the mean time of an answer's tokens after the
first. Latencies are over answered requests only, failures are counted apart.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from diptych.bench.drive import Run
from diptych.bench.figures import ServiceLevel, percentile
from diptych.bench.request import Outcome, ServerTimes
from diptych.bench.self_watch import Verdict

Figures = dict[str, float | None]
"""A name and its value; None where there was nothing to measure."""


@dataclass(frozen=True)
class Measured:
    """Measurement of one run: its figures, its failures by code, and whether the generator itself was the
    limit.

    Failures come as fast as the generator asks: where most requests failed, it was no limit.
    """

    figures: Figures
    errors: dict[str, int]
    bottleneck: Verdict


def measure(
    run: Run, level: ServiceLevel | None, *, exact_lengths: bool, price_hour: float | None = None
) -> Measured:
    """Measure a run.

    `exact_lengths` says that each answer had to be as long as asked for: shorter ones are counted.
    `price_hour` is what the measured server costs an hour, in dollars.
    """
    answered = [one for one in run.outcomes if one.reply is not None]
    figures: Figures = {
        **_throughput(run, answered, level),
        "output_throughput_per_user": _throughput_per_user(answered),
        **_prices(run, answered, price_hour),
        **latencies("ttft", [one.ttft for one in answered]),
        **latencies("tpot", [tpot for one in answered if (tpot := one.tpot) is not None]),
        **latencies("itl", [gap for one in answered for gap in one.itl]),
        **latencies("e2el", [one.latency for one in answered]),
        **latencies("e2e_latency", [one.latency for one in answered]),
        **_server_figures([one.reply.server for one in answered if one.reply and one.reply.server]),
        **latencies("send_delay", [one.sent - one.due for one in run.outcomes]),
        "short_outputs": sum(exact_lengths and _is_short(one) for one in answered),
        "steal_share": run.steal_share,
        **{f"generator_{name}": value for name, value in asdict(run.strain).items()},
    }
    errors = Counter(one.error.code for one in run.outcomes if one.error is not None)
    mostly_failed = 2 * len(answered) < len(run.outcomes)
    bottleneck: Verdict = "no" if mostly_failed else run.strain.bottleneck
    return Measured(figures, dict(errors.most_common()), bottleneck)


def latencies(name: str, seconds: Sequence[float]) -> Figures:
    """Mean, standard deviation and percentiles in milliseconds; all None for no values."""
    ordered = sorted(1000 * one for one in seconds)
    if not ordered:
        return {f"{kind}_{name}_ms": None for kind in ("mean", "median", "std", "p90", "p99")}
    return {
        f"mean_{name}_ms": statistics.fmean(ordered),
        f"median_{name}_ms": percentile(ordered, 50),
        f"std_{name}_ms": statistics.pstdev(ordered),
        f"p90_{name}_ms": percentile(ordered, 90),
        f"p99_{name}_ms": percentile(ordered, 99),
    }


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """Return the requests in flight at the same time, at most."""
    changes = sorted([(one.sent, 1) for one in outcomes] + [(one.ended, -1) for one in outcomes])
    now = most = 0
    for _, change in changes:  # an end sorts before a start at the same moment
        now += change
        most = max(most, now)
    return most


def _throughput(run: Run, answered: Sequence[Outcome], level: ServiceLevel | None) -> Figures:
    replies = [one.reply for one in answered if one.reply is not None]
    inputs, outputs = sum(one.prompt_tokens for one in replies), sum(one.output_tokens for one in replies)
    messages = sum(len(one.arrivals) for one in replies)

    def rate(count: float) -> float:
        return count / run.duration if run.duration else 0.0

    return {
        "duration": run.duration,
        "completed": len(answered),
        "failed": len(run.outcomes) - len(answered),
        "total_input_tokens": inputs,
        "total_cached_tokens": sum(one.cached_tokens for one in replies),
        "total_output_tokens": outputs,
        "request_throughput": rate(len(answered)),
        "request_goodput": None if level is None else rate(sum(level.met_by(one) for one in answered)),
        "input_throughput": rate(inputs),
        "output_throughput": rate(outputs),
        "total_token_throughput": rate(inputs + outputs),
        "concurrency": rate(math.fsum(one.ended - one.sent for one in run.outcomes)),
        "max_concurrent_requests": most_at_once(run.outcomes),
        "max_output_tokens_per_s": _most_in_a_second(answered),
        "tokens_per_message": outputs / messages if messages else None,
    }


def _throughput_per_user(answered: Sequence[Outcome]) -> float | None:
    """Return the mean over requests of the tokens a second after the first; None where none has two."""
    paces = [1 / tpot for one in answered if (tpot := one.tpot)]
    return statistics.fmean(paces) if paces else None


def _prices(run: Run, answered: Sequence[Outcome], price_hour: float | None) -> Figures:
    """Return the dollars of a million tokens; nothing where no price is known."""
    if price_hour is None:
        return {}
    replies = [one.reply for one in answered if one.reply is not None]
    outputs = sum(one.output_tokens for one in replies)
    total = outputs + sum(one.prompt_tokens for one in replies)
    spent = price_hour * run.duration / 3600
    return {
        "dollars_per_million_output_tokens": 1e6 * spent / outputs if outputs else None,
        "dollars_per_million_tokens": 1e6 * spent / total if total else None,
    }


def _most_in_a_second(answered: Sequence[Outcome]) -> float:
    """Return the tokens of the best whole second since the first sending; a message has its share of an
    answer's.
    """
    start = min((one.sent for one in answered), default=0.0)
    seconds: defaultdict[int, float] = defaultdict(float)
    for reply in (one.reply for one in answered if one.reply is not None):
        for moment in reply.arrivals:
            seconds[int(moment - start)] += reply.output_tokens / len(reply.arrivals)
    return max(seconds.values(), default=0.0)


def _server_figures(times: Sequence[ServerTimes]) -> Figures:
    """Return the times that a Diptych server reports; nothing for other servers."""
    if not times:
        return {}
    return {
        **latencies("handoff", [one.handoff for one in times]),
        **latencies("kv_transfer", [one.kv_transfer for one in times]),
        **latencies("server_queue", [one.queue for one in times]),
        **latencies("server_prefill", [one.prefill for one in times]),
    }


def _is_short(outcome: Outcome) -> bool:
    return outcome.reply is not None and outcome.reply.output_tokens < outcome.request.output_len
