import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.runtime.discovery.prefix_index import PrefixEvent
from diptych.runtime.discovery.records import Identity, Lease, WorkerLoad, WorkerRecord
from diptych.runtime.discovery.store import decode_event, encode_event

sizes = st.integers(1, 2**63)
records = st.builds(
    dataclasses.replace,
    st.from_type(WorkerRecord),
    block_size=sizes,
    max_context=sizes,
    total_blocks=st.integers(0, 2**63),  # a prefill worker has none
    window_blocks=st.integers(0, 2**63),
    window_places=st.integers(0, 2**63),
)
leases = st.builds(Lease, records, st.integers(0, 2**63))
RECORD = WorkerRecord("w", "decode", "h:1", 2**62 + 1, "d", "m", "fp32", "fp32", "l", 16, 100, 10, 1)


@given(leases)
def test_a_lease_survives_json(lease: Lease) -> None:
    assert Lease.from_json(lease.to_json()) == lease


def test_fields_of_newer_workers_are_passed_over() -> None:
    data = json.loads(Lease(RECORD, 3).to_json())
    data["record"]["colour"] = "blue"
    assert Lease.from_json(json.dumps(data)) == Lease(RECORD, 3)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "nonsense",
        "[]",
        "3",
        "{}",
        '{"record": {}, "prefix_seq": 1}',
        Lease(RECORD, 3).to_json().replace('"decode"', '"router"'),
        Lease(RECORD, 3).to_json().replace('"prefix_seq": 3', '"prefix_seq": "3"'),
        Lease(RECORD, 3).to_json().replace('"block_size": 16', '"block_size": null'),
        Lease(RECORD, 3).to_json().replace('"block_size": 16', '"block_size": true'),
        Lease(RECORD, 3).to_json().replace('"block_size": 16', '"block_size": 0'),
        '{"record": [], "prefix_seq": 1}',
        "[" * 100_000,
    ],
)
def test_what_is_no_lease_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (json's own error among them)
        Lease.from_json(text)


def test_load_is_part_of_the_record() -> None:
    record = RECORD.with_load(WorkerLoad(1, 2, 3, 4))
    assert (record.running, record.waiting, record.waiting_tokens, record.free_blocks) == (1, 2, 3, 4)
    assert dataclasses.replace(record, running=0, waiting=0, waiting_tokens=0, free_blocks=0) == RECORD


@given(st.lists(st.binary(min_size=16, max_size=16)), st.lists(st.binary(min_size=16, max_size=16)))
def test_an_update_survives_the_stream(added: list[bytes], removed: list[bytes]) -> None:
    event = PrefixEvent("w", Identity(2**62, 3), 4, tuple(added), tuple(removed))
    fields = {
        str(name).encode(): value if isinstance(value, bytes) else str(value).encode()
        for name, value in encode_event(event).items()
    }
    assert decode_event(fields) == event


def test_what_is_no_update_is_refused() -> None:
    with pytest.raises(ValueError, match="without"):
        decode_event({b"w": b"w"})
    with pytest.raises(ValueError, match="16 bytes"):
        decode_event({b"w": b"w", b"i": b"1", b"e": b"1", b"s": b"1", b"a": b"short", b"r": b""})


def test_pool_tokens_leave_room_for_the_blocks_of_a_window() -> None:
    windowed = dataclasses.replace(RECORD, total_blocks=100, window_blocks=2, window_places=3)
    assert RECORD.pool_tokens == 10 * 16
    assert windowed.pool_tokens == 94 * 16
    assert dataclasses.replace(windowed, total_blocks=8).pool_tokens == 2 * 16
    with pytest.raises(ValueError, match="blocks of a window below 0"):
        Lease.from_json(Lease(dataclasses.replace(windowed, window_blocks=-1), 0).to_json())
