"""Flags of the hosting program, and workers that cannot share one copy of the weights."""

from __future__ import annotations

import pytest

from decode_worker.config import DecodeSettings
from diptych.host.config import DifferentEngines, read_settings, why_two_engines
from diptych.host.flags import Sharing, split_flags
from diptych.runtime.settings import StartupError
from prefill_worker.config import PrefillSettings


def test_flags_of_both_workers_stand_behind_their_roles():
    own, workers = split_flags(["--gpu-sharing", "streams", "--", "prefill", "--a", "1", "--", "decode"])
    assert own == ["--gpu-sharing", "streams"]
    assert workers == {"prefill": ["--a", "1"], "decode": []}


def test_settings_of_all_three_are_read():
    workers = ["--", "prefill", "--prefill-chunk", "64", "--", "decode", "--max-batch", "8"]
    read = read_settings(["--gpu-sharing", "partition:24", *workers])
    assert read.own.gpu_sharing == "partition:24"
    assert (read.prefill.prefill_chunk, read.decode.max_batch) == (64, 8)


@pytest.mark.parametrize("argv", [[], ["--", "prefill"], ["--", "prefill", "--", "encode"]])
def test_both_workers_are_wanted(argv):
    with pytest.raises(StartupError, match="flags of a prefill and of a decode worker"):
        read_settings(argv)


@pytest.mark.parametrize(
    ("text", "kind", "multiprocessors"),
    [
        ("turns", "turns", 0),
        ("streams", "streams", 0),
        ("partition", "partition", 0),
        ("partition:32", "partition", 32),
    ],
)
def test_ways_of_sharing(text, kind, multiprocessors):
    assert Sharing.parse(text) == Sharing(kind, multiprocessors)


@pytest.mark.parametrize("text", ["", "auto", "off", "turns:3", "partition:", "partition:0", "partition:-1"])
def test_other_words_are_no_way_of_sharing(text):
    with pytest.raises(ValueError, match="turns, streams, partition"):
        Sharing.parse(text)


@pytest.mark.parametrize(
    ("prefill", "decode", "why"),
    [
        ({}, {}, None),
        ({"threads": 1}, {"threads": 2, "max_batch": 8}, None),
        ({"dtype": "fp32"}, {"dtype": "bf16"}, "--dtype differs"),
        ({"device": "cuda:0"}, {"device": "cuda:1"}, "--device differs"),
        ({"block_size": 32}, {}, "--block-size differs"),
        ({"mmproj": "/other-mmproj.gguf"}, {}, "--mmproj differs"),
        (
            {"device": "cpu", "tensor_parallel": 2},
            {"device": "cpu", "tensor_parallel": 2},
            "--tensor-parallel 2 takes processes of its own",
        ),
    ],
)
def test_workers_that_want_two_engines(prefill, decode, why):
    found = why_two_engines(PrefillSettings(**prefill), DecodeSettings(**decode))
    assert found == why or (why is not None and found is not None and found.startswith(why))


def test_different_engines_are_refused_by_the_name_of_the_setting():
    with pytest.raises(DifferentEngines, match="--dtype differs"):
        read_settings(["--", "prefill", "--dtype", "fp32", "--", "decode", "--dtype", "bf16"])
