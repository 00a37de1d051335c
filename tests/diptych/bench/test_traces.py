import json
from itertools import combinations, pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diptych.bench import datasets
from diptych.bench.datasets import BadDataset
from diptych.bench.datasets.traces import (
    MOONCAKE_BLOCK,
    Trace,
    TraceRow,
    TraceScale,
    read_azure_trace,
    read_mooncake_trace,
)

SAMPLES = Path(datasets.__file__).parent / "samples"
AZURE, MOONCAKE = SAMPLES / "azure_2023_conversation.csv", SAMPLES / "mooncake_conversation.jsonl"


def common(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the longest common prefix."""
    for index, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return index
    return min(len(a), len(b))


def prompts(trace: Trace, count: int) -> list[tuple[int, ...]]:
    return [one.prompt for one in trace.requests(count, 1) if not isinstance(one.prompt, str)]


def test_reads_azures_format() -> None:
    rows = read_azure_trace(AZURE)
    assert len(rows) == 30
    assert (rows[0].arrival_s, rows[0].input_len, rows[0].output_len) == (0.0, 374, 44)
    assert rows[1].arrival_s == pytest.approx(50.995169 - 46.680590)
    requests = Trace(rows).requests(30, 1)
    assert [len(one.prompt) for one in requests] == [row.input_len for row in rows]
    assert [one.output_len for one in requests] == [row.output_len for row in rows]


def test_reads_mooncakes_format_and_shares_what_it_shared() -> None:
    rows = read_mooncake_trace(MOONCAKE)
    made = prompts(Trace(rows), 30)
    assert [len(prompt) for prompt in made] == [row.input_len for row in rows]
    shared = 0
    for i, j in combinations(range(30), 2):
        blocks = common(rows[i].blocks, rows[j].blocks)
        expected = min(blocks * MOONCAKE_BLOCK, rows[i].input_len, rows[j].input_len)
        assert common(made[i], made[j]) == expected
        shared += blocks > 0
    assert shared > 0  # or the sample shows nothing


CHAIN = st.lists(st.integers(0, 3), min_size=1, max_size=5)


@given(
    st.lists(st.tuples(CHAIN, st.integers(1, MOONCAKE_BLOCK)), min_size=2, max_size=6), st.floats(0.003, 2)
)
def test_prefixes_stay_shared_at_any_length_scale(drawn: list[tuple[list[int], int]], factor: float) -> None:
    """An id names its block together with all before it, as in the trace; few ids make many collisions."""
    names: dict[tuple[int, ...], int] = {}
    rows = []
    for path, tail in drawn:
        ids = [names.setdefault(tuple(path[: end + 1]), len(names)) for end in range(len(path))]
        # As in the trace: a block that is not full ends a prompt, and its id is that prompt's own.
        ids[-1] = names.setdefault((*path, -tail), len(names))
        rows.append(TraceRow(0.0, MOONCAKE_BLOCK * (len(ids) - 1) + tail, 1, tuple(ids)))
    made = prompts(Trace(tuple(rows), TraceScale(length=factor)), len(rows))
    for i, j in pairwise(range(len(rows))):
        blocks = common(rows[i].blocks, rows[j].blocks)
        edge = max(1, round(blocks * MOONCAKE_BLOCK * factor)) if blocks else 0
        assert common(made[i], made[j]) == min(edge, len(made[i]), len(made[j]))
    assert [len(prompt) for prompt in made] == [max(1, round(row.input_len * factor)) for row in rows]


@given(st.floats(0.01, 100), st.floats(0.01, 10), st.integers(1, 500), st.integers(1, 500))
def test_scales_times_and_lengths(time: float, length: float, longest_in: int, longest_out: int) -> None:
    rows = read_azure_trace(AZURE)
    scale = TraceScale(time, length, longest_in, longest_out)
    for row, request in zip(rows, Trace(rows, scale).requests(30, 1), strict=True):
        assert request.arrival_s == pytest.approx(row.arrival_s * time)
        assert len(request.prompt) == min(longest_in, max(1, round(row.input_len * length)))
        assert request.output_len == min(longest_out, max(1, round(row.output_len * length)))


def test_a_cut_prompt_is_the_beginning_of_the_whole_one() -> None:
    rows = read_mooncake_trace(MOONCAKE)
    for whole, cut in zip(
        prompts(Trace(rows), 30), prompts(Trace(rows, TraceScale(max_input_len=700)), 30), strict=True
    ):
        assert cut == whole[:700]


def test_begins_again_after_its_end_without_a_step_back_in_time() -> None:
    rows = read_azure_trace(AZURE)
    times = [one.arrival_s or 0.0 for one in Trace(rows).requests(75, 1)]
    assert times == sorted(times)
    assert times[30] == pytest.approx(rows[-1].arrival_s)


def test_azures_times_are_read_whole_with_their_zones(tmp_path: Path) -> None:
    """As in the trace of 2024: a zone, and a whole second without a fraction."""
    times = ["2024-05-10 00:00:00.009930+00:00", "2024-05-10 00:00:05+00:00", "2024-05-10 02:00:06.5+02:00"]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{one},5,3" for one in times)]))
    assert [row.arrival_s for row in read_azure_trace(path)] == pytest.approx([0, 4.99007, 6.49007])


def test_blank_lines_of_a_mooncake_file_are_none_of_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n \n\n")
    assert len(read_mooncake_trace(path)) == 2


GOOD = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}


@pytest.mark.parametrize(
    "line",
    [
        "nonsense",
        "[]",
        "null",
        json.dumps({**GOOD, "timestamp": "soon"}),
        json.dumps({**GOOD, "timestamp": float("nan")}),
        json.dumps({**GOOD, "input_length": float("inf")}),
        json.dumps({**GOOD, "output_length": None}),
        json.dumps({**GOOD, "output_length": -1}),
        json.dumps({**GOOD, "hash_ids": None}),
        json.dumps({**GOOD, "hash_ids": [0]}),
        json.dumps({**GOOD, "input_length": 0, "hash_ids": []}),
        json.dumps({**GOOD, "hash_ids": [0, -1]}),
        json.dumps({"timestamp": 0}),
    ],
)
def test_says_where_a_mooncake_file_is_wrong(line: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(GOOD) + "\n\n" + line + "\n")
    with pytest.raises(BadDataset, match=r"trace\.jsonl, line 3: "):
        read_mooncake_trace(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("A,B\n1,2\n", "no column"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,x,3\n", "line 2: 'ContextTokens'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,5\n", "line 2: 'GeneratedTokens'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n\n\nnever,5,3\n", "line 4: 'TIMESTAMP'"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnever,5,3\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.68,0,3\n", "line 2: impossible"),
    ],
)
def test_says_where_an_azure_file_is_wrong(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(BadDataset, match=message):
        read_azure_trace(path)
