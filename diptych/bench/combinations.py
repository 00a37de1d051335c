"""Flags that would do nothing beside others are refused: one would read the figures as if they had."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from diptych.bench import options as flags
from diptych.bench.load import INFINITE

_SYNTHETIC = ("random", "shared-prefix")

# By flag, the datasets that it means something to.
_DATASETS = {
    "dataset_path": (*flags.TRACES, *flags.REAL_PROMPTS),
    "tokenizer": ("sharegpt",),
    "random_input_len": _SYNTHETIC,
    "random_output_len": (*_SYNTHETIC, *flags.REAL_PROMPTS),
    "random_range_ratio": _SYNTHETIC,
    "shared_prefix_len": ("shared-prefix",),
    "shared_prefix_groups": ("shared-prefix",),
    "time_scale": flags.TRACES,
    "length_scale": flags.TRACES,
    "max_input_len": flags.TRACES,
    "max_output_len": flags.TRACES,
    "token_ids": (*_SYNTHETIC, *flags.TRACES),
}


def check(options: argparse.Namespace) -> None:
    """Raise BadOptions for flags that do not go together. A flag with its default's value does no harm."""
    defaults = flags.parser()
    given = {name for name, value in vars(options).items() if value != defaults.get_default(name)}
    for fault in (*_target(options, given), *_dataset(options, given), *_load(options, given)):
        raise flags.BadOptions(fault)
    if "save_detailed" in given and options.output_file is None:
        raise flags.BadOptions("--save-detailed needs --output-file")


def _target(options: argparse.Namespace, given: set[str]) -> Iterator[str]:
    backend = flags.backend_name(options)
    if backend in flags.GRPC_BACKENDS:
        if options.base_url is not None:
            yield f"--backend {backend} speaks gRPC: give --address, not --base-url"
        for name in ("extra_body", "new_connections"):
            if name in given:
                yield f"{_flag(name)} is for HTTP: it needs --base-url"
    elif options.base_url is None:
        yield f"--backend {backend} needs --base-url"
    elif "address" in given:
        yield "--address is where gRPC goes, --base-url where HTTP goes: give one of them"


def _dataset(options: argparse.Namespace, given: set[str]) -> Iterator[str]:
    dataset = flags.dataset_name(options)
    path = options.dataset_path
    if options.dataset_name is None and path is not None and path.suffix == ".jsonl" and not path.exists():
        return  # what it would hold is not known, and who reads it says that it is not there
    for name, datasets in _DATASETS.items():
        if name in given and dataset not in datasets:
            yield f"{_flag(name)} is for {' and '.join(datasets)}, and the dataset is {dataset}"
    if {"tokenizer", "random_output_len"} <= given:
        yield "--tokenizer takes the lengths of answers from the file: leave out --random-output-len"


def _load(options: argparse.Namespace, given: set[str]) -> Iterator[str]:
    rates = {one.request_rate for one in flags.loads(options)}
    if "time_scale" in given and None not in rates:
        yield "--time-scale is for a trace at its own times: add trace to --request-rate"
    if "burstiness" in given and rates <= {None, INFINITE}:
        yield "--burstiness is for a finite --request-rate"


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
