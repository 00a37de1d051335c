"""The command itself, as a process, against real servers on loopback."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import ssl
import sys
from itertools import product
from pathlib import Path

import pytest
import trustme

from tests.diptych.bench import scripted_grpc, scripted_http
from tests.diptych.bench.scripted_grpc import ScriptedService
from tests.diptych.bench.scripted_http import ScriptedHttp
from tests.diptych.bench.test_traces import MOONCAKE
from tests.diptych.runtime.eventually import eventually
from tests.forms import sampled

ROOT = Path(__file__).parents[3]


async def start(*arguments: str, stdout: int = asyncio.subprocess.PIPE) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "diptych", "bench", *arguments,
        cwd=ROOT, stdout=stdout, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def end(process: asyncio.subprocess.Process) -> tuple[int, str, str]:
    try:
        out, err = await asyncio.wait_for(process.communicate(), 120)
    except TimeoutError:  # what it left open would fail a test after this one
        process.kill()
        await process.communicate()
        raise
    return process.returncode or 0, (out or b"").decode(), err.decode()


async def bench(*arguments: str) -> tuple[int, str, str]:
    return await end(await start(*arguments))


async def test_measures_diptych_at_several_loads(tmp_path: Path) -> None:
    service = ScriptedService(ttft=0.02, itl=0.005, word=" [/b]")
    json_file, png = tmp_path / "out.json", tmp_path / "out.png"
    async with scripted_grpc.serving(service) as address:
        status, out, err = await bench(
            "--address", address, "--max-concurrency", "1,4", "--rounds", "2", "--num-prompts", "4",
            "--random-input-len", "10", "--random-output-len", "5", "--goodput", "ttft:5000", "tpot:5000",
            "--output-file", str(json_file), "--plot", str(png), "--check-text", "--expect", " [/b] [/b]",
        )  # fmt: skip
    assert (status, "Traceback" in err) == (0, False)
    assert " [/b] [/b]" in out
    assert "handoff" in out
    assert "C=4" in out
    assert service.most_running == 4
    one, four = json.loads(json_file.read_text())
    assert (one["max_concurrency"], four["max_concurrency"]) == (1, 4)
    assert one["completed"] == four["completed"] == one["num_prompts"] == 8
    assert one["total_output_tokens"] == 40
    assert one["request_goodput"] == one["request_throughput"]
    assert one["median_ttft_ms"] >= 19
    assert len(service.seen) == 1 + 2 + 2 * 2 * 4  # the text check, the warm-up, and what is measured
    assert png.read_bytes().startswith(b"\x89PNG")


async def test_replays_a_trace_over_http(tmp_path: Path) -> None:
    script = ScriptedHttp()
    json_file = tmp_path / "out.json"
    async with scripted_http.serving(script) as url:
        status, _, err = await bench(
            "--base-url", url, "--dataset-path", str(MOONCAKE), "--num-prompts", "12", "--time-scale", "0.01",
            "--length-scale", "0.01", "--output-file", str(json_file), "--save-detailed",
        )  # fmt: skip
    assert (status, "Traceback" in err) == (0, False)
    [result] = json.loads(json_file.read_text())
    assert (result["dataset_name"], result["request_rate"], result["completed"]) == ("mooncake", "trace", 12)
    asked = [body["prompt"] for path, body in script.seen if path == "/v1/completions"][2:]
    assert len({tuple(prompt[:5]) for prompt in asked}) < 12  # block 0 is common to the conversations


async def test_a_wrong_answer_is_a_failure() -> None:
    async with scripted_grpc.serving(ScriptedService()) as address:
        status, _, err = await bench("--address", address, "--check-text", "--expect", "Paris")
    assert status == 1
    assert "'Paris'" in err


async def test_what_is_expected_is_looked_for_in_an_answer_though_no_prompt_is_given() -> None:
    async with scripted_grpc.serving(ScriptedService()) as address:
        status, _, err = await bench("--address", address, "--expect", "Paris")
    assert status == 1
    assert "'Paris'" in err


@pytest.mark.parametrize("backend", ["diptych", "kserve"])
async def test_an_api_key_goes_with_grpc_requests(backend: str) -> None:
    service = ScriptedService()
    async with scripted_grpc.serving(service) as address:
        await bench("--address", address, "--backend", backend, "--api-key", "secret", "--num-prompts", "1")
    assert set(service.keys) == {"Bearer secret"}


async def test_flags_that_would_do_nothing_are_refused() -> None:
    status, out, err = await bench("--save-detailed")
    assert (status, out) == (2, "")
    assert err.splitlines()[-1].endswith("--save-detailed needs --output-file")


async def test_shows_a_client_certificate_over_https(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ca = trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    leaf, paths = ca.issue_cert("client@example.org"), {}
    pems = {"CA": ca.cert_pem, "CLIENT_CERT": leaf.cert_chain_pems[0], "CLIENT_KEY": leaf.private_key_pem}
    for name, pem in pems.items():
        paths[name] = tmp_path / f"{name}.pem"
        pem.write_to_path(paths[name])
    monkeypatch.setenv("DIPTYCH_CA_FILE", str(paths["CA"]))
    async with scripted_http.serving(ScriptedHttp(), context) as url:
        stranger, _, _ = await bench("--base-url", url, "--num-prompts", "1")
        for name in ("CLIENT_CERT", "CLIENT_KEY"):
            monkeypatch.setenv(f"DIPTYCH_{name}_FILE", str(paths[name]))
        known, _, err = await bench("--base-url", url, "--num-prompts", "1")
    assert (stranger, known) == (1, 0), err


HTTPS, GRPC = ("--base-url", "https://127.0.0.1:1"), ("--address", "127.0.0.1:1")


@pytest.mark.parametrize(
    ("name", "content", "target"),
    sampled(
        product(["CA", "CLIENT_CERT"], ["nonsense", None], [HTTPS, GRPC]),
        [("CA", "nonsense", HTTPS), ("CLIENT_CERT", None, GRPC)],
    ),
)
async def test_a_certificate_that_cannot_be_read_costs_one_line(
    name: str, content: str | None, target: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.pem"
    if content is not None:
        path.write_text(content)
    monkeypatch.setenv(f"DIPTYCH_{name}_FILE", str(path))
    status, _, err = await bench(*target)
    assert (status, "Traceback" in err) == (2, False)
    assert f"DIPTYCH_{name}_FILE: {path}: " in err.splitlines()[-1]


async def test_failures_are_named_and_no_answer_at_all_is_one() -> None:
    async with scripted_http.serving(ScriptedHttp(status=503)) as url:
        status, _, err = await bench("--base-url", url, "--num-warmups", "0", "--num-prompts", "3")
    assert status == 1
    assert "HTTP 503" in err


async def test_a_run_in_which_a_request_failed_is_told_and_is_no_success() -> None:
    service = ScriptedService(refuse_every=4)
    async with scripted_grpc.serving(service) as address:
        status, out, err = await bench("--address", address, "--num-warmups", "0", "--num-prompts", "4")
    assert status == 1
    assert "1 of 4" in out
    assert "failed requests: 1 × " in err


@pytest.mark.parametrize(
    ("flag", "path"),
    sampled(
        product(["--output-file", "--plot"], ["/proc/nope/x", "."]),
        [("--output-file", "/proc/nope/x"), ("--plot", ".")],
    ),
)
async def test_a_path_that_cannot_be_written_is_told_before_the_first_request(flag: str, path: str) -> None:
    service = ScriptedService()
    async with scripted_grpc.serving(service) as address:
        status, _, err = await bench("--address", address, flag, path)
    assert (status, service.seen) == (2, [])
    assert f"{flag} {path}: " in err.splitlines()[-1]
    assert "Traceback" not in err


async def test_a_full_disk_costs_a_line_and_not_the_table(tmp_path: Path) -> None:
    png = tmp_path / "new" / "load.png"
    async with scripted_grpc.serving(ScriptedService()) as address:
        status, out, err = await bench(
            "--address", address, "--num-prompts", "2", "--output-file", "/dev/full", "--plot", str(png)
        )
    assert status == 1
    assert "out tok/s" in out
    assert "--output-file /dev/full: " in err
    assert "Traceback" not in err
    assert png.read_bytes().startswith(b"\x89PNG")


async def test_has_more_connections_than_a_login_begins_with() -> None:
    few, many = 40, 60
    script = (
        f"import resource, sys; resource.setrlimit(resource.RLIMIT_NOFILE, ({few}, 4096)); "
        "from diptych.bench.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    async with scripted_http.serving(ScriptedHttp(ttft=1)) as url:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", script, "--base-url", url, "--max-concurrency", str(many),
            "--num-prompts", str(many), "--random-output-len", "1",
            cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        status, _, err = await end(process)
    assert status == 0, err


async def test_a_narrow_terminal_cuts_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")  # rich takes the pipe for a terminal
    async with scripted_grpc.serving(ScriptedService()) as address:
        status, out, _ = await bench(
            "--address", address, "--request-rate", "400.25,500.25", "--max-concurrency", "16",
            "--rounds", "2", "--num-prompts", "4", "--random-output-len", "2", "--goodput", "ttft:5000",
        )  # fmt: skip
    assert status == 0
    assert "…" not in out
    assert out.count("500.25 req/s, C≤16") >= 3


async def test_a_terminal_without_our_signs_shows_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    async with scripted_grpc.serving(ScriptedService(word=" ä")) as address:
        status, out, err = await bench(
            "--address", address, "--random-output-len", "1", "--num-prompts", "2", "--check-text"
        )
    assert (status, "Traceback" in err) == (0, False)
    assert " ? ?" in out  # the answer
    assert "?/?/?" in out  # no gap was measured: else a dash


async def test_a_reader_that_left_costs_no_file(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    read, write = os.pipe()
    os.close(read)  # as `| head -1` does, only sooner
    async with scripted_grpc.serving(ScriptedService()) as address:
        process = await start(
            "--address", address, "--num-prompts", "2", "--output-file", str(path), stdout=write
        )
        os.close(write)
        _, _, err = await end(process)
    assert "Traceback" not in err
    assert json.loads(path.read_text())[0]["completed"] == 2


async def test_an_interrupted_run_keeps_the_rounds_that_are_complete(tmp_path: Path) -> None:
    service, path = ScriptedService(ttft=0.2), tmp_path / "out.json"
    async with scripted_grpc.serving(service) as address:
        process = await start(
            "--address", address, "--max-concurrency", "1,2", "--rounds", "50", "--num-prompts", "2",
            "--num-warmups", "0", "--output-file", str(path),
        )  # fmt: skip
        await eventually(lambda: len(service.seen) > 6)  # in the second round's second load
        process.send_signal(signal.SIGINT)
        status, out, err = await end(process)
    assert (status, "Traceback" in err) == (130, False)
    assert "C=2" in out
    assert "interrupted" in err
    one, two = json.loads(path.read_text())
    assert two["rounds"] >= 1
    assert (one["completed"], two["completed"]) == (2 * one["rounds"], 2 * two["rounds"])


async def test_a_run_that_is_interrupted_before_its_first_round_writes_nothing(tmp_path: Path) -> None:
    service, path = ScriptedService(ttft=30), tmp_path / "out.json"
    async with scripted_grpc.serving(service) as address:
        process = await start("--address", address, "--output-file", str(path))
        await eventually(lambda: bool(service.seen))
        process.send_signal(signal.SIGINT)
        status, out, _ = await end(process)
    assert (status, out, path.exists()) == (130, "", False)


async def test_a_server_that_is_not_there_costs_one_line() -> None:
    status, _, err = await bench("--address", "127.0.0.1:1")
    assert status == 1
    assert len(err.splitlines()) == 1
    assert "127.0.0.1:1" in err


async def test_wrong_flags_are_told_in_a_line() -> None:
    status, _, err = await bench("--base-url", "http://127.0.0.1:1", "--dataset-path", "/nowhere.csv")
    assert status == 2
    assert "/nowhere.csv" in err.splitlines()[-1]
