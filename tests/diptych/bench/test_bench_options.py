import json
from pathlib import Path

import pytest

from diptych.bench import combinations
from diptych.bench import options as flags
from diptych.bench.datasets import BadDataset
from diptych.bench.datasets.choose import choose_dataset
from diptych.bench.figures import ServiceLevel
from diptych.bench.load import INFINITE, Load
from tests.diptych.bench.test_traces import AZURE, MOONCAKE


def loads(*argv: str) -> list[tuple[float | None, int | None]]:
    return [(one.request_rate, one.max_concurrency) for one in flags.loads(flags.parser().parse_args(argv))]


def test_makes_loads_of_rates_and_concurrencies() -> None:
    assert loads() == [(INFINITE, 1)]
    assert loads("--max-concurrency", "1,8") == [(INFINITE, 1), (INFINITE, 8)]
    assert loads("--request-rate", "0.5,inf") == [(0.5, None), (INFINITE, None)]
    both = loads("--request-rate", "1,2", "--max-concurrency", "4,8")
    assert both == [(1.0, 4), (1.0, 8), (2.0, 4), (2.0, 8)]


@pytest.mark.parametrize(
    "argv", [["--goodput", "ttft:500", "tpot:50"], ["--goodput", "ttft:500", "--goodput", "tpot:50"]]
)
def test_limits_of_goodput_may_be_given_together_or_one_by_one(argv: list[str]) -> None:
    assert flags.plan(flags.parser().parse_args(argv)).level == ServiceLevel(ttft=500, tpot=50)


def test_replays_a_trace_unless_a_load_is_given() -> None:
    path = f"--dataset-path={AZURE}"
    assert loads(path) == [(None, None)]
    assert loads(path, "--max-concurrency=8") == [(INFINITE, 8)]
    assert loads(path, "--request-rate=trace", "--max-concurrency=8") == [(None, 8)]


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        ([], "random"),
        (["--shared-prefix-len=64"], "shared-prefix"),
        ([f"--dataset-path={AZURE}"], "azure"),
        ([f"--dataset-path={MOONCAKE}"], "mooncake"),
        (["--dataset-path=x.txt"], "prompts"),
    ],
)
def test_tells_datasets_by_their_files(argv: list[str], name: str) -> None:
    options = flags.parser().parse_args(argv)
    assert flags.dataset_name(options) == name
    assert flags.ignores_eos(options) is (name != "prompts")
    if name != "prompts":
        assert choose_dataset(name, options).name == name


def test_json_lines_of_prompts_are_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "Hello"}\n')
    options = flags.parser().parse_args([f"--dataset-path={path}"])
    assert flags.dataset_name(options) == "prompts"
    assert [one.prompt for one in choose_dataset("prompts", options).requests(1, 0)] == ["Hello"]


def test_a_trace_may_begin_with_a_blank_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text("\n" + MOONCAKE.read_text())
    assert flags.dataset_name(flags.parser().parse_args([f"--dataset-path={path}"])) == "mooncake"


def test_a_trace_that_is_not_there_is_no_wrong_flag(tmp_path: Path) -> None:
    options = flags.parser().parse_args([f"--dataset-path={tmp_path}/typo.jsonl", "--length-scale=0.1"])
    combinations.check(options)
    with pytest.raises(BadDataset, match=r"^--dataset-path: [^ ]*typo\.jsonl: No such file or directory$"):
        choose_dataset(flags.dataset_name(options), options).requests(1, 0)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.txt", "x.csv"])
def test_a_file_that_is_no_text_is_told(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(b'{"prompt": "caf\xe9"}\n')
    options = flags.parser().parse_args([f"--dataset-path={path}"])
    with pytest.raises(BadDataset, match=name):
        choose_dataset(flags.dataset_name(options), options)


def test_a_json_file_is_sharegpts(tmp_path: Path) -> None:
    path = tmp_path / "ShareGPT.json"
    turns = [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "Me."}]
    path.write_text(json.dumps([{"id": "a", "conversations": turns}]))
    options = flags.parser().parse_args([f"--dataset-path={path}", "--random-output-len=7"])
    assert flags.dataset_name(options) == "sharegpt"
    assert not flags.ignores_eos(options)
    [made] = choose_dataset("sharegpt", options).requests(1, 0)
    assert (made.prompt, made.output_len) == ("Who?", 7)


@pytest.mark.parametrize(
    "argv",
    [["--request-rate=trace"], ["--goodput", "ttft"],
     ["--plot=x.png", "--request-rate=1,2", "--max-concurrency=1,2"]],
)  # fmt: skip
def test_refuses_what_does_not_fit_together(argv: list[str]) -> None:
    with pytest.raises(flags.BadOptions):
        flags.plan(flags.parser().parse_args(argv))


@pytest.mark.parametrize(
    "flag",
    ["--max-concurrency=0", "--max-concurrency=a", "--request-rate=0", "--request-rate=-1", "--rounds=0",
     "--burstiness=0", "--time-scale=0", "--length-scale=inf", "--random-range-ratio=1", "--token-ids=9:3",
     "--token-ids=9:4294967296",
     "--extra-body=[1]", "--extra-body={", "--request-timeout=nan", "--nonsense=1"],
)  # fmt: skip
def test_refuses_impossible_values(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        flags.parser().parse_args([flag])
    assert caught.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--max-concurrency=1,abc", "'abc' is not a whole number"),
        ("--num-prompts=1.5", "'1.5' is not a whole number"),
        ("--num-prompts=0", "0 is less than 1"),
        ("--request-rate=fast", "'fast' is not a positive number"),
        ("--request-timeout=x", "'x' is not a positive number"),
        ("--random-range-ratio=x", "'x' is not in [0, 1)"),
        ("--temperature=x", "'x' is not a number of at least 0"),
        ("--think-time=-1", "'-1' is not a number of at least 0"),
        ("--price-hour=0", "'0' is not a positive number"),
        ("--temperature=-1", "'-1' is not a number of at least 0"),
        ("--base-url=127.0.0.1:8000", "needs http:// or https://"),
        ("--base-url=localhost:8000/v1", "needs http:// or https://"),
        ("--base-url=http://", "names no host"),
        ("--address=http://127.0.0.1:1", "HOST:PORT without http://"),
    ],
)
def test_says_what_is_wrong_with_a_value(flag: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        flags.parser().parse_args([flag])
    assert told in capsys.readouterr().err


def test_help_names_the_defaults(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as exit_info:
        flags.parser().parse_args(["--help"])
    assert exit_info.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for flag, words in {
        "--num-prompts": "four a client", "--rounds": "[default: 1]", "--num-warmups": "[default: 2]",
        "--seed": "[default: 0]", "--shared-prefix-len": "1024", "--shared-prefix-groups": "[default: 1]",
        "--temperature": "greedy", "--request-timeout": "[default: 600", "--time-scale": "[default: 1",
        "--random-range-ratio": "[default: 0", "--token-ids": "[default: 100:40000]",
    }.items():  # fmt: skip
        after = said.split(f"{flag} ")[-1].split(" --")[0]
        assert words in after, flag


def test_a_dataset_that_is_a_file_needs_one() -> None:
    options = flags.parser().parse_args(["--dataset-name=azure"])
    with pytest.raises(BadDataset, match="--dataset-path"):
        choose_dataset("azure", options)


def test_loads_have_labels() -> None:
    cases = [Load(max_concurrency=8), Load(max_concurrency=8, think_s=2.5)]
    cases += [Load(2.5), Load(2.0, 8), Load(None), Load()]
    labels = ["C=8", "C=8, think 2.5 s", "2.5 req/s", "2 req/s, C≤8", "trace", "inf req/s"]
    assert [load.label for load in cases] == labels


def test_address_comes_from_the_environment_that_other_commands_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DIPTYCH_ADDRESS", "10.0.0.1:1")
    options = flags.parser().parse_args([])
    assert options.address == "10.0.0.1:1"
    combinations.check(options)
    combinations.check(flags.parser().parse_args(["--base-url", "http://10.0.0.2:8000"]))
    assert flags.parser().parse_args(["--address", "10.0.0.3:1"]).address == "10.0.0.3:1"


def test_wrong_flag_is_told_in_two_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        flags.parser().parse_args(["--max-concurrency", "a"])
    assert ended.value.code == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "Try 'diptych bench --help' for help."
    assert len(lines) == 2
    assert "--max-concurrency" in lines[1]
