from hypothesis import given
from hypothesis import strategies as st

from diptych.bench.datasets.synthetic import RandomLengths, SharedPrefix
from diptych.bench.datasets.token_source import TokenSource, as_text

TOKENS = TokenSource(1000, 50_000)


@given(
    st.integers(1, 60), st.integers(1, 60), st.floats(0, 0.99), st.integers(0, 12), st.integers(0, 1 << 40)
)
def test_random_lengths_stay_in_their_range(
    input_len: int, output_len: int, ratio: float, count: int, seed: int
) -> None:
    dataset = RandomLengths(input_len, output_len, ratio, TOKENS)
    requests = dataset.requests(count, seed)
    assert len(requests) == count
    for request in requests:
        assert max(1, input_len * (1 - ratio) - 0.5) <= len(request.prompt) <= input_len * (1 + ratio) + 0.5
        assert max(1, output_len * (1 - ratio) - 0.5) <= request.output_len <= output_len * (1 + ratio) + 0.5
        assert all(1000 <= token <= 50_000 for token in request.prompt if isinstance(token, int))
    assert requests == dataset.requests(count, seed)


def test_lengths_use_their_whole_range() -> None:
    seen = {len(one.prompt) for one in RandomLengths(10, 1, 0.5, TOKENS).requests(400, 1)}
    assert seen == set(range(5, 16))


def test_no_two_prompts_begin_alike_in_any_round() -> None:
    dataset = RandomLengths(8, 1, 0.0, TOKENS)
    beginnings = [one.prompt[:4] for seed in range(20) for one in dataset.requests(50, seed)]
    assert len(set(beginnings)) == len(beginnings)


def test_groups_share_exactly_their_prefix() -> None:
    requests = SharedPrefix(16, 3, RandomLengths(8, 4, 0.0, TOKENS)).requests(30, 7)
    prefixes = {one.prompt[:16] for one in requests}
    assert len(prefixes) == 3
    assert {sum(one.prompt[:16] == prefix for one in requests) for prefix in prefixes} == {10}
    assert len({one.prompt[16:] for one in requests}) == 30
    assert {len(one.prompt) for one in requests} == {24}
    other_round = SharedPrefix(16, 3, RandomLengths(8, 4, 0.0, TOKENS)).requests(30, 8)
    assert prefixes.isdisjoint(one.prompt[:16] for one in other_round)


@given(st.lists(st.integers(0, 60_000), min_size=1, max_size=30), st.integers(0, 30))
def test_words_keep_shared_prefixes_shared(ids: list[int], cut: int) -> None:
    assert (as_text(ids) + " ").startswith(as_text(ids[:cut] or ids) + " ")
    assert len(as_text(ids).split()) == len(ids)
