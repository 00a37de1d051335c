"""`diptych plan`: the fleet and the cost of a load, before anything is bought."""

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

_LOAD, _HARDWARE, _COST = "Load", "Hardware", "Cost"


def plan(
    model: Annotated[
        str, typer.Option(help='A GGUF file, a folder, a config.json alone, or "bundled".')
    ] = "bundled",
    rate: Annotated[float, typer.Option(help="Requests a second.", rich_help_panel=_LOAD)] = 1.0,
    input_tokens: Annotated[
        float, typer.Option("--input", help="Tokens of a prompt, mean.", rich_help_panel=_LOAD)
    ] = 1024.0,
    output_tokens: Annotated[
        float, typer.Option("--output", help="Tokens of an answer, mean.", rich_help_panel=_LOAD)
    ] = 256.0,
    prefix: Annotated[
        float, typer.Option(help="Share of prompt tokens that are cached, 0 to 1.", rich_help_panel=_LOAD)
    ] = 0.0,
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
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Size a fleet for a load: streams that fit, prefill and decode workers, dollars.

    (diptych plan --model config.json --gpu h100 --rate 20 --input 2000 --output 300 --prefix 0.6 --ttft 500)
    """
    # Imported here: other commands must not wait for torch.
    from diptych.planner.capacity import Demand, DoesNotFit
    from diptych.planner.hardware import find_accelerator
    from diptych.planner.model_shape import NotPlanned, read_shape
    from diptych.planner.plan import Question, make_plan
    from diptych.planner.rates import BadMeasurements
    from diptych.planner.report import report
    from diptych.runtime.settings import StartupError, resolve_model

    _check("--rate", rate, rate > 0, "above 0")
    _check("--input", input_tokens, input_tokens >= 1, "at least 1")
    _check("--output", output_tokens, output_tokens >= 1, "at least 1")
    _check("--prefix", prefix, 0 <= prefix <= 1, "from 0 to 1")
    for flag, limit in (("--ttft", ttft), ("--tpot", tpot), ("--price-hour", price_hour)):
        if limit is not None:
            _check(flag, limit, limit > 0, "above 0")
    if price_hour is None and api_price is not None:
        raise typer.BadParameter("needs --price-hour, to be compared with", param_hint="--api-price")
    demand = Demand(rate, input_tokens, output_tokens, prefix, _seconds(ttft), _seconds(tpot))
    try:
        question = Question(
            shape=read_shape(resolve_model(model)),
            draft=None if speculative_model is None else read_shape(resolve_model(speculative_model)),
            card=_named("--gpu", lambda: find_accelerator(gpu, _memory(memory))),
            demand=demand,
            weights=_one_of("--quantization", quantization, ("fp32", "bf16", "fp8", "int8", "int4")),
            keys_and_values=_one_of("--kv-cache-dtype", kv_cache_dtype, ("fp32", "bf16", "fp8")),
            cards_a_worker=tensor_parallel,
            cards_a_prefill_worker=prefill_tensor_parallel,
            results=None if bench is None else _results(bench),
            dollars_an_hour=price_hour,
            api=None if api_price is None else _api(api_price),
        )
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


def _check(flag: str, value: float, holds: bool, wanted: str) -> None:
    if not holds or not math.isfinite(value):
        raise typer.BadParameter(f"must be {wanted}", param_hint=flag)


def _seconds(milliseconds: float | None) -> float:
    return math.inf if milliseconds is None else milliseconds / 1000


def _one_of(flag: str, value: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise typer.BadParameter(f"must be one of {', '.join(known)}", param_hint=flag)
    return value


def _named(flag: str, make: Any) -> Any:
    try:
        return make()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from error


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
    _check("--memory", found, found > 0, "a size such as 80g")
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


def _api(text: str) -> Any:
    from diptych.planner.money import ApiPrice

    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError:
        prices = []
    if len(prices) not in (2, 3) or any(not 0 <= price < math.inf for price in prices):
        raise typer.BadParameter("must be two or three prices: 0.5,1.5", param_hint="--api-price")
    return ApiPrice(*prices)
