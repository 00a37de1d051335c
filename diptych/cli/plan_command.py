"""`diptych plan`: the fleet and the cost of a load, before anything is bought."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from diptych.cli.plan_values import check, named, one_of, refuse_given

if TYPE_CHECKING:
    from diptych.planner.capacity import Demand
    from diptych.planner.money import ApiPrice

_LOAD, _HARDWARE, _COST, _TRACE = "Load", "Hardware", "Cost", "Trace"


def plan(
    model: Annotated[
        str, typer.Option(help='A GGUF file, a folder, a config.json alone, or "bundled".')
    ] = "bundled",
    rate: Annotated[
        float | None,
        typer.Option(help="Requests a second; 1, or a trace's own.", rich_help_panel=_LOAD),
    ] = None,
    input_tokens: Annotated[
        float | None,
        typer.Option("--input", help="Tokens of a prompt, mean; 1024.", rich_help_panel=_LOAD),
    ] = None,
    output_tokens: Annotated[
        float | None,
        typer.Option("--output", help="Tokens of an answer, mean; 256.", rich_help_panel=_LOAD),
    ] = None,
    prefix: Annotated[
        float | None,
        typer.Option(help="Share of prompt tokens that are cached, 0 to 1; 0.", rich_help_panel=_LOAD),
    ] = None,
    ttft: Annotated[
        float | None,
        typer.Option(help="Milliseconds to the first token that are wanted, mean.", rich_help_panel=_LOAD),
    ] = None,
    tpot: Annotated[
        float | None,
        typer.Option(help="Milliseconds between tokens that are wanted.", rich_help_panel=_LOAD),
    ] = None,
    gpu: Annotated[
        str,
        typer.Option(help="A card by name: h100, h200, b200, a100, l40s, l4, …", rich_help_panel=_HARDWARE),
    ] = "h100",
    memory: Annotated[
        str | None,
        typer.Option(help="Its memory, where it has another size: 40g.", rich_help_panel=_HARDWARE),
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="Cards a worker.", rich_help_panel=_HARDWARE)
    ] = 1,
    prefill_tensor_parallel: Annotated[
        int | None,
        typer.Option(min=1, help="Cards a prefill worker, where it has others.", rich_help_panel=_HARDWARE),
    ] = None,
    quantization: Annotated[
        str,
        typer.Option(help="Type of the matrices: fp32, bf16, fp8, int8 or int4.", rich_help_panel=_HARDWARE),
    ] = "bf16",
    kv_cache_dtype: Annotated[
        str, typer.Option(help="Type of keys and values: fp32, bf16 or fp8.", rich_help_panel=_HARDWARE)
    ] = "bf16",
    speculative_model: Annotated[
        str | None,
        typer.Option(help="Draft model, whose memory counts as well.", rich_help_panel=_HARDWARE),
    ] = None,
    bench: Annotated[
        Path | None,
        typer.Option(
            help="Loads that diptych bench saved: measured times in place of the card's limits.",
            rich_help_panel=_HARDWARE,
        ),
    ] = None,
    price_hour: Annotated[
        float | None, typer.Option(help="Dollars of a card for an hour.", rich_help_panel=_COST)
    ] = None,
    api_price: Annotated[
        str | None,
        typer.Option(
            help="Dollars of an API for a million tokens: input,output or input,output,cached input.",
            rich_help_panel=_COST,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Recorded traffic to replay: Azure's CSV, Mooncake's JSON lines, or JSON lines of timestamp "
            "(ms), input_length, output_length.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            help="Fleets to replay on: PREFILL:DECODE,…; a number alone is every split of so many. "
            "Without it: the fleet that the formulas give.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(min=1, help="Requests; a shorter trace begins anew.", rich_help_panel=_TRACE),
    ] = None,
    worker_rate: Annotated[
        float | None,
        typer.Option(help="Requests a second for each worker of a fleet.", rich_help_panel=_TRACE),
    ] = None,
    attainment: Annotated[
        float | None,
        typer.Option(
            help="Find each fleet's greatest rate with this share of answers within --ttft and --tpot: 0.9.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    routing: Annotated[
        str,
        typer.Option(
            help="cost, the gateway's own; to compare: random, round-robin, longest-prefix.",
            rich_help_panel=_TRACE,
        ),
    ] = "cost",
    max_batch: Annotated[
        int, typer.Option(min=1, max=1024, help="Sequences of a decode step.", rich_help_panel=_TRACE)
    ] = 64,
    prefill_chunk: Annotated[
        int, typer.Option(min=16, max=65536, help="Tokens of a prefill step.", rich_help_panel=_TRACE)
    ] = 2048,
    local_prefill: Annotated[
        str,
        typer.Option(
            help="auto, as the gateway: decode workers compute prompts of up to 256 new tokens where that is "
            "sooner; or never.",
            rich_help_panel=_TRACE,
        ),
    ] = "auto",
    max_model_len: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Tokens of a request at most, prompt and answer; default: the model's.",
            rich_help_panel=_TRACE,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="PNG of goodput, latencies and shares by fleet.", rich_help_panel=_TRACE),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Size a fleet for a load: streams that fit, prefill and decode workers, dollars; or replay a trace.

    (diptych plan --model config.json --gpu h100 --rate 20 --input 2000 --output 300 --prefix 0.6 --ttft 500)
    """
    # Imported here: other commands must not wait for torch.
    from diptych.planner.capacity import DoesNotFit
    from diptych.planner.hardware import find_accelerator
    from diptych.planner.measured_rates import BadMeasurements
    from diptych.planner.model_shape import NotPlanned, read_shape
    from diptych.planner.plan import Question, make_plan
    from diptych.planner.report import report
    from diptych.runtime.settings import StartupError, resolve_model

    replayed = None
    if trace is not None:
        from diptych.cli.plan_trace import replay_on, trace_options

        refuse_given(
            "comes from --trace", ("--input", input_tokens), ("--output", output_tokens), ("--prefix", prefix)
        )
        refuse_given("is not compared with replays", ("--api-price", api_price))
        refuse_given("does not go with --trace", ("--prefill-tensor-parallel", prefill_tensor_parallel))
        replayed = trace_options(
            trace,
            workers=workers,
            requests=requests,
            rate=rate,
            worker_rate=worker_rate,
            attainment=attainment,
            routing=routing,
            max_batch=max_batch,
            prefill_chunk=prefill_chunk,
            local_prefill=local_prefill,
            max_model_len=max_model_len,
            plot=plot,
        )
        rate = replayed.traffic.rate
        input_tokens, output_tokens = replayed.traffic.mean_lengths()
    else:
        flags = ("--workers", workers), ("--requests", requests), ("--worker-rate", worker_rate)
        refuse_given("needs --trace", *flags, ("--attainment", attainment), ("--plot", plot))
    if speculative_model == "mtp":
        raise typer.BadParameter("layers that draft are not planned", param_hint="--speculative-model")
    demand = _demand(rate, input_tokens, output_tokens, prefix, ttft, tpot)
    if price_hour is not None:
        check("--price-hour", price_hour, price_hour > 0, "above 0")
    elif api_price is not None:
        raise typer.BadParameter("needs --price-hour, to be compared with", param_hint="--api-price")
    try:
        question = Question(
            shape=read_shape(resolve_model(model)),
            draft=None if speculative_model is None else read_shape(resolve_model(speculative_model)),
            card=named("--gpu", lambda: find_accelerator(gpu, _memory(memory))),
            demand=demand,
            weights=one_of("--quantization", quantization, ("fp32", "bf16", "fp8", "int8", "int4")),
            keys_and_values=one_of("--kv-cache-dtype", kv_cache_dtype, ("fp32", "bf16", "fp8")),
            cards_a_worker=tensor_parallel,
            cards_a_prefill_worker=prefill_tensor_parallel,
            results=None if bench is None else _results(bench),
            dollars_an_hour=price_hour,
            api=None if api_price is None else _api(api_price),
        )
        if question.shape.recurrent_layers:
            refuse_given(
                f"does not go with the recurrent layers of {question.shape.family}",
                ("--tensor-parallel", _several(tensor_parallel)),
                ("--prefill-tensor-parallel", _several(prefill_tensor_parallel)),
            )
            # Workers take draft models there; what these leave empty in pages of states is not counted.
            refuse_given(
                f"is not planned beside the recurrent layers of {question.shape.family}",
                ("--speculative-model", speculative_model),
            )
        if replayed is not None:
            replay_on(question, replayed, as_json=as_json)
            return
        made = make_plan(question)
    except (NotPlanned, StartupError) as error:
        raise typer.BadParameter(str(error), param_hint="--model") from error
    except BadMeasurements as error:
        raise typer.BadParameter(str(error), param_hint="--bench") from error
    except DoesNotFit as error:
        Console(stderr=True).print(f"no fleet of these cards serves this load: {error}", style="red")
        raise typer.Exit(1) from error
    if as_json:
        print(json.dumps(made.as_json(), indent=2, allow_nan=False))
    else:
        Console().print(report(made))


def _several(cards: int | None) -> int | None:
    return cards if cards is not None and cards > 1 else None


def _demand(
    rate: float | None,
    input_tokens: float | None,
    output_tokens: float | None,
    prefix: float | None,
    ttft: float | None,
    tpot: float | None,
) -> Demand:
    """Return the load that the flags describe, with defaults for those that are absent."""
    from diptych.planner.capacity import Demand

    rate = 1.0 if rate is None else rate
    input_tokens = 1024.0 if input_tokens is None else input_tokens
    output_tokens = 256.0 if output_tokens is None else output_tokens
    prefix = 0.0 if prefix is None else prefix
    check("--rate", rate, rate > 0, "above 0")
    check("--input", input_tokens, input_tokens >= 1, "at least 1")
    check("--output", output_tokens, output_tokens >= 1, "at least 1")
    check("--prefix", prefix, 0 <= prefix <= 1, "from 0 to 1")
    for flag, limit in (("--ttft", ttft), ("--tpot", tpot)):
        if limit is not None:
            check(flag, limit, limit > 0, "above 0")
    return Demand(rate, input_tokens, output_tokens, prefix, _seconds(ttft), _seconds(tpot))


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1000


def _memory(text: str | None) -> float | None:
    if text is None:
        return None
    number, unit = text.lower().removesuffix("b"), 1e9
    if number[-1:] in "mgt":
        number, unit = number[:-1], {"m": 1e6, "g": 1e9, "t": 1e12}[number[-1]]
    try:
        found = float(number) * unit
    except ValueError:
        found = 0.0
    check("--memory", found, found > 0, "a size such as 80g")
    return found


def _results(path: Path) -> list[dict[str, Any]]:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--bench") from error
    results = found if isinstance(found, list) else [found]
    if not all(isinstance(one, dict) for one in results):
        raise typer.BadParameter(f"{path} is no result of diptych bench", param_hint="--bench")
    return results


def _api(text: str) -> ApiPrice:
    from diptych.planner.money import ApiPrice

    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError:
        prices = []
    if len(prices) not in (2, 3) or any(not 0 <= price < math.inf for price in prices):
        raise typer.BadParameter("must be two or three prices: 0.5,1.5", param_hint="--api-price")
    return ApiPrice(*prices)
