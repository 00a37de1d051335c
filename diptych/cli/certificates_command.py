"""`diptych certificates`: makes, or renews, the certificates of all programs by a private authority."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def certificates(
    folder: Annotated[Path, typer.Argument(help="Gets ca.crt, ca.key and a folder for each role.")],
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days for which certificates are valid.")] = 90,
) -> None:
    """Make certificates for --internal-tls, signed by an authority of your own; run it again to renew them.

    Give each program its role's folder alone (FOLDER/decode has tls.crt, tls.key and ca.crt), and keep ca.key
    where no program runs.
    """
    from diptych.cli.private_ca import AUTHORITY_KEY, BadAuthority, PrivateCa
    from diptych.cli.stack import ROLES
    from diptych.runtime.internal_tls import AUTHORITY

    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / AUTHORITY_KEY).exists() or (folder / AUTHORITY).exists():
            authority = PrivateCa.read(folder)
        else:
            authority = PrivateCa.fresh()
            authority.write(folder)
        for role in ROLES:
            authority.issue(folder / role, [role], days)
    except BadAuthority as error:
        raise typer.BadParameter(str(error)) from None
    except OSError as error:
        raise typer.BadParameter(f"cannot write {error.filename}: {error.strerror}") from None
    for role in ROLES:
        print(f"diptych {role} --internal-tls {folder / role}")
    print(f"valid for {days} days; `diptych certificates {folder}` renews them", file=sys.stderr)
