import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.runtime.failpoints import failpause, failpoint, parse_failpoints


def test_nothing_is_armed_by_default() -> None:
    assert not failpoint("handoff.drop_block")


async def test_an_unarmed_pause_returns() -> None:
    await asyncio.wait_for(failpause("anything"), 1)


def test_the_variable_names_faults_and_pauses() -> None:
    assert parse_failpoints("a, b=pause,,c") == ({"a", "c"}, {"b"})
    with pytest.raises(ValueError, match="unknown action"):
        parse_failpoints("a=explode")


def test_armed_by_the_environment_of_the_process() -> None:
    code = (
        "import asyncio\nfrom diptych.runtime.failpoints import failpause, failpoint\n"
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
        cwd=Path(__file__).parents[3],
        env={"DIPTYCH_FAILPOINTS": "a,b=pause"},
    )


def test_armed_once_while_processes_run(tmp_path: Path) -> None:
    code = (
        "import sys\nfrom pathlib import Path\nfrom diptych.runtime.failpoints import failpoint, reach\n"
        "folder = Path(sys.argv[1])\n"
        "assert not failpoint('a')\n"
        "(folder / 'a').write_text('fail 2')\n"
        "assert [failpoint('a') for _ in range(5)] == [False, False, True, False, False]\n"
        "(folder / 'b').write_text('crash 1')\n"
        "reach('b')\nprint('alive', flush=True)\nreach('b')\nprint('still alive', flush=True)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=False,
        cwd=Path(__file__).parents[3],
        env={"DIPTYCH_FAILPOINTS_DIR": str(tmp_path)},
        stdout=subprocess.PIPE,
    )
    assert (done.returncode, done.stdout) == (-9, b"alive\n")
    assert {path.stem for path in tmp_path.iterdir()} == {"a", "b"}
    assert all(path.suffix[1:].isdigit() for path in tmp_path.iterdir())
