import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from runtime.failpoints import failpause, failpoint, parse_failpoints


def test_nothing_is_armed_by_default() -> None:
    assert not failpoint("handover.drop_block")


async def test_an_unarmed_pause_returns() -> None:
    await asyncio.wait_for(failpause("anything"), 1)


def test_the_variable_names_faults_and_pauses() -> None:
    assert parse_failpoints("a, b=pause,,c") == ({"a", "c"}, {"b"})
    with pytest.raises(ValueError, match="unknown action"):
        parse_failpoints("a=explode")


def test_armed_by_the_environment_of_the_process() -> None:
    code = (
        "import asyncio\nfrom runtime.failpoints import failpause, failpoint\n"
        "assert failpoint('a') and not failpoint('b') and not failpoint('c')\n"
        "async def main():\n"
        "    await failpause('a')\n"
        "    try:\n        await asyncio.wait_for(failpause('b'), 0.2)\n"
        "    except TimeoutError:\n        return\n"
        "    raise SystemExit('did not pause')\n"
        "asyncio.run(main())"
    )
    subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        cwd=Path(__file__).parents[2],
        env={"DIPTYCH_FAILPOINTS": "a,b=pause"},
    )
