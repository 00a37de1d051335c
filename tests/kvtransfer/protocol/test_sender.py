"""Single transitions of the prefill side that the random walks reach but do not name."""

from __future__ import annotations

import pytest

from kvtransfer.protocol.messages import (
    GrantDenied,
    GrantReceived,
    GrantRef,
    GrantRevoked,
    LinkLost,
    SendAsk,
    SendCommit,
    SendStopped,
    SendWithdrawal,
)
from kvtransfer.protocol.sender import Sender

KEY = ("r", 1)
REF = GrantRef(KEY, 0, 5)


def asking() -> Sender:
    sender = Sender()
    sender.link_up()
    assert sender.ask(KEY) == [SendAsk(KEY)]
    return sender


def writing() -> Sender:
    sender = asking()
    assert sender.granted(REF, [1, 2], 0) == [GrantReceived(REF, (1, 2), 0)]
    assert sender.start_writing(KEY)
    return sender


def test_commit_ends_the_attempt():
    sender = writing()
    assert sender.commit(REF, 6, (9,), "note") == (True, [SendCommit(REF, 6, (9,), "note")])
    assert sender.held_grants() == []
    assert sender.stop(REF) == []


def test_abort_is_answered_once_the_owner_stops():
    sender = writing()
    assert sender.abort(REF) == [GrantRevoked(REF)]
    assert sender.abort(REF) == []
    assert sender.push(REF, 0, 1) == []
    assert sender.stop(REF) == [SendStopped(REF)]


def test_commit_of_a_revoked_grant_sends_stopped():
    sender = writing()
    sender.abort(REF)
    assert sender.commit(REF, 6, (9,)) == (False, [SendStopped(REF)])


def test_abort_of_an_untouched_grant_is_answered_at_once():
    sender = asking()
    sender.granted(REF, [1, 2], 0)
    assert sender.abort(REF) == [SendStopped(REF), GrantDenied(KEY, None, "the blocks were taken back")]
    assert not sender.start_writing(KEY)


def test_grant_that_crosses_a_withdrawal_is_sent_back():
    sender = asking()
    assert sender.withdraw(KEY) == [SendWithdrawal(KEY)]
    assert sender.granted(REF, [1, 2], 0) == [SendStopped(REF)]


def test_abort_of_an_unknown_grant_sends_stopped():
    assert Sender().abort(REF) == [SendStopped(REF)]


def test_link_lost_orphans_grants_until_the_owner_stops():
    sender = writing()
    sender.ask(("other", 1))
    assert sender.link_lost() == [LinkLost((("other", 1),), (REF,))]
    sender.link_up()
    assert sender.abort(REF) == [], "still being written: no promise yet"
    assert sender.stop(REF) == [SendStopped(REF)]


def test_stop_without_a_link_is_sent_on_the_next_abort():
    sender = writing()
    sender.link_lost()
    assert sender.stop(REF) == []
    sender.link_up()
    assert sender.abort(REF) == [SendStopped(REF)]


def test_second_ask_raises():
    sender = asking()
    with pytest.raises(ValueError, match="already"):
        sender.ask(KEY)
