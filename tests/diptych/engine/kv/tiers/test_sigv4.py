"""Signatures beside the examples that Amazon publishes for S3."""

from __future__ import annotations

from datetime import datetime

import pytest

from diptych.engine.kv.tiers.sigv4 import Credentials, canonical_path, canonical_query, signed_headers

KEYS = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
HOST = {"host": "examplebucket.s3.amazonaws.com"}
PUT = {**HOST, "date": "Fri, 24 May 2013 00:00:00 GMT", "x-amz-storage-class": "REDUCED_REDUNDANCY"}
Example = tuple[str, str, list[tuple[str, str]], dict[str, str], bytes, str]
GET_OBJECT: Example = (
    "GET",
    "/test.txt",
    [],
    {**HOST, "range": "bytes=0-9"},
    b"",
    "f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41",
)


def signature(
    method: str,
    path: str,
    query: list[tuple[str, str]],
    headers: dict[str, str],
    payload: bytes,
    keys: Credentials = KEYS,
) -> str:
    signed = signed_headers(
        method,
        canonical_path(path),
        canonical_query(query),
        headers,
        payload,
        credentials=keys,
        region="us-east-1",
        now=datetime(2013, 5, 24),
    )
    return signed["authorization"].rpartition("Signature=")[2]


@pytest.mark.parametrize(
    ("method", "path", "query", "headers", "payload", "published"),
    [
        GET_OBJECT,
        (
            "PUT",
            "/test$file.text",
            [],
            PUT,
            b"Welcome to Amazon S3.",
            "98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd",
        ),
        (
            "GET",
            "/",
            [("lifecycle", "")],
            HOST,
            b"",
            "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
        ),
        (
            "GET",
            "/",
            [("prefix", "J"), ("max-keys", "2")],
            HOST,
            b"",
            "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
        ),
    ],
)
def test_signature_is_the_published_one(
    method: str,
    path: str,
    query: list[tuple[str, str]],
    headers: dict[str, str],
    payload: bytes,
    published: str,
) -> None:
    assert signature(method, path, query, headers, payload) == published


def test_another_secret_or_a_session_gives_another_signature() -> None:
    method, path, _, headers, payload, published = GET_OBJECT
    for keys in (Credentials(KEYS.access_key, "x"), Credentials(KEYS.access_key, KEYS.secret_key, "token")):
        assert signature(method, path, [], headers, payload, keys) != published
    assert "wJalr" not in repr(KEYS)
