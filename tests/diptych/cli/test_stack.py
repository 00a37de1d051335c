import sys
from pathlib import Path

import pytest

from diptych.cli.child import ChildSpec, Slot
from diptych.cli.stack import BadOverride, SharedSecrets, parse_override, program_specs
from diptych.cli.stack_options import StackOptions

SHARED = SharedSecrets("redis://:password@127.0.0.1:1/0", "5ec2e7")


def flag(spec: ChildSpec, name: str) -> object:
    return spec.argv[spec.argv.index(f"--{name}") + 1] if f"--{name}" in spec.argv else None


def specs(options: StackOptions, cores: int = 4) -> dict[str, ChildSpec]:
    return {spec.name: spec for spec in program_specs(options, SHARED, cores)}


def test_one_gateway_and_as_many_workers_as_asked_for_share_the_cores() -> None:
    made = specs(StackOptions(prefill_workers=2, decode_workers=1))

    assert list(made) == ["gateway", "decode-0", "prefill-0", "prefill-1"]
    assert [flag(made[name], "threads") for name in ("prefill-0", "prefill-1", "decode-0")] == ["2", "1", "1"]
    assert flag(made["gateway"], "threads") is None


def test_programs_are_not_looked_for_in_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for spec in specs(StackOptions()).values():
        assert spec.argv[:2] == (sys.executable, "-P")
        assert Path(str(spec.argv[2])).is_absolute()


def test_only_the_gateway_gets_the_public_address_and_keeps_its_ports() -> None:
    made = specs(StackOptions(host="0.0.0.0", insecure=True, grpc_port=50051, http_port=8000))

    ports = {"grpc_port": 50051, "http_port": 8000, "admin_port": 50052}
    assert made["gateway"].values == {**ports, "await_workers_s": 0}
    assert flag(made["gateway"], "host") == "0.0.0.0"
    assert "--insecure" in made["gateway"].argv
    for worker in ("prefill-0", "decode-0"):
        assert made[worker].values == {"grpc_port": 0, "http_port": 0}
        assert made[worker].keep == ()
        assert flag(made[worker], "host") == "127.0.0.1"
        assert "--insecure" not in made[worker].argv

    again = made["gateway"].restarted({"grpc_port": 41, "http_port": 42, "admin_port": 43, "worker_id": "x"})
    assert again.values == {"grpc_port": 41, "http_port": 42, "admin_port": 43, "await_workers_s": 0}
    assert flag(again, "grpc-port") == Slot("grpc_port")


def test_worker_spec_names_the_dead_it_replaces() -> None:
    spec = specs(StackOptions())["decode-0"]
    assert flag(spec, "replaces") == Slot("replaces")
    for number in range(10):
        spec = spec.after_death({"grpc_port": 41, "worker_id": f"decode-0-{number}"})
    assert spec.died == tuple(f"decode-0-{number}" for number in range(2, 10))
    assert spec.restarted({"grpc_port": 41, "worker_id": "one that lives"}).died == spec.died
    assert flag(specs(StackOptions())["gateway"], "replaces") is None


def test_secrets_travel_by_environment_never_by_command_line() -> None:
    for spec in specs(StackOptions()).values():
        redis = {"DIPTYCH_REDIS_URL": SHARED.redis_url}
        secret = {"DIPTYCH_SECRET": SHARED.block_secret} if spec.role == "gateway" else {}
        assert spec.env == {**redis, **secret}
        assert not any("password" in str(part) or SHARED.block_secret in str(part) for part in spec.argv)
    assert SHARED.block_secret not in repr(SHARED)
    assert "password" not in repr(SHARED)


def test_an_unset_option_is_left_to_the_program() -> None:
    made = specs(StackOptions())
    assert flag(made["decode-0"], "kv-memory-mib") is None
    assert flag(specs(StackOptions(kv_memory_mib=64))["decode-0"], "kv-memory-mib") == "64"


def test_workers_on_one_gpu_share_its_memory() -> None:
    made = specs(StackOptions(prefill_workers=2, decode_workers=1))
    assert flag(made["decode-0"], "device") == flag(made["prefill-1"], "device") == "auto"
    assert flag(made["decode-0"], "gpu-memory-utilization") == "0.6"
    assert flag(made["prefill-0"], "gpu-memory-utilization") is None
    assert flag(made["gateway"], "device") is None
    chosen = specs(StackOptions(device="cuda:1", gpu_memory_utilization=0.4))["decode-0"]
    assert (flag(chosen, "device"), flag(chosen, "gpu-memory-utilization")) == ("cuda:1", "0.4")
    assert flag(specs(StackOptions(device="cpu"))["decode-0"], "gpu-memory-utilization") is None


def test_an_override_reaches_its_role_only_and_wins() -> None:
    options = StackOptions(
        prefill_chunk=128,
        overrides=(parse_override("prefill.prefill_chunk=16"), parse_override("decode.--max-batch=8")),
    )
    made = specs(options)
    assert flag(made["prefill-0"], "prefill-chunk") == "16"
    assert flag(made["decode-0"], "max-batch") == "8"
    assert flag(made["prefill-0"], "max-batch") is None


def test_all_workers_get_the_fewest_parts_that_their_degrees_divide() -> None:
    degrees = (("prefill", "tensor-parallel", "2"), ("decode", "tensor-parallel", "3"))
    for overrides, parts in (
        (degrees, "6"),
        ((*degrees, ("decode", "sum-parts", "12")), "12"),
        ((("decode", "tensor-parallel", "1"),), None),
        ((), None),
    ):
        made = specs(StackOptions(overrides=overrides))
        assert [flag(made[name], "sum-parts") for name in ("prefill-0", "decode-0")] == [parts, parts]
        assert flag(made["gateway"], "sum-parts") is None


def test_an_override_turns_switches_on_and_off() -> None:
    overrides = (parse_override("gateway.reuse-port=false"), parse_override("decode.insecure=TRUE"))
    made = specs(StackOptions(model_name="true", overrides=overrides))
    assert "--no-reuse-port" in made["gateway"].argv
    assert "--reuse-port" not in made["gateway"].argv
    assert "--insecure" in made["decode-0"].argv
    assert {flag(spec, "model-name") for spec in made.values()} == {"true"}


@pytest.mark.parametrize(
    "text", ["max-batch=8", "decode.max-batch", "router.x=1", "decode.=1", "gateway.grpc-port=1", ""]
)
def test_parse_override_refuses_what_is_none(text: str) -> None:
    with pytest.raises(BadOverride):
        parse_override(text)


def test_workers_lend_cores_unless_threads_are_chosen() -> None:
    made = specs(StackOptions(), cores=4)
    assert [flag(made[name], "home-cores") for name in ("prefill-0", "decode-0")] == ["0,1", "2,3"]
    assert {flag(made[name], "machine-cores") for name in ("prefill-0", "decode-0")} == {"4"}
    assert flag(made["decode-0"], "cores-fd") == Slot("cores_fd")
    assert flag(made["gateway"], "cores-fd") is None
    assert flag(made["prefill-0"], "weight-holder") == Slot("weight_holder")
    assert flag(made["gateway"], "weight-holder") is None

    fixed = specs(StackOptions(decode_threads=1), cores=4)
    assert flag(fixed["prefill-0"], "cores-fd") is None
    assert flag(fixed["decode-0"], "cores-fd") is None


def test_every_model_has_workers_of_its_own() -> None:
    options = StackOptions(
        model="a=/m/a,b=/m/b", model_split="chat=a:90,b:10", decode_workers=2, gpu_memory_utilization=None
    )
    made = specs(options, cores=6)

    workers = [name for name in made if name != "gateway"]
    assert workers == ["decode-0", "decode-1", "decode-2", "decode-3", "prefill-0", "prefill-1"]
    models = {name: (flag(made[name], "model"), flag(made[name], "model-name")) for name in workers}
    assert [name for name in workers if models[name] == ("/m/a", "a")] == [
        "decode-0",
        "decode-1",
        "prefill-0",
    ]
    assert [name for name in workers if models[name] == ("/m/b", "b")] == [
        "decode-2",
        "decode-3",
        "prefill-1",
    ]
    assert [made[name].model for name in workers] == [str(models[name][0]) for name in workers]
    gateway = made["gateway"]
    assert (flag(gateway, "model"), flag(gateway, "model-split")) == (options.model, "chat=a:90,b:10")
    assert {flag(made[name], "threads") for name in workers} == {"1"}
    homes = {str(flag(made[name], "home-cores")) for name in workers}
    assert homes == {"0", "1", "2", "3", "4", "5"}, "each has a core of its own"
    alone = specs(StackOptions(model="/m/a", decode_workers=2))["decode-0"]
    shares = [float(str(flag(one, "gpu-memory-utilization"))) for one in (alone, made["decode-0"])]
    assert abs(shares[0] - 2 * shares[1]) < 0.002


def test_tiers_keep_one_block_for_all_layers_in_every_worker() -> None:
    for name in ("prefill-0", "decode-0"):
        assert flag(specs(StackOptions())[name], "window-blocks") is None
        assert flag(specs(StackOptions(kv_tier="ram:1g"))[name], "window-blocks") == "off"
        assert (
            flag(specs(StackOptions(kv_tier="ram:1g", window_blocks="auto"))[name], "window-blocks") == "auto"
        )
