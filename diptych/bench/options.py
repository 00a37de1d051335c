"""The flags of `diptych bench`, and the objects that they describe.

Flags that `vllm bench serve` has, too, have its names and meanings.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from diptych.bench import values
from diptych.bench.backends.request_parameters import Asking
from diptych.bench.campaign import Plan
from diptych.bench.figures import parse_service_level
from diptych.bench.load import INFINITE, Load

DEFAULT_ADDRESS = "127.0.0.1:50051"
DATASETS = ("random", "shared-prefix", "azure", "mooncake", "prompts", "sharegpt")
TRACES = ("azure", "mooncake")
REAL_PROMPTS = ("prompts", "sharegpt")
GRPC_BACKENDS = ("diptych", "kserve")
CHECK_TEXT = "The capital of France is"


class BadOptions(Exception):
    """Flags that do not fit together."""


class _Parser(argparse.ArgumentParser):
    """Parser whose --help has the look of `diptych --help`, and whose faults are two lines."""

    def error(self, message: str) -> NoReturn:
        print(f"Try '{self.prog} --help' for help.", file=sys.stderr)
        self.exit(2, f"{self.prog}: {message}\n")

    def print_help(self, file: Any = None) -> None:
        from diptych.bench.help_page import print_help

        print_help(self)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = _Parser(
        prog="diptych bench",
        description="Put load on a running server and measure it as a client sees it.",
        epilog="Lists (1,8,16) run as interleaved rounds. Without a load: one request after the other.",
    )
    _add_target(made.add_argument_group("Target"))
    _add_load(made.add_argument_group("Load"))
    _add_dataset(made.add_argument_group("Requests"))
    _add_output(made.add_argument_group("Output"))
    return made


def plan(options: argparse.Namespace) -> Plan:
    """Return the runs that the flags ask for. Raises BadOptions."""
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
        price_hour=options.price_hour,
    )


def loads(options: argparse.Namespace) -> tuple[Load, ...]:
    """Return every rate with every concurrency. Raises BadOptions."""
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
    found = tuple(
        Load(rate, limit, options.burstiness, options.think_time)
        for rate, limit in itertools.product(rates, limits)
    )
    if options.think_time and not all(load.closed for load in found):
        raise BadOptions("--think-time is for clients that wait for answers: give --max-concurrency alone")
    return found


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
    """Return whether lengths are fixed: they are unless the prompts are real ones."""
    if options.ignore_eos is not None:
        return bool(options.ignore_eos)
    return dataset_name(options) not in REAL_PROMPTS


def dataset_name(options: argparse.Namespace) -> str:
    """Return the dataset that is chosen, or that the file is: .csv is an Azure trace, .json ShareGPT's,
    .jsonl with hash_ids Mooncake's, else prompts.
    """
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
        with path.open(encoding="utf-8", errors="replace") as file:  # its reader says what is wrong
            first = next((line for line in file if line.strip()), "")
            return "mooncake" if '"hash_ids"' in first else "prompts"
    return "prompts"


def _add_target(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--address",
        type=values.address,
        default=os.environ.get("DIPTYCH_ADDRESS", DEFAULT_ADDRESS),
        metavar="HOST:PORT",
        help="Address of a Diptych gateway; DIPTYCH_ADDRESS sets it, too.",
    )
    add(
        "--base-url",
        type=values.url,
        metavar="URL",
        help="Measure a server with OpenAI's HTTP API, instead of --address.",
    )
    add(
        "--backend",
        choices=(*GRPC_BACKENDS, "openai", "openai-chat"),
        help="Protocol; the first two are for --address, openai sends token ids, openai-chat text.",
    )
    add("--model", help="Served name; default: the server's first.")
    add("--api-key", metavar="KEY", help="Bearer token; default: DIPTYCH_API_KEY.")
    add(
        "--new-connections",
        action="store_true",
        help="Open a connection for each request: llama.cpp's server keeps none alive.",
    )
    add(
        "--extra-body",
        type=values.json_object,
        default={},
        metavar="JSON",
        help="Merge this into the JSON of HTTP requests.",
    )
    add(
        "--request-timeout",
        type=values.positive,
        default=600.0,
        metavar="S",
        help="Seconds for a whole answer.",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--max-concurrency",
        type=values.list_of(values.count),
        metavar="N,…",
        help="Clients of a closed loop; caps a rate.",
    )
    add(
        "--request-rate",
        type=values.list_of(values.rate),
        metavar="R,…",
        help="Requests a second of an open loop; inf sends all at once, trace replays a trace.",
    )
    add(
        "--burstiness",
        type=values.positive,
        default=1.0,
        metavar="B",
        help="Gamma shape of the gaps between requests: 1 is a Poisson process, less comes in bursts.",
    )
    add(
        "--think-time",
        type=values.from_zero,
        default=0.0,
        metavar="S",
        help="Mean seconds that a client of a closed loop waits between an answer and its next request.",
    )
    add(
        "--num-prompts",
        type=values.count,
        metavar="N",
        help="Requests of each load and round; default: four a client, 20 s of a rate, a trace's first 200.",
    )
    add(
        "--rounds",
        type=values.count,
        default=1,
        metavar="N",
        help="Times that each load is run, interleaved.",
    )
    add(
        "--num-warmups",
        type=values.natural,
        default=2,
        metavar="N",
        help="Requests before anything is measured.",
    )
    add(
        "--seed",
        type=values.natural,
        default=0,
        metavar="N",
        help="Seed of prompts and arrivals.",
    )


def _add_dataset(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add("--dataset-name", choices=DATASETS, help="Dataset; default: random, or what the file is.")
    add(
        "--dataset-path",
        type=Path,
        help="Read a trace (Azure csv, Mooncake jsonl) or prompts (jsonl, txt, ShareGPT json).",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="JSON",
        help="Count the tokens of ShareGPT's answers with this tokenizer.json.",
    )
    add("--random-input-len", type=values.count, default=128, metavar="N", help="Tokens of a random prompt.")
    add("--random-output-len", type=values.count, default=64, metavar="N", help="Tokens of its answer.")
    add(
        "--random-range-ratio",
        type=values.share,
        default=0.0,
        metavar="R",
        help="Vary lengths by ±R of themselves.",
    )
    add(
        "--shared-prefix-len",
        type=values.natural,
        default=0,
        metavar="N",
        help="Tokens that random prompts share; 1024 with shared-prefix.",
    )
    add(
        "--shared-prefix-groups",
        type=values.count,
        default=1,
        metavar="N",
        help="Number of different prefixes.",
    )
    add(
        "--time-scale",
        type=values.positive,
        default=1.0,
        metavar="F",
        help="Factor on a trace's times: 0.1 is ten times the load.",
    )
    add(
        "--length-scale",
        type=values.positive,
        default=1.0,
        metavar="F",
        help="Factor on a trace's lengths.",
    )
    add("--max-input-len", type=values.count, metavar="N", help="Cut longer prompts of a trace.")
    add("--max-output-len", type=values.count, metavar="N", help="Cut longer answers of a trace.")
    add(
        "--token-ids",
        type=values.token_span,
        default=(100, 40_000),
        metavar="LOW:HIGH",
        help="Range of random token ids.",
    )
    add(
        "--temperature",
        type=values.from_zero,
        default=0.0,
        metavar="T",
        help="Temperature of sampling; 0 is greedy.",
    )
    add(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        help="Fix the lengths of answers; default: yes, but for prompts.",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--goodput",
        nargs="+",
        action="extend",
        metavar="NAME:MS",
        help="Limits in milliseconds that a good request keeps: ttft:500 tpot:50 e2el:4000.",
    )
    add(
        "--price-hour",
        type=values.positive,
        metavar="DOLLARS",
        help="What the server costs an hour: adds dollars for a million tokens.",
    )
    add("--output-file", type=Path, metavar="JSON", help="Write the figures to this file.")
    add("--save-detailed", action="store_true", help="Write an entry for each request and its text as well.")
    add(
        "--plot",
        type=Path,
        metavar="PNG",
        help="Draw latency against load, the knee marked; needs matplotlib.",
    )
    add("--label", help="Name of this run in the results.")
    add("--check-text", nargs="?", const=CHECK_TEXT, metavar="PROMPT", help="Print an answer first.")
    add("--expect", metavar="TEXT", help="Fail unless the answer of --check-text has this text.")
    add("--no-progress", action="store_true", help="Show no progress bar.")
