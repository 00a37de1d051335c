"""The flags of `diptych bench`, and the objects that they describe.

Flags that `vllm bench serve` has, too, have its names and meanings.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from pathlib import Path

from diptych.bench import values
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.campaign import Plan
from diptych.bench.goodput import parse_service_level
from diptych.bench.load import INFINITE, Load

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
            first = next((line for line in file if line.strip()), "")
            return "mooncake" if '"hash_ids"' in first else "prompts"
    return "prompts"


def _add_target(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--address",
        type=values.address,
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="a Diptych gateway (%(default)s)",
    )
    add(
        "--base-url",
        type=values.url,
        metavar="URL",
        help="a server with OpenAI's HTTP API, instead of --address",
    )
    add(
        "--backend",
        choices=(*GRPC_BACKENDS, "openai", "openai-chat"),
        help="the first two at --address; openai takes token ids, -chat text",
    )
    add("--model", help="served name (default: the server's first)")
    add("--api-key", metavar="KEY", help="bearer token; default: DIPTYCH_API_KEY")
    add("--new-connections", action="store_true", help="one a request: llama.cpp's server keeps none alive")
    add("--extra-body", type=values.json_object, default={}, metavar="JSON", help="merged into HTTP requests")
    add(
        "--request-timeout",
        type=values.positive,
        default=600.0,
        metavar="S",
        help="for a whole answer (%(default)s)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-concurrency",
        type=values.list_of(values.count),
        metavar="N,…",
        help="clients of a closed loop; caps a rate",
    )
    add(
        "--request-rate",
        type=values.list_of(values.rate),
        metavar="R,…",
        help="requests/s of an open loop; inf; trace",
    )
    add(
        "--burstiness",
        type=values.positive,
        default=1.0,
        metavar="B",
        help="gamma shape of the gaps (%(default)s: Poisson; less: bursts)",
    )
    add(
        "--num-prompts",
        type=values.count,
        metavar="N",
        help="requests of each load and round (four a client, 20 s of a finite rate, a trace's first 200)",
    )
    add(
        "--rounds",
        type=values.count,
        default=1,
        metavar="N",
        help="times each load is run, interleaved (%(default)s)",
    )
    add(
        "--num-warmups",
        type=values.natural,
        default=2,
        metavar="N",
        help="requests before anything is measured (%(default)s)",
    )
    add(
        "--seed",
        type=values.natural,
        default=0,
        metavar="N",
        help="another one gives other prompts and arrivals (%(default)s)",
    )


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, help="default: random, or what the file is")
    add(
        "--dataset-path",
        type=Path,
        help="a trace (Azure csv, Mooncake jsonl) or prompts (jsonl, txt, ShareGPT json)",
    )
    add("--tokenizer", type=Path, metavar="JSON", help="a tokenizer.json: ShareGPT's answers give lengths")
    add("--random-input-len", type=values.count, default=128, metavar="N", help="prompt tokens (%(default)s)")
    add("--random-output-len", type=values.count, default=64, metavar="N", help="answer tokens (%(default)s)")
    add(
        "--random-range-ratio",
        type=values.share,
        default=0.0,
        metavar="R",
        help="lengths vary by ±R of themselves (%(default)s)",
    )
    add(
        "--shared-prefix-len",
        type=values.natural,
        default=0,
        metavar="N",
        help="tokens in front of random prompts (%(default)s; 1024 of shared-prefix)",
    )
    add(
        "--shared-prefix-groups",
        type=values.count,
        default=1,
        metavar="N",
        help="how many different prefixes (%(default)s)",
    )
    add(
        "--time-scale",
        type=values.positive,
        default=1.0,
        metavar="F",
        help="factor on a trace's times: 0.1 = ten times the load (%(default)s)",
    )
    add(
        "--length-scale",
        type=values.positive,
        default=1.0,
        metavar="F",
        help="factor on a trace's lengths (%(default)s)",
    )
    add("--max-input-len", type=values.count, metavar="N", help="longer prompts of a trace are cut")
    add("--max-output-len", type=values.count, metavar="N", help="longer answers of a trace are cut")
    add(
        "--token-ids",
        type=values.token_span,
        default=(100, 40_000),
        metavar="LOW:HIGH",
        help="random ids (100:40000)",
    )
    add(
        "--temperature",
        type=values.temperature,
        default=0.0,
        metavar="T",
        help="of sampling (%(default)s: greedy)",
    )
    add("--ignore-eos", action=argparse.BooleanOptionalAction, help="fixed lengths; default, but for prompts")


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--goodput",
        nargs="+",
        action="extend",
        metavar="NAME:MS",
        help="limits a good request keeps: ttft:500 tpot:50 e2el:…",
    )
    add("--output-file", type=Path, metavar="JSON", help="write the figures here")
    add("--save-detailed", action="store_true", help="with an entry for each request and its text")
    add("--plot", type=Path, metavar="PNG", help="latency against load, the knee marked (needs matplotlib)")
    add("--label", help="name of this run in the results")
    add("--check-text", nargs="?", const=CHECK_TEXT, metavar="PROMPT", help="print an answer")
    add("--expect", metavar="TEXT", help="--check-text, and fail unless its answer has this")
    add("--no-progress", action="store_true", help="no progress bar")
