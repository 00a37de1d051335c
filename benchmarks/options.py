"""The flags of `diptych bench`, and the objects that they describe.

Flags that `vllm bench serve` has, too, have its names and meanings.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.backends.asking import Asking
from benchmarks.campaign import Plan
from benchmarks.datasets.token_source import MOST_TOKENS
from benchmarks.goodput import parse_service_level
from benchmarks.load import INFINITE, Load

DEFAULT_ADDRESS = "127.0.0.1:50051"
DATASETS = ("random", "shared-prefix", "azure", "mooncake", "prompts", "sharegpt")
TRACES = ("azure", "mooncake")
REAL_PROMPTS = ("prompts", "sharegpt")
GRPC_BACKENDS = ("diptych", "kserve")
CHECK_TEXT = "The capital of France is"


class BadOptions(Exception):
    """Flags that do not fit together."""


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="diptych bench",
        description="Puts load on a running server and measures it as a client sees it.",
        epilog="Lists (1,8,16) run as interleaved rounds. Without a load: one request after the other.",
    )
    _add_target(made.add_argument_group("target"))
    _add_load(made.add_argument_group("load"))
    _add_dataset(made.add_argument_group("requests"))
    _add_output(made.add_argument_group("output"))
    return made


def plan(options: argparse.Namespace) -> Plan:
    """Raises BadOptions."""
    try:
        level = parse_service_level(options.goodput) if options.goodput else None
    except ValueError as error:
        raise BadOptions(f"--goodput: {error}") from None
    return Plan(
        loads=loads(options),
        rounds=options.rounds,
        num_prompts=options.num_prompts,
        warmups=options.num_warmups,
        seed=options.seed,
        level=level,
        exact_lengths=ignores_eos(options),
    )


def loads(options: argparse.Namespace) -> tuple[Load, ...]:
    """Every rate with every concurrency. Raises BadOptions."""
    if options.request_rate is not None:
        rates: Sequence[float | None] = options.request_rate
    elif options.max_concurrency is not None or dataset_name(options) not in TRACES:
        rates = [INFINITE]
    else:
        rates = [None]
    if None in rates and dataset_name(options) not in TRACES:
        raise BadOptions("--request-rate trace needs a trace, given by --dataset-path")
    limits: Sequence[int | None] = options.max_concurrency or [None]
    if options.plot is not None and len(rates) > 1 and len(limits) > 1:
        raise BadOptions("--plot has one axis: give several rates or several concurrencies, not both")
    if options.request_rate is None and options.max_concurrency is None and rates == [INFINITE]:
        limits = [1]
    return tuple(Load(rate, limit, options.burstiness) for rate, limit in itertools.product(rates, limits))


def asking(options: argparse.Namespace) -> Asking:
    return Asking(
        model=options.model,
        ignore_eos=ignores_eos(options),
        temperature=options.temperature,
        timeout_s=options.request_timeout,
        extra_body=options.extra_body,
    )


def backend_name(options: argparse.Namespace) -> str:
    return options.backend or ("diptych" if options.base_url is None else "openai")


def ignores_eos(options: argparse.Namespace) -> bool:
    """Lengths are fixed unless the prompts are real ones, whose answers end where they end."""
    if options.ignore_eos is not None:
        return bool(options.ignore_eos)
    return dataset_name(options) not in REAL_PROMPTS


def dataset_name(options: argparse.Namespace) -> str:
    """Chosen, or told by the file: .csv is an Azure trace, .json ShareGPT's, .jsonl with hash_ids Mooncake's,
    else prompts."""
    if options.dataset_name is not None:
        return str(options.dataset_name)
    path: Path | None = options.dataset_path
    if path is None:
        return "shared-prefix" if options.shared_prefix_len else "random"
    if path.suffix == ".csv":
        return "azure"
    if path.suffix == ".json":
        return "sharegpt"
    if path.suffix == ".jsonl" and path.is_file():
        with path.open(encoding="utf-8", errors="replace") as file:  # who reads all of it says what is wrong
            return "mooncake" if '"hash_ids"' in file.readline() else "prompts"
    return "prompts"


def _add_target(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--address", default=DEFAULT_ADDRESS, metavar="HOST:PORT", help="a Diptych gateway (%(default)s)")
    add("--base-url", metavar="URL", help="a server with OpenAI's HTTP API, instead of --address")
    add(
        "--backend",
        choices=(*GRPC_BACKENDS, "openai", "openai-chat"),
        help="the first two at --address; openai takes token ids, -chat text",
    )
    add("--model", help="served name (default: the server's first)")
    add("--api-key", metavar="KEY", help="bearer token; default: DIPTYCH_API_KEY")
    add("--new-connections", action="store_true", help="one a request: llama.cpp's server keeps none alive")
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="merged into HTTP requests")
    add("--request-timeout", type=_positive, default=600.0, metavar="S", help="%(default)s")


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--max-concurrency", type=_list(_count), metavar="N,…", help="clients of a closed loop; caps a rate")
    add("--request-rate", type=_list(_rate), metavar="R,…", help="requests/s of an open loop; inf; trace")
    add(
        "--burstiness",
        type=_positive,
        default=1.0,
        help="gamma shape of the gaps; 1 = Poisson, less = bursts",
    )
    add("--num-prompts", type=_count, metavar="N", help="requests of each load and round")
    add("--rounds", type=_count, default=1, metavar="N", help="times each load is run, interleaved")
    add("--num-warmups", type=_natural, default=2, metavar="N", help="requests before anything is measured")
    add("--seed", type=_natural, default=0, help="another seed gives other prompts and arrivals")


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, help="default: random, or what the file is")
    add(
        "--dataset-path",
        type=Path,
        help="a trace (Azure csv, Mooncake jsonl) or prompts (jsonl, txt, ShareGPT json)",
    )
    add("--tokenizer", type=Path, metavar="JSON", help="a tokenizer.json: ShareGPT's answers give lengths")
    add("--random-input-len", type=_count, default=128, metavar="N", help="prompt tokens (%(default)s)")
    add("--random-output-len", type=_count, default=64, metavar="N", help="answer tokens (%(default)s)")
    add(
        "--random-range-ratio", type=_share, default=0.0, metavar="R", help="lengths vary by ±R of themselves"
    )
    add(
        "--shared-prefix-len", type=_natural, default=0, metavar="N", help="tokens in front of random prompts"
    )
    add("--shared-prefix-groups", type=_count, default=1, metavar="N", help="how many different prefixes")
    add(
        "--time-scale",
        type=_positive,
        default=1.0,
        help="factor on a trace's times: 0.1 = ten times the load",
    )
    add("--length-scale", type=_positive, default=1.0, help="factor on a trace's lengths")
    add("--max-input-len", type=_count, metavar="N", help="longer prompts of a trace are cut")
    add("--max-output-len", type=_count, metavar="N", help="longer answers of a trace are cut")
    add("--token-ids", type=_span, default=(100, 40_000), metavar="LOW:HIGH", help="random ids (100:40000)")
    add("--temperature", type=float, default=0.0, help="%(default)s")
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help="fixed lengths; default, but for prompts")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--goodput", nargs="+", metavar="NAME:MS", help="limits a good request keeps: ttft:500 tpot:50 e2el:…"
    )
    add("--output-file", type=Path, metavar="JSON", help="write the figures here")
    add("--save-detailed", action="store_true", help="with an entry for each request and its text")
    add("--plot", type=Path, metavar="PNG", help="latency against load, the knee marked (needs matplotlib)")
    add("--label", help="name of this run in the results")
    add("--check-text", nargs="?", const=CHECK_TEXT, metavar="PROMPT", help="print an answer")
    add("--expect", metavar="TEXT", help="--check-text, and fail unless its answer has this")
    add("--no-progress", action="store_true", help="no progress bar")


def _list(one: Any) -> Any:
    def parse(text: str) -> list[Any]:
        return [one(part) for part in text.split(",")]

    return parse


def _count(text: str) -> int:
    return _at_least(1, text)


def _natural(text: str) -> int:
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    value = int(text)
    if value < least:
        raise argparse.ArgumentTypeError(f"{text} is less than {least}")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < INFINITE:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return value


def _rate(text: str) -> float | None:
    if text == "trace":
        return None
    return INFINITE if text == "inf" else _positive(text)


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not in [0, 1)")
    return value


def _span(text: str) -> tuple[int, int]:
    low, _, high = text.partition(":")
    if not (low.isdigit() and high.isdigit() and int(low) <= int(high) < MOST_TOKENS):
        raise argparse.ArgumentTypeError(f"{text!r} is not LOW:HIGH, of token ids")
    return int(low), int(high)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("not a JSON object")
    return value
