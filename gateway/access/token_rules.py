"""What a JSON Web Token must say to be taken."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Claims that a token needs."""

    issuer: str
    """Its `iss`."""
    audience: str
    """One of its `aud`."""
    tenant_claim: str
    """Name of the claim with the tenant's name."""
