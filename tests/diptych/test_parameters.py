"""The table of request parameters agrees with the protocols and with the engine."""

from __future__ import annotations

import dataclasses
import math
import subprocess
import sys

import pytest
from google.protobuf.descriptor import FieldDescriptor

from diptych.engine.sampling import SamplingParams
from diptych.parameters import (
    OFF,
    PARAMETERS,
    SAMPLING_NUMBERS,
    Parameter,
    Sampling,
    Texts,
    TokenBiases,
    TokenIds,
    markdown,
)
from diptych.v1 import inference_pb2 as pb
from diptych.worker.v1 import work_pb2
from diptych.worker_process.attempt import Attempt

ROWS = [pytest.param(row, id=row.name) for row in PARAMETERS.values()]
VALUES = {
    float: 0.5,
    int: 1,
    bool: True,
    str: "x",
    Texts: ["x"],
    TokenIds: [1],
    TokenBiases: {1: 0.5},
}


@pytest.mark.parametrize("row", ROWS)
def test_put_sets_the_wire_field(row: Parameter) -> None:
    request = pb.GenerateRequest()
    row.put(request, VALUES[row.type])
    group, _, name = row.wire.rpartition(".")
    message = getattr(request, group) if group else request
    assert [field.name for field, _ in message.ListFields()] == [name]


def test_every_scalar_field_of_the_request_has_a_row() -> None:
    wires = {row.wire for row in PARAMETERS.values()}
    for group in ("sampling", "stopping", "response", "cache"):
        fields = pb.GenerateRequest.DESCRIPTOR.fields_by_name[group].message_type.fields
        assert {f"{group}.{field.name}" for field in fields} <= wires


@pytest.mark.parametrize("row", ROWS)
def test_integers_fit_the_wire_field(row: Parameter) -> None:
    group, _, name = row.wire.rpartition(".")
    holder = pb.GenerateRequest.DESCRIPTOR
    if group:
        holder = holder.fields_by_name[group].message_type
    kind = holder.fields_by_name[name].cpp_type
    if kind in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT32):
        for value in row.fits if row.type is int else ():
            row.put(pb.GenerateRequest(), value)
        with pytest.raises((ValueError, TypeError)):
            row.put(pb.GenerateRequest(), [row.fits[1] + 1] if row.type is TokenIds else row.fits[1] + 1)


@pytest.mark.parametrize("row", [row for row in PARAMETERS.values() if row.engine], ids=lambda row: row.name)
def test_engine_fields_exist(row: Parameter) -> None:
    owner, _, name = row.engine.partition(".")
    known = {"SamplingParams": SamplingParams, "Attempt": Attempt}[owner]
    assert name in {field.name for field in dataclasses.fields(known)}


def test_sampling_has_the_fields_of_the_worker_protocol() -> None:
    fields = {field.name for field in dataclasses.fields(Sampling)}
    assert fields == {row.name for row in PARAMETERS.values() if row.name in OFF}
    worker = {field.name for field in work_pb2.Sampling.DESCRIPTOR.fields}
    assert worker - fields == {"logprobs", "beam_width", "grammar"}
    assert set(SAMPLING_NUMBERS) == fields - {"logit_bias", "allowed_token_ids", "bad_words"}


@pytest.mark.parametrize("api", ["openai", "vllm", "kserve"])
def test_spellings_are_unique(api: str) -> None:
    names = [getattr(row.spelling, api) for row in PARAMETERS.values() if getattr(row.spelling, api)]
    names.remove("logprobs") if api == "openai" else None  # with echo of the prompt's tokens as well
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("row", "value", "allowed"),
    [
        (Parameter("a", "", low=0.0, high=1.0), 0.0, True),
        (Parameter("a", "", low=0.0, high=1.0), 1.0001, False),
        (Parameter("a", "", low=0.0, high=1.0), math.nan, False),
        (Parameter("a", "", above=0.0, high=1.0), 0.0, False),
        (Parameter("a", "", above=0.0), math.nan, False),
        (Parameter("a", "", high=1.0), -5.0, True),
        (Parameter("a", "", low=1.0), 0.0, False),
    ],
)
def test_allows_values_in_the_range(row: Parameter, value: float, allowed: bool) -> None:
    assert row.allows(value) is allowed


def test_markdown_has_a_line_for_each_row() -> None:
    lines = markdown().splitlines()
    assert len(lines) == 2 + len(PARAMETERS)
    assert len({line.count("|") for line in lines}) == 1
    shown = subprocess.run(
        [sys.executable, "-m", "diptych.parameters"], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines() == lines


@pytest.mark.parametrize("name", [name for name in OFF if not PARAMETERS[name].on_device])
def test_parameters_that_no_device_has_are_sampled_on_the_host(name: str) -> None:
    value = {TokenBiases: {1: 0.5}, TokenIds: (1,), Texts: ((1,),)}.get(PARAMETERS[name].type, 0.5)
    assert SamplingParams().on_device
    assert not SamplingParams(**{name: value}).on_device
