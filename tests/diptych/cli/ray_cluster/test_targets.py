import json
from pathlib import Path

from diptych.cli.ray_cluster.targets import write_targets
from diptych.cli.supervisor import Running


def test_programs_that_serve_are_listed_at_their_hosts(tmp_path: Path) -> None:
    file = tmp_path / "targets.json"
    programs = [
        (Running("gateway", "gateway", 1, {"http_port": 8000}, 0), "fd00::1"),
        (Running("decode-0", "decode", 2, {"http_port": 4001}, 0), "10.0.0.7"),
        (Running("prefill-0", "prefill", 3, None, 0), "10.0.0.7"),
    ]
    write_targets(file, programs)
    assert json.loads(file.read_text()) == [
        {"targets": [target], "labels": {"job": "diptych", "role": role, "program": name}}
        for target, role, name in [
            ("[fd00::1]:8000", "gateway", "gateway"),
            ("10.0.0.7:4001", "decode", "decode-0"),
        ]
    ]
    assert list(tmp_path.iterdir()) == [file]
