"""Tiers as settings name them, and the secret that is kept beside a disk tier."""

from __future__ import annotations

from pathlib import Path

import pytest

from diptych.runtime.kv_tier_specs import TierSpec, kept_secret, parse_tiers


def test_tiers_are_read_in_their_order() -> None:
    assert parse_tiers("") == ()
    assert parse_tiers("ram:1.5g, disk:/var/kv:100G") == (
        TierSpec("ram", 3 << 29),
        TierSpec("disk", 100 << 30, Path("/var/kv")),
    )
    assert parse_tiers("ram:1g,redis://host:6379/1") == (
        TierSpec("ram", 1 << 30),
        TierSpec("redis", 0, url="redis://host:6379/1"),
    )
    assert parse_tiers("redis://host,s3://bucket/a?size=2g")[1] == TierSpec(
        "s3", 2 << 30, url="s3://bucket/a?size=2g"
    )
    assert parse_tiers("s3://bucket") == (TierSpec("s3", 0, url="s3://bucket"),)
    assert "pass" not in repr(parse_tiers("redis://:pass@host/1"))
    assert parse_tiers("disk:C:/kv:20MiB") == (TierSpec("disk", 20 << 20, Path("C:/kv")),)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("tape:8g", "'tape:8g' is no tier"),
        ("ram", "is no size"),
        ("ram:8", "'8' is no size of at least 1m"),
        ("ram:0g", "is no size"),
        ("ram:/var:8g", "names a folder"),
        ("disk:8g", "names no folder"),
        ("disk:/var/kv:", "is no size"),
        ("disk:/a:1g,ram:1g", "the faster tier comes first"),
        ("redis://host,ram:1g", "the faster tier comes first"),
        ("redis://", "is redis://HOST"),
        ("s3://bucket,redis://host", "the faster tier comes first"),
        ("s3://bucket?size=2", "'2' is no size"),
        ("ram:1g,ram:2g", "names ram twice"),
    ],
)
def test_wrong_tier_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        parse_tiers(text)


def test_secret_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    specs = parse_tiers(f"ram:1g,disk:{tmp_path / 'kv'}:1g")
    first = kept_secret(specs)
    assert first is not None
    assert len(bytes.fromhex(first)) == 32
    assert kept_secret(specs) == first
    (file,) = (tmp_path / "kv").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600
    assert kept_secret(parse_tiers("ram:1g")) is None
