"""Command line of the comparison: install, make the model's variants, measure, write the results."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import NoReturn

from lab.peers import environment, install, servers, table
from lab.peers.cells import Journal, all_cells
from lab.peers.install import InstallFailed
from lab.peers.interference import LONG_PROMPT
from lab.peers.model import find_model
from lab.peers.options import Options, parse
from lab.peers.rounds import Rounds
from lab.peers.servers import Server
from lab.peers.summary import Summary
from lab.peers.targets import our_paths, targets


def main(argv: Sequence[str]) -> int:
    """Exit status: 0, 1 when a peer cannot be installed or a server had to be left out, 130 when
    interrupted."""
    options = parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    try:
        return _compare(options)
    except (InstallFailed, FileNotFoundError) as error:
        print(f"lab.peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        tell("interrupted; the same command goes on from here")
        return 130


def _compare(options: Options) -> int:
    made = prepare(options)
    if options.install_only:
        return 0
    versions = environment.versions()  # of what starts now; the checkout may move on meanwhile
    question = _question(options, made, versions)
    path = options.places.runs / f"{options.label}.jsonl"
    if options.fresh:
        path.unlink(missing_ok=True)
    journal = Journal(path, question)
    rounds = Rounds(made, journal, options.sizes, options.places.logs)
    rounds.run(all_cells(made, options.concurrencies, options.rounds, options.shapes), tell)
    write(options, made, journal, rounds.faults, versions)
    if rounds.faults:
        tell("the same command measures again what was left out")
        return 1
    path.replace(path.with_suffix(".done.jsonl"))
    return 0


def prepare(options: Options) -> list[Server]:
    """Installs and converts what is not there yet. Raises InstallFailed, FileNotFoundError."""
    places, cores = options.places, environment.cores()
    model = find_model(options.model)
    made = [servers.diptych(dtype, options.model) for dtype in options.ours]
    folder = install.make_folder(places, "bf16_folder", model, "bf16", tell)
    if options.vllm:
        install.install_vllm(places, tell)
        tcmalloc = install.find_tcmalloc(places, tell)
        for kind in options.vllm:
            source = (
                folder
                if kind == "bf16"
                else install.make_folder(places, f"{kind}_folder", folder, kind, tell)
            )
            made.append(servers.vllm(kind, source, places, cores, tcmalloc))
    if options.llama:
        install.install_llama(places, tell)
        for kind in options.llama:
            # The shipped file as it is, where it is of that type.
            gguf = model if kind in model.name else install.make_gguf(places, model, kind, tell)
            made.append(servers.llama_cpp(kind, gguf, places, len(cores)))
    return made


def write(
    options: Options,
    made: Sequence[Server],
    journal: Journal,
    faults: Mapping[str, str],
    versions: Mapping[str, str],
) -> None:
    """Write the table for people and the figures of every round for programs, beside each other."""
    summary = Summary(journal.measured)
    limits = environment.limits(summary, options.places.folder("bf16") / "config.json", LONG_PROMPT)
    judged = {path: targets(made, summary, limits, path) for path in our_paths(made, summary)}
    now = datetime.now(UTC)
    described = {"date": now.isoformat(timespec="minutes"), **environment.machine(), **versions}
    report = table.Report(
        title=f"{now:%Y-%m-%d}: Diptych, llama.cpp and vLLM on the same {len(environment.cores())} cores",
        method=_method(options),
        environment=described,
        servers=made,
        concurrencies=options.concurrencies,
        shapes=options.shapes,
        summary=summary,
        targets=judged,
        limits=limits,
        faults=faults,
    )
    record = {
        "environment": described,
        "sizes": asdict(options.sizes),
        "limits": None if limits is None else asdict(limits),
        "servers": [asdict(one) for one in made],
        "targets": {
            path: [{**asdict(one), "ratio": one.ratio, "met": one.met} for one in found]
            for path, found in judged.items()
        },
        "faults": dict(faults),
        "measurements": [asdict(one) for one in journal.measured],
    }
    base = options.results / f"{now:%Y-%m-%d}-{options.label}"
    base.parent.mkdir(parents=True, exist_ok=True)
    page = _without_paths(table.markdown(report), options)
    Path(f"{base}.md").write_text(page)
    Path(f"{base}.json").write_text(_without_paths(json.dumps(record, indent=1), options) + "\n")
    tell(page)
    tell(f"written: {base}.md and .json")


def _without_paths(text: str, options: Options) -> str:
    """Results are read elsewhere: where this machine keeps things does not matter there."""
    known = {
        str(options.places.root): "$PEERS",
        str(find_model(options.model).parent): "$MODEL",
        sys.executable: "python",
    }
    for path, name in known.items():
        text = text.replace(path, name)
    return text


def tell(line: str) -> None:
    print(line, flush=True)


def _method(options: Options) -> str:
    sizes = options.sizes
    return (
        f"Prompts of {sizes.input_len} random tokens, {sizes.output_len} out, greedy, streaming, no common "
        f"prefixes; medians of {options.rounds} interleaved rounds (smallest–largest), {sizes.per_client} "
        "requests a client, one load generator for all, on the same cores. Times in ms. Prefill: 512 tokens "
        "in, 1 out, one client. Interference: 8 streams alone, then beside 512-token prompts one after the "
        "other; a queue: the same with four of these prompts in flight. Paris: 1 where 'The "
        "capital of France is' was continued with it."
    )


def _question(options: Options, made: Sequence[Server], versions: Mapping[str, str]) -> dict[str, object]:
    """Return what a journal answers: with anything of it changed, its measurements no longer belong
    together."""
    return {
        "servers": [asdict(one) for one in made],
        "concurrencies": list(options.concurrencies),
        "shapes": [shape.load for shape in options.shapes],
        "rounds": options.rounds,
        "sizes": asdict(options.sizes),
        "versions": dict(versions),
    }


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt
