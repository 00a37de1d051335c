"""The dataset that the flags ask for."""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

from diptych.bench.datasets import BadDataset, Dataset
from diptych.bench.datasets.prompts_file import PromptsFile, read_prompts
from diptych.bench.datasets.sharegpt import read_sharegpt
from diptych.bench.datasets.synthetic import RandomLengths, SharedPrefix
from diptych.bench.datasets.token_source import TokenSource
from diptych.bench.datasets.traces import Trace, TraceScale, read_azure_trace, read_mooncake_trace


def choose_dataset(name: str, options: argparse.Namespace) -> Dataset:
    """Read the file where the dataset is one. Raises BadDataset."""
    tokens = TokenSource(*options.token_ids)
    lengths = RandomLengths(
        options.random_input_len, options.random_output_len, options.random_range_ratio, tokens
    )
    if name == "random":
        return lengths
    if name == "shared-prefix":
        return SharedPrefix(options.shared_prefix_len or 1024, options.shared_prefix_groups, lengths)
    path: Path | None = options.dataset_path
    if path is None:
        raise BadDataset(f"the dataset {name} is a file: give --dataset-path")
    try:
        if name == "sharegpt":
            return PromptsFile(read_sharegpt(path, options.random_output_len, options.tokenizer), name)
        if name == "prompts":
            return PromptsFile(read_prompts(path, options.random_output_len))
        rows = read_azure_trace(path) if name == "azure" else read_mooncake_trace(path)
    except OSError as error:
        raise BadDataset(f"--dataset-path: {path}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        raise BadDataset(f"{path}: {error}") from None
    scale = TraceScale(
        options.time_scale, options.length_scale, options.max_input_len, options.max_output_len
    )
    return Trace(rows, scale, tokens, name)
