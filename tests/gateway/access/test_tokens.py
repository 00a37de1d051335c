"""Tokens as credentials: what is taken, what is refused and why, and how keys are rotated."""

from __future__ import annotations

import base64
import hmac
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from diptych.runtime import file_watch
from diptych.runtime.errors import PermissionDenied, Unauthenticated
from diptych.runtime.settings_sources import BadSettings
from gateway.access import jwks
from gateway.access.access import Access
from gateway.access.jwks import FileKeys, UrlKeys
from gateway.access.jwt_rules import JwtRules
from gateway.access.key_file import Scope
from gateway.access.token_verifier import TokenVerifier
from gateway.config import GatewaySettings
from gateway.model.served_model import ServedModel
from tests.gateway.access.keys import Keys, bearer
from tests.gateway.access.locked_gateway import OUTPUT, completion, failure
from tests.gateway.access.locked_gateway import http as ask
from tests.gateway.failing_calls import told
from tests.gateway.running_gateway import running
from tests.gateway.scripted_workers import ScriptedDecode, ScriptedPrefill, answering

ISSUER, AUDIENCE = "https://login.example", "diptych"
RULES = JwtRules(ISSUER, AUDIENCE, "tenant")


class Signer:
    """Provider with one key."""

    def __init__(self, kid: str = "k1") -> None:
        self.kid, self.key = kid, ec.generate_private_key(ec.SECP256R1())

    def token(self, key: Any = None, alg: str = "ES256", **claims: Any) -> str:
        said = {"iss": ISSUER, "aud": AUDIENCE, "sub": "u1", "tenant": "acme", "exp": time.time() + 60}
        said = {name: value for name, value in {**said, **claims}.items() if value is not None}
        return jwt.encode(said, key or self.key, algorithm=alg, headers={"kid": self.kid})

    @property
    def jwk(self) -> dict[str, Any]:
        public = jwt.get_algorithm_by_name("ES256").to_jwk(self.key.public_key(), as_dict=True)
        return {**public, "kid": self.kid, "use": "sig", "alg": "ES256"}


def write_jwks(path: Path, *signers: Signer) -> None:
    fresh = path.with_suffix(".new")
    fresh.write_text(json.dumps({"keys": [one.jwk for one in signers]}))
    fresh.rename(path)


def shared_secret_token(secret: bytes, claims: str) -> str:
    """Sign with the public key as if it were a shared secret; PyJWT refuses to."""
    header = base64.urlsafe_b64encode(b'{"alg":"HS256","kid":"k1"}').decode().rstrip("=")
    signature = hmac.digest(secret, f"{header}.{claims}".encode(), "sha256")
    return f"{header}.{claims}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


@pytest.fixture
def signer() -> Signer:
    return Signer()


@pytest.fixture
def access(signer: Signer, tmp_path: Path) -> Access:
    write_jwks(tmp_path / "jwks.json", signer)
    return Access(None, TokenVerifier(FileKeys(tmp_path / "jwks.json"), RULES))


def test_token_says_tenant_subject_and_scopes(access: Access, signer: Signer) -> None:
    token = signer.token()
    for _ in range(2):  # the second time from memory
        caller = access.caller(f"Bearer {token}", Scope.INFERENCE)
        assert (caller.tenant, caller.quota_usage.name) == ("acme", "jwt:u1")
    with pytest.raises(PermissionDenied, match="lacks the scope admin"):
        access.caller(f"Bearer {token}", Scope.ADMIN)
    operator = signer.token(scope="openid diptych:admin")
    assert access.caller(f"Bearer {operator}", Scope.ADMIN).tenant == "acme"
    for scopes in ({"scope": "openid diptych:admin"}, {"scp": ["admin"]}, {"scope": ""}):
        with pytest.raises(PermissionDenied, match="lacks the scope inference"):
            access.caller(f"Bearer {signer.token(**scopes)}", Scope.INFERENCE)
    assert access.tenants() == 1


@pytest.mark.parametrize(
    ("claims", "why"),
    [
        ({"exp": 1}, "has expired"),
        ({"exp": None}, "MissingRequiredClaim"),
        ({"aud": "other"}, "another audience"),
        ({"aud": None}, "MissingRequiredClaim"),
        ({"iss": "https://evil.example"}, "another issuer"),
        ({"sub": None}, "MissingRequiredClaim"),
        ({"tenant": None}, "claim tenant"),
        ({"tenant": "a b"}, "claim tenant"),
        ({"tenant": ["acme"]}, "claim tenant"),
        ({"nbf": time.time() + 3600}, "ImmatureSignature"),
    ],
)
def test_token_with_a_wrong_claim_is_refused(
    claims: dict[str, Any], why: str, access: Access, signer: Signer
) -> None:
    with pytest.raises(Unauthenticated, match=why):
        access.caller(f"Bearer {signer.token(**claims)}", Scope.INFERENCE)


def test_token_that_the_provider_did_not_sign_is_refused(access: Access, signer: Signer) -> None:
    def refused(token: str) -> str:
        with pytest.raises(Unauthenticated) as caught:
            access.caller(f"Bearer {token}", Scope.INFERENCE)
        assert token not in str(caught.value)
        return str(caught.value)

    assert "InvalidSignature" in refused(signer.token(Signer().key))
    assert "not known here" in refused(Signer("k2").token())
    header, claims, _ = signer.token().split(".")
    unsigned = base64.urlsafe_b64encode(b'{"alg":"none","kid":"k1"}').decode().rstrip("=")
    assert "another algorithm" in refused(f"{unsigned}.{claims}.")
    public = signer.key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    assert "another algorithm" in refused(shared_secret_token(public, claims))
    rsa_key = rsa.generate_private_key(65537, 2048)
    assert "another algorithm" in refused(signer.token(rsa_key, alg="RS256"))
    assert "not valid" in refused("a.b.c")
    assert "too long" in refused(f"{header}.{'A' * 10_000}.x")
    access.caller(f"Bearer {signer.token()}", Scope.INFERENCE)  # the control


def test_rotated_keys_of_a_file_are_read_and_old_tokens_end_with_their_key(
    signer: Signer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fresh = tmp_path / "jwks.json", Signer("k2")
    write_jwks(path, signer)
    at_once = {"every_s": 0.0, "clock": time.monotonic}
    monkeypatch.setattr(file_watch.FileWatch.__init__, "__kwdefaults__", at_once)
    access = Access(None, TokenVerifier(FileKeys(path), RULES))
    old, new = (f"Bearer {one.token()}" for one in (signer, fresh))
    access.caller(old, Scope.INFERENCE)
    with pytest.raises(Unauthenticated, match="not known"):
        access.caller(new, Scope.INFERENCE)
    write_jwks(path, signer, fresh)
    for one in (old, new):
        access.caller(one, Scope.INFERENCE)
    path.write_text("{}")
    access.caller(new, Scope.INFERENCE)  # a bad file changes nothing
    write_jwks(path, fresh)
    access.caller(new, Scope.INFERENCE)
    with pytest.raises(Unauthenticated, match="not known"):
        access.caller(old, Scope.INFERENCE)


@pytest.fixture
def provider() -> Iterator[tuple[str, dict[str, Any]]]:
    """Address of a server, and what it answers by path."""
    pages: dict[str, Any] = {}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = pages.get(self.path)
            self.send_response(404 if found is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(found).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", pages
    server.shutdown()
    server.server_close()


def test_keys_are_found_by_discovery_and_again_when_a_token_names_another(
    provider: tuple[str, dict[str, Any]], signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "RETRY_S", 0.05)
    url, pages = provider
    keys = UrlKeys(url, discover=True)
    access = Access(None, TokenVerifier(keys, JwtRules(url, AUDIENCE, "tenant")))
    fresh = Signer("k2")

    def taken(by: Signer) -> bool:
        try:
            access.caller(f"Bearer {by.token(iss=url)}", Scope.INFERENCE)
        except Unauthenticated:
            return False
        return True

    def eventually(by: Signer) -> None:
        until = time.monotonic() + 30
        while not taken(by):
            assert time.monotonic() < until
            time.sleep(0.02)

    try:
        assert not taken(signer)  # the provider does not answer yet
        pages["/jwks"] = {"keys": [signer.jwk]}
        pages[jwks.DISCOVERY] = {"issuer": "https://other.example", "jwks_uri": f"{url}/jwks"}
        time.sleep(0.3)
        assert not taken(signer)
        pages[jwks.DISCOVERY] = {"issuer": url, "jwks_uri": f"{url}/jwks"}
        eventually(signer)
        pages["/jwks"] = {"keys": [signer.jwk, fresh.jwk]}
        eventually(fresh)
        pages.clear()
        assert taken(signer)
    finally:
        keys.close()


def test_key_that_is_wanted_soon_after_a_reading_is_read_without_another_token(
    provider: tuple[str, dict[str, Any]], signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jwks, "RETRY_S", 0.5)
    url, pages = provider
    pages["/jwks"] = {"keys": [signer.jwk]}
    keys = UrlKeys(f"{url}/jwks")

    def until(names: set[str]) -> None:
        end = time.monotonic() + 20
        while set(keys.current()) != names:
            assert time.monotonic() < end
            time.sleep(0.01)

    try:
        until({"k1"})
        pages["/jwks"] = {"keys": [signer.jwk, Signer("k2").jwk]}
        keys.want()
        until({"k1", "k2"})
    finally:
        keys.close()


async def test_gateway_takes_keys_and_tokens_over_http_and_grpc(
    bundled: ServedModel, redis_url: str, tmp_path: Path, signer: Signer
) -> None:
    keys = Keys(tmp_path / "keys.jsonl")
    key = keys.add("acme")
    write_jwks(tmp_path / "jwks.json", signer)
    settings: dict[str, Any] = {"api_keys_file": keys.path, "jwt_issuer": ISSUER, "jwt_audience": AUDIENCE}
    settings["jwt_jwks"] = str(tmp_path / "jwks.json")
    decode = ScriptedDecode(answering(OUTPUT))
    async with running(bundled, redis_url, ScriptedPrefill(), decode, **settings) as stack:
        for credential in (key, signer.token()):
            assert (await ask(stack, "/v1/completions", credential, completion(stack)))[0] == 200
            await stack.stub.Generate(stack.request(), metadata=bearer(credential))
        expired = signer.token(exp=1)
        assert (await ask(stack, "/v1/completions", expired, completion(stack)))[0] == 401
        error = told(await failure(stack.stub.Generate(stack.request(), metadata=bearer(expired))))
        assert error.reason == "UNAUTHENTICATED"


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (["--jwt-issuer=https://a.example"], "--jwt-issuer and --jwt-audience go together"),
        (["--jwt-jwks=/nowhere"], "--jwt-jwks goes with --jwt-issuer"),
        (["--jwt-issuer=a", "--jwt-audience=b", "--jwt-jwks=/nowhere"], "cannot read /nowhere"),
        (["--jwt-issuer=http://a.example", "--jwt-audience=b"], "must be an https URL"),
        (["--jwt-issuer=a", "--jwt-audience=b", "--jwt-jwks=http://a.example/k"], "must be an https URL"),
    ],
)
def test_settings_that_no_token_could_fit_are_refused(flags: list[str], why: str) -> None:
    with pytest.raises(BadSettings, match=why):
        GatewaySettings.read_argv(flags)
