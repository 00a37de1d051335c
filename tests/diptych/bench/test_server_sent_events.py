from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.backends.server_sent_events import EventReader

STREAM = (
    b': hello\ndata: {"a": 1}\n\nevent: x\r\nid: 4\r\ndata:two\r\ndata: lines\r\n\r\n\n\ndata: \xc3\xa4\n\n'
)
EVENTS = [b'{"a": 1}', b"two\nlines", b"\xc3\xa4"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_gives_the_same_events_however_the_stream_is_cut(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    pieces = [STREAM[start:end] for start, end in pairwise(edges)]
    assert [event for piece in pieces for event in reader.feed(piece)] == EVENTS


def test_keeps_an_event_back_until_it_is_whole() -> None:
    reader = EventReader()
    assert reader.feed(b"data: [DONE]\n") == []
    assert reader.feed(b"\n") == [b"[DONE]"]
