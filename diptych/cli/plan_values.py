"""Checks of the values of `diptych plan`: what is wrong is refused with the name of its flag."""

import math
from collections.abc import Callable
from typing import TypeVar

import typer

T = TypeVar("T")


def check(flag: str, value: float, holds: bool, wanted: str) -> None:
    """Raise typer.BadParameter unless a value is finite and `holds`; it must be `wanted`."""
    if not holds or not math.isfinite(value):
        raise typer.BadParameter(f"must be {wanted}", param_hint=flag)


def refuse_given(reason: str, *flags: tuple[str, object]) -> None:
    """Raise typer.BadParameter for the first of these flags that has a value."""
    for flag, value in flags:
        if value is not None:
            raise typer.BadParameter(reason, param_hint=flag)


def one_of(flag: str, value: str, known: tuple[str, ...]) -> str:
    """Return a value that is one of those known. Raises typer.BadParameter."""
    if value not in known:
        raise typer.BadParameter(f"must be one of {', '.join(known)}", param_hint=flag)
    return value


def named(flag: str, make: Callable[[], T]) -> T:
    """Return what `make` makes, with the flag in the words of its ValueError."""
    try:
        return make()
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=flag) from error
