"""A reader that does not read holds nobody up."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import TextIO

import pytest

from runtime.patient_stream import PatientStream

LINE = "x" * 999 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w", errors="backslashreplace") as stream:
        yield reading, stream
        os.close(reading)


def test_what_a_full_pipe_does_not_take_is_lost_and_counted(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    patient = PatientStream(stream)
    for _ in range(500):
        assert patient.write(LINE) == len(LINE)
    came = os.read(reading, 1 << 20).decode()
    assert set(came.splitlines(keepends=True)) == {LINE}
    patient.write("after\n")
    lost = 500 - came.count(LINE)
    assert lost > 0
    assert os.read(reading, 1 << 20).decode() == (
        f"({lost} lines before this one were not read in time and are lost)\nafter\n"
    )


def test_a_long_text_goes_in_pieces_that_the_pipe_takes_whole(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    text = "é😀" * 5_000
    PatientStream(stream).write(text)
    assert os.read(reading, 1 << 20).decode() == text
    PatientStream(stream).write("é" * 1_000_000)
    assert len(os.read(reading, 1 << 20)) <= 1 << 16


def test_a_reader_that_is_gone_is_an_error(pipe: tuple[int, TextIO]) -> None:
    reading, stream = pipe
    other = os.dup(reading)
    os.close(reading)
    os.close(other)
    with pytest.raises(BrokenPipeError):
        PatientStream(stream).write("x")
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())  # so that it can be closed
    os.dup2(os.open(os.devnull, os.O_RDONLY), reading)


def test_what_is_no_file_takes_everything() -> None:
    memory = io.StringIO()
    patient = PatientStream(memory)
    patient.write(LINE * 1000)
    assert memory.getvalue() == LINE * 1000
    assert not patient.isatty()
