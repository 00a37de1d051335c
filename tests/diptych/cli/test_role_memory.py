"""Memory for both roles is planned at the start."""

from typing import Any

import pytest

from diptych.cli.preflight import BadOptions, check_options
from diptych.cli.role_memory import lacking_memory
from diptych.cli.stack import SharedSecrets, program_specs
from diptych.cli.stack_options import StackOptions

GIB = 1 << 30


def options(**more: Any) -> StackOptions:
    return StackOptions(device="cpu", prefill_workers=2, decode_workers=2, **more)


def test_pools_of_all_workers_but_one_must_fit() -> None:
    settings = check_options(options(auto_roles=True, kv_memory_mib=64))
    assert lacking_memory(settings, 3 * 64 << 20) is None
    why = lacking_memory(settings, (3 * 64 << 20) - 1)
    assert why is not None
    assert "3 of 4 workers may be decode workers at once, with KV pools of 64 MiB each" in why
    more = (("gateway", "min-prefill-workers", "2"),)
    settings = check_options(options(auto_roles=True, kv_memory_mib=64, overrides=more))
    assert lacking_memory(settings, 2 * 64 << 20) is None


def test_up_refuses_pools_that_never_fit() -> None:
    with pytest.raises(BadOptions, match="--auto-roles: 3 of 4 workers"):
        check_options(options(auto_roles=True, kv_memory_mib=1 << 30))
    check_options(options(kv_memory_mib=1 << 30))


def test_gpu_workers_share_the_memory_equally_with_auto_roles() -> None:
    def share(**more: Any) -> list[str]:
        given = StackOptions(device="cuda", prefill_workers=2, decode_workers=2, **more)
        specs = program_specs(given, SharedSecrets("", ""), cores=8)
        argv = [str(part) for part in specs[1].argv]
        changes = argv[argv.index("--role-changes") + 1]
        return [argv[argv.index("--gpu-memory-utilization") + 1], changes]

    assert share() == ["0.36", "cpu"]
    assert share(auto_roles=True) == ["0.225", "any"]


def test_worker_has_arguments_of_both_roles_in_one_place() -> None:
    gateway, *workers = program_specs(options(auto_roles=True), SharedSecrets("", ""), cores=8)
    assert "--auto-roles" in gateway.argv
    assert not gateway.roles
    for spec in workers:
        assert spec.argv == spec.roles[spec.role].argv
        homes = [one.argv[one.argv.index("--home-cores") + 1] for one in spec.roles.values()]
        assert homes[0] == homes[1]
        modules = [" ".join(map(str, one.argv[:4])) for one in spec.roles.values()]
        assert "prefill_worker" in modules[0]
        assert "decode_worker" in modules[1]


async def test_worker_is_probed_at_the_host_of_its_present_role(monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = []

    async def note(host: str, *_: Any, **__: Any) -> int:
        hosts.append(host)
        return 200

    monkeypatch.setattr("diptych.cli.stack.http_status", note)
    chosen = options(overrides=(("decode", "host", "127.0.0.2"),))
    prefill = program_specs(chosen, SharedSecrets("", ""), cores=8)[-1]
    for spec in (prefill, prefill.in_role("decode", ())):
        assert spec.health is not None
        assert await spec.health({"http_port": 1})
    assert hosts == ["127.0.0.1", "127.0.0.2"]
