"""`diptych key new`: makes an API key, and the line that the gateways' file has of it."""

import json
import secrets
import sys
from typing import Annotated

import typer

key = typer.Typer(name="key", help="API keys of a gateway.", no_args_is_help=True, add_completion=False)


@key.callback()
def _key() -> None:
    """API keys of a gateway."""


@key.command()
def new(
    tenant: Annotated[str, typer.Option(help="Whose key it is: tenants share no prefix and no request.")],
    name: Annotated[str, typer.Option(help="Of the key, in refusals; default: a random one.")] = "",
    scope: Annotated[
        list[str] | None, typer.Option(help="inference or admin; may be repeated; default: inference.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1)] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Prompt and output.")] = None,
    concurrent_requests: Annotated[int | None, typer.Option(min=1)] = None,
    adapter: Annotated[
        list[str] | None,
        typer.Option(help="LoRA adapter that it may use; may be repeated, NAME* is any rest; default: all."),
    ] = None,
) -> None:
    """Make a key. It is shown once, on stderr; stdout has the line for the file of --api-keys-file.

    (umask 077; diptych key new --tenant billing >> keys.jsonl)
    """
    from gateway.access.key_file import BadKeyFile, digest_of, fresh_key, parse_keys

    fresh = fresh_key()
    members = {
        "name": name or f"key-{secrets.token_hex(4)}",
        "tenant": tenant,
        "sha256": digest_of(fresh).hex(),
        "scopes": scope or ["inference"],
        "requests_per_minute": requests_per_minute,
        "tokens_per_minute": tokens_per_minute,
        "concurrent_requests": concurrent_requests,
        "adapters": adapter or None,
    }
    line = json.dumps({name: value for name, value in members.items() if value is not None})
    try:
        parse_keys(line, "the key")
    except BadKeyFile as error:
        raise typer.BadParameter(str(error).partition(": ")[2]) from None
    print(f"The key, which is stored nowhere: {fresh}", file=sys.stderr)
    print(line)
