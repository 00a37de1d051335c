"""How many connections each port takes, from few descriptors to many."""

import resource

import pytest

from diptych.runtime import descriptors
from diptych.runtime.descriptors import NEEDED, RESERVED, ConnectionLimits, connection_limits, shortage


def test_connection_limits_are_whole_where_there_are_descriptors_for_them() -> None:
    for number in (NEEDED, NEEDED + 1, 1 << 20, resource.RLIM_INFINITY):
        assert connection_limits(number) == ConnectionLimits()
        assert not connection_limits(number).constrained


@pytest.mark.parametrize("number", [128, 256, 1024, NEEDED - 1])
def test_connection_limits_leave_the_reserve(number: int) -> None:
    limits = connection_limits(number)
    assert limits.constrained
    assert limits.http + limits.spare + limits.grpc + limits.admin <= number - RESERVED + 16


def test_shortage_names_the_limit_and_the_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (256, 256))
    assert "only 256 open files" in shortage()
    assert str(NEEDED) in shortage()
    monkeypatch.setattr(descriptors.resource, "getrlimit", lambda _: (NEEDED, NEEDED))
    assert shortage() == ""
