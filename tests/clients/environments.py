"""Environments of the clients: a venv or an npm folder each, made when it is first asked for."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
BUILD = HERE.parents[1] / "build" / "clients"
INSTALL_TIMEOUT_S = 900
NO_TORCH = "torch<0.0.1\n"
"""Constraint that makes an installation fail which would bring torch and its gigabytes."""


@dataclass(frozen=True)
class Client:
    """A client, its driver in tests/clients/drivers, and what it is installed from.

    `packages` are requirements; the first has an exact version, the client's in the table. Where `needs` says
    what they need, they are installed without what they ask for.
    """

    name: str
    driver: str
    packages: tuple[str, ...]
    needs: tuple[str, ...] = ()

    @property
    def is_node(self) -> bool:
        return self.driver.endswith(".mjs")

    @property
    def folder(self) -> Path:
        return BUILD / Path(self.driver).stem

    @property
    def version(self) -> str:
        """The package of the client and its version, as the table names it."""
        package, _, version = re.sub(r"\[.*?\]", "", self.packages[0]).rpartition(
            "@" if self.is_node else "=="
        )
        return f"{package} {version}"

    def install(self) -> None:
        """Make the environment, unless it holds these packages.

        Raises CalledProcessError with the text of pip or npm.
        """
        stamp, wanted = self.folder / ".installed", "\n".join(self.packages + self.needs)
        if stamp.exists() and stamp.read_text() == wanted:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.is_node:
            (self.folder / "package.json").write_text('{"private": true, "type": "module"}')
            self._run(["npm", "install", "--save-exact", "--no-audit", "--no-fund", *self.packages])
        else:
            venv.create(self.folder, with_pip=True)
            constraints = self.folder / "constraints.txt"
            constraints.write_text(NO_TORCH)
            pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            if self.needs:
                self._run([*pip, "--no-deps", *self.packages])
            self._run([*pip, "--constraint", str(constraints), *(self.needs or self.packages)])
        stamp.write_text(wanted)

    def _run(self, command: list[str]) -> None:
        subprocess.run(
            command, cwd=self.folder, check=True, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S
        )

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def command(self) -> tuple[list[str], dict[str, str]]:
        """Return the command that runs the driver, and its environment variables."""
        source = HERE / "drivers" / self.driver
        if self.is_node:
            # Node looks for packages beside the script, so the scripts lie beside the packages.
            for script in (source, HERE / "shared" / "client_paths.mjs"):
                (self.folder / script.name).write_text(script.read_text())
            return ["node", str(self.folder / self.driver)], dict(os.environ)
        # -P: a driver may have the name of the package that it drives.
        return [str(self.python), "-P", str(source)], {**os.environ, "PYTHONPATH": str(HERE / "shared")}


class InstalledClient(Client):
    """A client of the development environment, which is not installed again."""

    def install(self) -> None:
        """Do nothing."""

    @property
    def version(self) -> str:
        """The package of the client and its version, as the table names it."""
        return f"{self.packages[0]} {importlib.metadata.version(self.packages[0])}"

    @property
    def python(self) -> Path:
        return Path(sys.executable)
