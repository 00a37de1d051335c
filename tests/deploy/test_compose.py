"""compose.yaml and the Dockerfile beside the code."""

from __future__ import annotations

import json
import re
import tomllib

import pytest
import yaml
from typer.testing import CliRunner

from diptych.cli.app import app
from diptych.runtime.env import unknown_variables
from tests.deploy.manifests import DEPLOY, ROOT, SETTINGS, leaves_within_s, seconds, settings_of

COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()


@pytest.mark.parametrize("program", list(SETTINGS))
def test_a_service_takes_its_flags_and_leaves_in_time(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = COMPOSE["services"][program]
    variables = {
        name: "ab" * 16 if value.startswith("${DIPTYCH_SECRET") else value
        for name, value in service["environment"].items()
    }
    assert unknown_variables(variables) is None
    assert service["command"][0] == program
    settings = settings_of(program, service["command"][1:], variables, monkeypatch)
    assert seconds(service["stop_grace_period"]) > leaves_within_s(settings)
    if program == "gateway":
        published = {int(port.rpartition(":")[2]) for port in service["ports"]}
        assert published == {settings.grpc_port, settings.http_port}
        assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    else:
        assert getattr(settings, "advertise_host") == program, "the name of the service"  # noqa: B009


def test_what_services_refer_to_is_there() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        assert set(service.get("depends_on", ())) <= set(services), name
        for volume in service.get("volumes", ()):
            assert (DEPLOY / volume.split(":")[0]).exists(), volume
    urls = services["decode"]["environment"]
    assert re.search(r"//(\w+):", urls["DIPTYCH_REDIS_URL"])[1] in services  # type: ignore[index]
    assert re.search(r"//(\w+):", urls["OTEL_EXPORTER_OTLP_ENDPOINT"])[1] in services  # type: ignore[index]
    receivers = yaml.safe_load((DEPLOY / "collector.yaml").read_text())["receivers"]
    port = receivers["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    assert urls["OTEL_EXPORTER_OTLP_ENDPOINT"].endswith(f":{port}")


def test_the_image_starts_the_command_that_the_package_installs() -> None:
    [entry] = [json.loads(text) for text in re.findall(r"^ENTRYPOINT (.+)$", DOCKERFILE, re.MULTILINE)]
    commands = [json.loads(text) for text in re.findall(r"^CMD (.+)$", DOCKERFILE, re.MULTILINE)]
    assert [command[0] for command in commands] == ["gateway", "up", "up"]
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert entry[0].rpartition("/")[2] in scripts
    assert set(commands[0][1:]) <= set(commands[1])  # of a gateway alone too
    command = commands[1]
    shown = CliRunner().invoke(app, [command[0], "--help"], env={"COLUMNS": "200", "NO_COLOR": "1"})
    assert shown.exit_code == 0
    assert all(flag in shown.output for flag in command if flag.startswith("--"))


def test_the_image_has_the_torch_of_the_makefile_and_what_triton_compiles_with() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert set(re.findall(r"torch==[\d.]+", DOCKERFILE)) == set(
        re.findall(r"^TORCH := (.+)$", makefile, re.MULTILINE)
    )
    assert "ARG EXTRAS=gpu" in DOCKERFILE
    packages = re.findall(r'^ARG PACKAGES="(.+)"$', DOCKERFILE, re.MULTILINE)[0].split()
    assert {"libgomp1", "gcc", "libc6-dev"} <= set(packages)


def test_each_target_installs_an_extra_that_is_there_and_the_gateways_has_no_torch() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    stages = re.split(r"^FROM ", DOCKERFILE, flags=re.MULTILINE)[1:]
    builds = {stage.split()[2]: stage for stage in stages if "/src" in stage}
    locks = {name: re.findall(r"deploy/requirements/(\w+)\.txt", stage) for name, stage in builds.items()}
    assert locks == {"build-gateway": ["gateway"], "build-cpu": ["cpu"], "build-gpu": ["cpu"]}
    installed = {name: re.findall(r'"/src\[(.+?)\]"', stage) for name, stage in builds.items()}
    assert installed == {"build-gateway": [], "build-cpu": [], "build-gpu": ["${EXTRAS}"]}
    assert {"gateway", "server", "gpu"} <= extras.keys()
    names = {re.split(r"[<>=;\[]", one)[0] for one in extras["gateway"]}
    assert names.isdisjoint({"torch", "triton", "transformers", "numpy"})
    assert "diptych[gateway]" in extras["server"]
    assert all("triton" not in one for one in extras["server"])
