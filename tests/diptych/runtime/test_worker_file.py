"""The list of workers that a supervisor keeps for its gateways."""

import os

from diptych.runtime.discovery.records import record_to_json
from diptych.runtime.discovery.worker_file import WorkerFile, WorkerFileReader
from tests.diptych.runtime.test_directory import record


def test_reader_returns_what_the_writer_wrote_last() -> None:
    file = WorkerFile()
    reader = WorkerFileReader(file.fd)
    assert reader.workers() == []
    for names in (["a"], ["a", "b"], ["b"], []):
        file.write([record_to_json(record(name)) for name in names])
        assert reader.workers() == [record(name) for name in names]
    file.close()


def test_reader_keeps_what_it_has_while_the_content_is_not_whole() -> None:
    file = WorkerFile()
    reader = WorkerFileReader(file.fd)
    file.write([record_to_json(record("a"))])
    assert reader.workers() == [record("a")]
    os.pwrite(file.fd, b"[1", 0)
    assert reader.workers() == [record("a")]
    file.write([record_to_json(record("b"))])
    assert reader.workers() == [record("b")]
    file.close()


def test_reader_without_a_supervisor_has_no_workers() -> None:
    assert WorkerFileReader(None).workers() == []
