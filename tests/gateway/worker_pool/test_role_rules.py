"""The rules of role changes: which worker may leave its role."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.attempt.types import Role
from gateway.worker_pool.role_rules import RoleBounds, RoleView, objection, other, ready_workers

PREFILL = [RoleView("p0", Role.PREFILL), RoleView("p1", Role.PREFILL)]
DECODE = [RoleView("d0", Role.DECODE), RoleView("d1", Role.DECODE)]

fleets = st.lists(
    st.builds(
        RoleView,
        st.sampled_from(["a", "b", "c", "d", "e", "f"]),
        st.sampled_from(Role),
        ready=st.booleans(),
        can_change=st.booleans(),
        becomes=st.sampled_from([None, None, None, *Role]),
    ),
    unique_by=lambda view: view.worker_id,
)


def test_worker_may_change_while_its_role_keeps_one() -> None:
    assert objection([*PREFILL, *DECODE], "p0") == ""
    assert "the last ready worker" in objection([PREFILL[0], *DECODE], "p0")
    assert "the last ready worker" in objection([PREFILL[0], replace(PREFILL[1], ready=False), *DECODE], "p0")


def test_bounds_keep_more_than_one() -> None:
    workers = [*PREFILL, *DECODE]
    assert "one of the last 2 ready workers" in objection(workers, "p0", RoleBounds(prefill=2))
    assert objection(workers, "d0", RoleBounds(prefill=2)) == ""


def test_objections_name_their_reason() -> None:
    workers = [*PREFILL, *DECODE]
    assert "is not ready" in objection(workers, "nobody")
    assert "--auto-roles" in objection([replace(PREFILL[0], can_change=False), *workers[1:]], "p0")
    changing = replace(DECODE[0], ready=False, becomes=Role.PREFILL)
    assert "d0 is changing its role" in objection([*PREFILL, changing, DECODE[1]], "p0")


@given(fleets, st.sampled_from("abcdef"), st.integers(0, 3), st.integers(0, 3))
def test_no_change_that_the_rules_allow_empties_a_role(
    fleet: list[RoleView], worker_id: str, prefill: int, decode: int
) -> None:
    bounds = RoleBounds(prefill, decode)
    if objection(fleet, worker_id, bounds):
        return
    worker = next(one for one in fleet if one.worker_id == worker_id)
    left = [one for one in ready_workers(fleet, worker.role) if one is not worker]
    assert len(left) >= max(bounds.least(worker.role), 1)
    assert worker.ready
    assert worker.can_change
    assert not any(one.becomes for one in fleet)
    assert other(other(worker.role)) is worker.role
