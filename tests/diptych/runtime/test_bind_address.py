import pytest

from diptych.runtime.bind_address import UnsafeBindError, is_loopback, join_host_port, require_safe_bind


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "localhost"])
def test_is_loopback_knows_addresses_of_this_machine(host: str) -> None:
    assert is_loopback(host)
    require_safe_bind(host, encrypted=False, insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", ""])
def test_the_world_needs_tls_or_the_operators_word(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(UnsafeBindError, match="--insecure"):
        require_safe_bind(host, encrypted=False, insecure=False)
    require_safe_bind(host, encrypted=True, insecure=False)
    require_safe_bind(host, encrypted=False, insecure=True)


def test_ipv6_gets_brackets() -> None:
    assert join_host_port("::1", 5) == "[::1]:5"
    assert join_host_port("127.0.0.1", 5) == "127.0.0.1:5"
