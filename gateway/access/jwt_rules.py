"""Rules for the claims of JSON Web Tokens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class JwtRules:
    """Claims that a token needs."""

    issuer: str
    """Issuer, its `iss`."""
    audience: str
    """Audience, one of its `aud`."""
    tenant_claim: str
    """Name of the claim with the tenant's name."""
