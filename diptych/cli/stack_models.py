"""Models of a running `diptych up`: workers of one that comes, and the end of those of one that went.

The gateway is told by `diptych model`; here are the processes. What its gateway would be started with, should
it end, follows what it serves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from diptych.cli.child import ChildFailed, ChildSpec
from diptych.cli.control import Say
from diptych.cli.preflight import BadOptions
from diptych.cli.stack import SharedSecrets, gateway_spec, worker_specs
from diptych.cli.stack_options import StackOptions
from diptych.cli.supervisor import Supervisor
from diptych.cli.worker_specs import reads_images, split_cores
from diptych.engine.usable_cores import usable_cores
from diptych.runtime.model_files import checked_model
from diptych.runtime.settings import StartupError
from gateway.model.named_models import parse_models

GATEWAY = "gateway"


class StackModels:
    """Models of one system: handlers of the commands ``load_model`` and ``keep_models``."""

    def __init__(self, options: StackOptions, shared: SharedSecrets, supervisor: Supervisor) -> None:
        self._options = options
        self._shared = shared
        self._supervisor = supervisor
        self._ranks = self._workers_of_a_model * len(parse_models(options.model))  # given out so far

    async def load(self, value: Any, say: Say) -> None:
        """Start the workers of a model, ``[name, path]``, unless there are some.

        Raises BadOptions, or ChildFailed for the first that does not start; then none of them is left.
        """
        name, path = map(str, value)
        if not self._are_named:
            raise BadOptions("this system was started without names: give each --model as NAME=PATH")
        try:
            path = str(checked_model(path))
        except StartupError as error:
            raise BadOptions(str(error)) from None
        if any(self._serves(one.model, path) for one in self._supervisor.running()):
            return
        specs = self._specs(name, path)
        try:
            await self._supervisor.start(specs)
        except ChildFailed:
            await self._supervisor.remove([spec.name for spec in specs])
            raise
        self._ranks += self._workers_of_a_model
        say(f"started {', '.join(spec.name for spec in specs)}")

    async def keep(self, value: Any, say: Say) -> None:
        """End the workers of all models but ``{"models": [[name, path], …], "aliases": text}``."""
        models = [(str(name), str(path)) for name, path in value["models"]]
        self._options = replace(self._options, model_split=str(value["aliases"]) or None)
        if self._are_named:
            named = ",".join(f"{name}={path}" for name, path in models)
            self._options = replace(self._options, model=named)
        self._supervisor.reconfigure(GATEWAY, gateway_spec(self._options, self._shared).argv)
        gone = dict.fromkeys(
            one.process
            for one in self._supervisor.running()
            if one.model and not any(self._serves(one.model, path) for _, path in models)
        )
        if gone:
            await self._supervisor.remove(gone)
            say(f"ended {', '.join(gone)}")

    @property
    def _workers_of_a_model(self) -> int:
        return self._options.prefill_workers + self._options.decode_workers

    @property
    def _are_named(self) -> bool:
        return parse_models(self._options.model)[0].name is not None

    def _serves(self, model: str, path: str) -> bool:
        """Return whether a worker that was started with ``model`` has the files at ``path``."""
        if not model:
            return False
        try:
            return Path(path) == checked_model(model)
        except StartupError:  # its files are gone; it serves them all the same
            return False

    def _specs(self, name: str, path: str) -> Sequence[ChildSpec]:
        """Return the workers of one more model, by names that none has; they lend no cores."""
        options = self._options
        plan = split_cores(usable_cores(), options.prefill_workers, options.decode_workers)
        options = replace(
            options,
            model=f"{name}={path}",
            prefill_threads=options.prefill_threads or max(plan.prefill),
            decode_threads=options.decode_threads or max(plan.decode),
            encode_workers=options.encode_workers if reads_images(path) else 0,
        )
        taken = {name for one in self._supervisor.running() for name in (one.name, one.process)}
        found: list[ChildSpec] = []
        for spec in worker_specs(options, self._shared, usable_cores(), first_rank=self._ranks):
            named = spec.renamed(taken)
            taken.update(named.names)
            found.append(named)
        return found
