"""A flag that would do nothing is refused: who gave it would read the figures as if it had done something."""

import pytest

from diptych.bench import combinations
from diptych.bench import options as flags
from tests.diptych.bench.test_traces import AZURE

URL = "--base-url=http://127.0.0.1:1"
TRACE = f"--dataset-path={AZURE}"


@pytest.mark.parametrize(
    "argv",
    [
        [URL, "--backend=diptych"],
        [URL, "--backend=kserve"],
        [URL, "--address=127.0.0.1:2"],
        ["--backend=openai"],
        ["--backend=openai-chat"],
        ['--extra-body={"top_k": 1}'],
        ["--backend=kserve", '--extra-body={"top_k": 1}'],
        ["--new-connections"],
        ["--dataset-name=random", "--shared-prefix-len=9"],
        ["--dataset-name=random", TRACE],
        ["--dataset-name=shared-prefix", TRACE],
        ["--shared-prefix-groups=2"],
        [TRACE, "--shared-prefix-len=9"],
        [TRACE, "--random-input-len=9"],
        [TRACE, "--random-output-len=9"],
        ["--dataset-path=x.txt", "--random-input-len=9"],
        ["--dataset-path=x.txt", "--random-range-ratio=0.5"],
        ["--dataset-path=x.txt", "--token-ids=1:9"],
        ["--time-scale=0.1"],
        ["--length-scale=0.1"],
        ["--max-input-len=9"],
        ["--dataset-path=x.txt", "--max-output-len=9"],
        [TRACE, "--time-scale=0.1", "--max-concurrency=8"],
        ["--burstiness=0.5", "--max-concurrency=8"],
        ["--think-time=1", "--request-rate=2"],
        ["--tokenizer=t.json"],
        ["--dataset-path=x.json", "--tokenizer=t.json", "--random-output-len=9"],
        ["--save-detailed"],
    ],
    ids=" ".join,
)
def test_refuses_flags_that_would_do_nothing(argv: list[str]) -> None:
    with pytest.raises(flags.BadOptions) as caught:
        combinations.check(flags.parser().parse_args(argv))
    told = str(caught.value)
    assert any(argument.split("=")[0] in told for argument in argv)
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--backend=kserve", "--api-key=k", "--address=127.0.0.1:2"],
        [URL, "--new-connections", '--extra-body={"top_k": 1}'],
        ["--dataset-name=shared-prefix"],
        ["--shared-prefix-len=9", "--shared-prefix-groups=2", "--random-input-len=9", "--token-ids=1:9"],
        [TRACE, "--time-scale=0.1", "--length-scale=0.1", "--max-input-len=9", "--token-ids=1:9"],
        [TRACE, "--time-scale=0.1", "--request-rate=2,trace"],
        ["--dataset-path=x.txt", "--random-output-len=9"],
        ["--dataset-path=x.json", "--tokenizer=t.json"],
        ["--request-rate=1,inf", "--burstiness=0.5"],
        ["--save-detailed", "--output-file=x.json"],
    ],
    ids=" ".join,
)
def test_takes_flags_that_do_something(argv: list[str]) -> None:
    combinations.check(flags.parser().parse_args(argv))
