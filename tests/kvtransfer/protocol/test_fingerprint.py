"""Every field of the fingerprint counts, and survives the wire."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from kvtransfer.drivers.handshake import Fingerprint, incompatible_field
from tests.kvtransfer.conftest import FINGERPRINT


@pytest.mark.parametrize("field", [field.name for field in fields(Fingerprint)])
def test_a_difference_is_named(field):
    value = getattr(FINGERPRINT, field)
    other = replace(FINGERPRINT, **{field: value + ("x" if isinstance(value, str) else 1)})
    assert incompatible_field(FINGERPRINT, other) == field
    assert incompatible_field(Fingerprint.from_proto(other.to_proto()), other) is None


def test_every_field_of_the_protocol_is_compared():
    names = {field.name for field in FINGERPRINT.to_proto().DESCRIPTOR.fields}
    assert names == {field.name for field in fields(Fingerprint)}
