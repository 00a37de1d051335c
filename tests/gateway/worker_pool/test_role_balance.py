"""Roles that follow the load: the wanted numbers, and the changes that come of them."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from gateway.attempt.types import TEXT_ROLES, Role
from gateway.worker_pool.role_balance import GAIN, HOLD_S, RoleBalancer, giving_role
from gateway.worker_pool.role_demand import (
    DecodeLoad,
    PrefillLoad,
    QueuedLoad,
    SloTargets,
    Wanted,
    wanted_workers,
)
from gateway.worker_pool.role_rules import RoleBounds, RoleView, other

IDLE_PREFILL = PrefillLoad(0.0, 0, 0.001)
IDLE_DECODE = DecodeLoad(0, 1000, 0, 64, 0.0)
TARGETS = SloTargets(2.0, 0.2)
NOTHING = QueuedLoad()


def fleet(prefill: int, decode: int, work: int = 0) -> list[RoleView]:
    return [RoleView(f"p{n}", Role.PREFILL, work=work) for n in range(prefill)] + [
        RoleView(f"d{n}", Role.DECODE, work=work) for n in range(decode)
    ]


def test_idle_workers_want_none() -> None:
    assert wanted_workers([IDLE_PREFILL] * 4, [IDLE_DECODE] * 4, NOTHING, TARGETS) == (0, 0)


def test_busy_prefill_with_a_backlog_wants_more() -> None:
    busy = replace(IDLE_PREFILL, busy_share=1.0, waiting_tokens=3000)
    wanted = wanted_workers([busy] * 2, [IDLE_DECODE] * 2, NOTHING, TARGETS)
    assert wanted.prefill == 2 / 0.8 + 6000 * 0.001 / 1.0
    assert wanted.decode == 0


def test_prompts_that_wait_for_blocks_want_no_prefill_worker() -> None:
    """Prefill workers that have nothing to compute hold prompts for which decode has no blocks."""
    waiting = replace(IDLE_PREFILL, waiting_tokens=50_000)
    full = replace(IDLE_DECODE, used_blocks=980, sequences=20)
    wanted = wanted_workers([waiting] * 2, [full] * 2, QueuedLoad(30, 60_000, 4000), TARGETS)
    assert wanted.prefill == 0
    assert wanted.decode > 5


def test_queue_counts_with_prefill_while_decode_has_room() -> None:
    busy = replace(IDLE_PREFILL, busy_share=0.9)
    queued = QueuedLoad(30, 10_000, 700)
    wanted = wanted_workers([busy] * 2, [IDLE_DECODE] * 2, queued, TARGETS)
    assert wanted.prefill > 10
    assert wanted.decode == 0


def test_decode_wants_by_blocks_places_and_steps() -> None:
    for load, expected in (
        (replace(IDLE_DECODE, used_blocks=450), 1.0),
        (replace(IDLE_DECODE, sequences=29, max_sequences=64), 2 * 29 / (0.9 * 64)),
        (replace(IDLE_DECODE, step_s=0.4), 4.0),
    ):
        assert abs(wanted_workers([IDLE_PREFILL], [load] * 2, NOTHING, TARGETS).decode - expected) < 1e-9


def test_short_role_takes_from_the_other_after_a_while() -> None:
    balancer, workers, wanted = RoleBalancer(RoleBounds()), fleet(4, 4), Wanted(2.0, 6.0)
    assert balancer.decide(wanted, workers, 0.0) is None
    assert balancer.decide(wanted, workers, HOLD_S - 0.1) is None
    assert balancer.decide(wanted, workers, HOLD_S) == "p0"


def test_burst_moves_nobody() -> None:
    balancer, workers = RoleBalancer(RoleBounds()), fleet(4, 4)
    for second in range(60):
        wanted = Wanted(2.0, 6.0) if second % 4 else Wanted(2.0, 2.0)
        assert balancer.decide(wanted, workers, float(second)) is None


def test_worker_with_the_least_work_goes() -> None:
    workers = [*fleet(4, 2, work=7), RoleView("d9", Role.DECODE, work=3)]
    balancer = RoleBalancer(RoleBounds(), hold_s=0)
    assert balancer.decide(Wanted(8.0, 1.0), workers, 1.0) == "d9"


def test_bounds_end_the_changes() -> None:
    balancer = RoleBalancer(RoleBounds(prefill=2), hold_s=0)
    assert balancer.decide(Wanted(0.0, 9.0), fleet(3, 5), 0.0) == "p0"
    assert balancer.decide(Wanted(0.0, 9.0), fleet(2, 6), 1.0) is None


def test_no_role_gives_while_none_is_short_or_both_are_alike() -> None:
    assert giving_role(Wanted(3.9, 0.1), fleet(4, 4)) is None
    assert giving_role(Wanted(9.0, 9.0), fleet(4, 4)) is None
    assert giving_role(Wanted(9.0, 9.0), fleet(1, 1)) is None
    assert giving_role(Wanted(9.0, 0.0), fleet(4, 0)) is None


needs = st.floats(0, 20)


@given(needs, needs, st.integers(1, 8), st.integers(1, 8))
def test_steady_load_comes_to_rest_and_never_turns_back(
    prefill: float, decode: float, have: int, others: int
) -> None:
    """With one need all the time, every change goes the same way, and lessens the worse shortage."""
    wanted, counts, first = Wanted(prefill, decode), {Role.PREFILL: have, Role.DECODE: others}, None
    need = {Role.PREFILL: prefill, Role.DECODE: decode}
    for _ in range(have + others):
        worst = max(need[role] / counts[role] for role in TEXT_ROLES)
        gives = giving_role(wanted, fleet(counts[Role.PREFILL], counts[Role.DECODE]))
        if gives is None:
            return
        assert first in (None, gives)
        first = gives
        counts[gives] -= 1
        counts[other(gives)] += 1
        assert min(counts.values()) >= 1
        assert max(need[role] / counts[role] for role in TEXT_ROLES) <= (1 - GAIN) * worst + 1e-9
    raise AssertionError("it never came to rest")
