"""Rules for the addresses of images: which may be named, and which hosts are connected to."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from gateway.images.url_rules import RefusedUrl, Target, UrlRules, is_public

RULES = UrlRules(("Images.example.org", "*.cdn.test", "mine.test:8443"))


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://images.example.org/a.png", Target("https", "images.example.org", 443, "/a.png")),
        ("HTTP://IMAGES.EXAMPLE.ORG", Target("http", "images.example.org", 80, "/")),
        ("https://a.b.cdn.test?x=1#part", Target("https", "a.b.cdn.test", 443, "/?x=1")),
        ("http://mine.test:8443/%20", Target("http", "mine.test", 8443, "/%20")),
        ("https://images.example.org:443/", Target("https", "images.example.org", 443, "/")),
    ],
)
def test_an_allowed_url_is_taken_apart(url: str, target: Target) -> None:
    assert RULES.target(url) == target


@pytest.mark.parametrize(
    "url",
    [
        "https://example.org/a.png",
        "https://cdn.test/a.png",
        "https://notcdn.test/",
        "https://mine.test/a.png",
        "https://images.example.org:8443/a.png",
        "https://images.example.org:80/a.png",
        "https://images.example.org.evil.test/",
        "https://images.example.org@evil.test/",
        "https://evil.test\\@images.example.org/",
        "https://images.example.org\\.evil.test/",
        "https://images.example.org /",
        "https://images.example.org/a b",
        "https://images.example.org/a\r\nX: y",
        "https://images.example.org/\x00",
        "https://images.example.org./",
        "https://images.example.org:/",
        "https://images.example.org/" + "a" * 9000,
        "https:images.example.org/",
        "//images.example.org/",
        "ftp://images.example.org/",
        "https://ímages.example.org/",
        "",
    ],
)
def test_any_other_url_is_refused(url: str) -> None:
    with pytest.raises(RefusedUrl):
        RULES.target(url)


def test_any_host_may_be_allowed_at_its_own_port_and_no_address() -> None:
    rules = UrlRules(("*",))
    assert rules.target("https://any.test/x").host == "any.test"
    for url in (
        "https://any.test:8443/",
        "https://8.8.8.8/",
        "https://0x8.1/",
        "https://134744072/",
        "https://[2600::]/",
    ):
        with pytest.raises(RefusedUrl):
            rules.target(url)


def test_redirects_stay_within_a_host_and_its_security() -> None:
    rules = UrlRules(("a.test", "b.test"))
    first = rules.target("https://a.test/x/y?z")
    assert rules.redirected(first, "../w") == rules.target("https://a.test/w")
    assert rules.redirected(rules.target("http://a.test/x"), "https://a.test/x") == rules.target(
        "https://a.test/x"
    )
    for location in (
        "https://b.test/",
        "//b.test/",
        "http://a.test/x",
        "https://127.0.0.1/",
        "file:///etc/passwd",
        "//[",
    ):
        with pytest.raises(RefusedUrl):
            rules.redirected(first, location)


@pytest.mark.parametrize(
    "entry", ["127.0.0.1", "https://a.test", "a.test/x", "*.*.test", "a.test:0", "a.test:99999", "*:80"]
)
def test_an_entry_that_is_no_host_is_refused_by_its_name(entry: str) -> None:
    with pytest.raises(ValueError, match=r"must be \*, a host's name"):
        UrlRules((entry,))


PRIVATE = """
0.0.0.0 0.1.2.3 10.1.2.3 100.64.0.1 100.100.100.200 127.0.0.1 127.255.1.1 169.254.169.254
172.16.0.1 172.31.255.1 192.0.0.1 192.0.0.192 192.0.2.1 192.88.99.1 192.168.1.1 198.18.0.1
198.51.100.1 203.0.113.1 224.0.0.1 240.0.0.1 255.255.255.255 168.63.129.16 :: ::1 ::7f00:1
::ffff:127.0.0.1 ::ffff:8.8.8.8 64:ff9b::7f00:1 64:ff9b::808:808 64:ff9b:1::1 100::1 2001::1
2001:db8::1 2002:7f00:1:: 2002:808:808:: 3fff::1 fc00::1 fd00:ec2::254 fe80::1 fe80::1%1 fec0::1
ff02::1
"""


@pytest.mark.parametrize("address", PRIVATE.split())
def test_special_addresses_are_not_public(address: str) -> None:
    assert not is_public(ip_address(address))


@pytest.mark.parametrize(
    "address",
    ["1.1.1.1", "8.8.8.8", "172.32.0.1", "192.0.1.1", "2600::1", "2a00:1450::1", "2001:4860:4860::8888"],
)
def test_addresses_of_the_internet_are_public(address: str) -> None:
    assert is_public(ip_address(address))
