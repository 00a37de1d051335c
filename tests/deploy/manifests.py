"""What deploy/ would start, read as a program finds it: arguments, variables, ports, probes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from decode_worker.config import DecodeSettings
from diptych.runtime.otlp import FLUSH_S
from diptych.runtime.settings import ProgramSettings
from diptych.worker_process.config import RoleSettings
from diptych.worker_process.server import CLOSE_S, LAST_MESSAGES_S, DrainDeadline
from gateway.config import GatewaySettings
from gateway.listeners import SHUT_DOWN_S
from prefill_worker.config import PrefillSettings
from prefill_worker.encoder.config import EncodeSettings

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
KUBERNETES = DEPLOY / "kubernetes"
IMAGE = "registry.example/diptych"
"""The name of our image in all manifests, which `images:` of a kustomization replaces."""
SETTINGS: dict[str, type[ProgramSettings]] = {
    "gateway": GatewaySettings,
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "encode": EncodeSettings,
}
Document = dict[str, Any]


def documents(folder: Path = KUBERNETES) -> list[Document]:
    """All objects of a folder and those below it, kustomizations aside."""
    files = sorted(file for file in folder.rglob("*.yaml") if file.name != "kustomization.yaml")
    return [one for file in files for one in yaml.safe_load_all(file.read_text())]


def kustomizations() -> dict[Path, Document]:
    """By folder."""
    return {file.parent: yaml.safe_load(file.read_text()) for file in KUBERNETES.rglob("kustomization.yaml")}


def shared_variables() -> dict[str, str]:
    """Those of the ConfigMap that all programs read."""
    [generated] = kustomizations()[KUBERNETES / "base"]["configMapGenerator"]
    return dict(literal.split("=", 1) for literal in generated["literals"])


@dataclass(frozen=True)
class Started:
    """A container that runs one of our programs."""

    deployment: Document
    container: Document

    @property
    def program(self) -> str:
        return str(self.container["args"][0])

    @property
    def pod(self) -> Document:
        return dict(self.deployment["spec"]["template"]["spec"])

    @property
    def ports(self) -> dict[str, int]:
        return {port["name"]: port["containerPort"] for port in self.container["ports"]}

    @property
    def where(self) -> str:
        return f"{self.deployment['metadata']['name']}-{self.container['name']}"

    def environment(self) -> dict[str, str]:
        """What a cluster fills in is `filled` here, or hexadecimal where it is secret."""
        own: dict[str, str] = {}
        for variable in self.container["env"]:
            value = variable.get("value")
            if value is None:
                value = "ab" * 16 if "secretKeyRef" in variable["valueFrom"] else "filled"
            own[variable["name"]] = re.sub(r"\$\((\w+)\)", lambda name: own[name[1]], value)
        return shared_variables() | own


def started() -> Iterator[Started]:
    """Every container of every Deployment that runs one of our programs."""
    for one in documents():
        if one["kind"] == "Deployment":
            for container in one["spec"]["template"]["spec"]["containers"]:
                if container["image"].rpartition(":")[0] == IMAGE:
                    yield Started(one, container)


def settings_of(program: str, flags: list[str], variables: Mapping[str, str], patch: Any) -> ProgramSettings:
    """As the program would read them, from these variables alone. Raises BadSettings."""
    for name in [name for name in os.environ if name.startswith("DIPTYCH_")]:
        patch.delenv(name)
    for name, value in variables.items():
        patch.setenv(name, value)
    return SETTINGS[program].read_argv(flags)


def leaves_within_s(settings: ProgramSettings) -> float:
    """From SIGTERM to the end of the process, when nothing finishes by itself."""
    if isinstance(settings, GatewaySettings):
        return settings.lame_duck + settings.shutdown_timeout + SHUT_DOWN_S + FLUSH_S
    assert isinstance(settings, RoleSettings)
    return (
        DrainDeadline(settings.worker_shutdown_timeout, 0.0).end_at + 2 * LAST_MESSAGES_S + CLOSE_S + FLUSH_S
    )


def seconds(text: str) -> float:
    """Of compose's `15s`."""
    return float(text.removesuffix("s"))


def cores(text: str) -> float:
    """Of Kubernetes' `2` and `250m`."""
    return int(text[:-1]) / 1000 if text.endswith("m") else float(text)


def mebibytes(text: str) -> int:
    """Of Kubernetes' `2Gi` and `512Mi`."""
    return int(text[:-2]) * {"Mi": 1, "Gi": 1024}[text[-2:]]
