"""Which outages of the directory the log hears of, and in what words."""

import pytest
from redis._parsers.base import BaseParser
from redis.exceptions import AuthenticationError, ConnectionError, TimeoutError

from diptych.runtime.discovery.outage_log import OutageLog, without_login

URL = "redis://name:hidden@host:6379/0"


def test_the_first_outage_says_where_and_what_to_do() -> None:
    outages = OutageLog(URL)
    said = outages.failed(ConnectionError("hidden"), 0.0)
    assert said.startswith("the directory at redis://host:6379/0 does not answer (ConnectionError)")
    assert said.endswith(": start one, or give --redis-url")
    assert outages.failed(ConnectionError(), 100.0) == "", "the same outage"


def test_who_refuses_the_login_needs_no_second_server() -> None:
    said = OutageLog(URL).failed(AuthenticationError("hidden"), 0.0)
    assert (
        said
        == "the directory at redis://host:6379/0 refuses this login: give its password in DIPTYCH_REDIS_URL"
    )


@pytest.mark.parametrize(
    ("reply", "cause", "remedy"),
    [
        ("OOM command not allowed when used memory > 'maxmemory'.", "no memory left", "maxmemory"),
        ("NOPERM User x has no permissions to run the 'set' command", "forbids", "ACL"),
        ("READONLY You can't write against a read only replica.", "read-only replica", "primary"),
        ("MISCONF Valkey is configured to save RDB snapshots, but", "cannot save", "stop-writes-on-bgsave"),
        ("LOADING Valkey is loading the dataset in memory", "still reads", "wait"),
        ("NOAUTH Authentication required.", "refuses this login", "password"),
        ("WRONGPASS invalid username-password pair or user is disabled.", "refuses this login", "password"),
        ("MASTERDOWN Link with MASTER is down", "without its primary", "primary"),
        ("NOREPLICAS Not enough good replicas to write.", "too few replicas", "min-replicas-to-write"),
        ("CLUSTERDOWN Hash slot not served", "cluster", "without cluster mode"),
        ("MOVED 3999 127.0.0.1:6381", "cluster", "without cluster mode"),
        ("WRONGTYPE Operation against a key holding the wrong kind of value", "other data", "of its own"),
        ("ERR max number of clients reached", "no connection left", "maxclients"),
        ("ERR something else", "answers with an error", "something else"),
    ],
)
def test_error_replies_are_told_with_cause_and_remedy(reply: str, cause: str, remedy: str) -> None:
    outages = OutageLog(URL)
    error = BaseParser.parse_error(reply)
    said = outages.failed(error, 0.0)
    assert cause in said
    assert remedy in said
    assert "does not answer" not in said
    assert "hidden" not in said
    outages.answered()
    assert outages.cause == ""


def test_another_error_reply_is_told_at_once() -> None:
    outages = OutageLog(URL)
    assert outages.failed(BaseParser.parse_error("LOADING x"), 0.0)
    assert "no memory" in outages.failed(BaseParser.parse_error("OOM x"), 1.0)
    assert not outages.failed(BaseParser.parse_error("OOM x"), 2.0)
    assert outages.cause.endswith("has no memory left for writes")


def test_a_login_that_is_refused_is_told_after_a_server_that_was_not_there() -> None:
    outages = OutageLog(URL)
    assert outages.failed(ConnectionError(), 0.0)
    assert "refuses this login" in outages.failed(AuthenticationError(), 5.0)
    assert not outages.failed(AuthenticationError(), 6.0)
    assert not outages.failed(ConnectionError(), 7.0)


def test_the_first_answer_is_told_and_so_is_the_end_of_an_outage() -> None:
    outages = OutageLog(URL)
    assert outages.answered()
    assert outages.failed(TimeoutError(), 1.0).endswith("does not answer (TimeoutError)")
    assert outages.answered()
    assert not outages.answered()


def test_outages_of_a_moment_are_told_once_a_minute() -> None:
    outages = OutageLog(URL)
    outages.answered()
    told: list[tuple[int, str]] = []
    ends = 0
    for second in range(0, 122, 2):
        if said := outages.failed(TimeoutError(), second):
            told.append((second, said))
        assert not outages.failed(TimeoutError(), second + 0.5)
        ends += outages.answered()
    assert [second for second, _ in told] == [0, 60, 120]
    assert told[1][1].endswith("(TimeoutError, 30 times since this was last said)")
    assert ends == 3


def test_a_long_outage_is_told_soon_after_another_one() -> None:
    outages = OutageLog(URL)
    outages.failed(TimeoutError(), 0.0)
    outages.answered()
    assert not outages.failed(TimeoutError(), 1.0)
    assert not outages.failed(TimeoutError(), 5.9)
    assert outages.failed(TimeoutError(), 6.0)
    assert outages.answered()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host", "redis://host"),
        ("rediss://:hidden@[::1]:1/2?password=hidden", "rediss://[::1]:1/2"),
        ("unix://:hidden@/run/redis.sock?db=1", "unix:///run/redis.sock"),
    ],
)
def test_no_url_is_shown_with_its_login(url: str, shown: str) -> None:
    assert without_login(url) == shown
