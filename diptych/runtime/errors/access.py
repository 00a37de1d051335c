"""Errors of a caller: no key, a key without the right, a key that has used up its bound."""

import grpc

from diptych.runtime.errors.base import DiptychError


class Unauthenticated(DiptychError):
    """Says what is missing, never what came."""

    code = grpc.StatusCode.UNAUTHENTICATED
    reason = "UNAUTHENTICATED"


class PermissionDenied(DiptychError):
    code = grpc.StatusCode.PERMISSION_DENIED
    reason = "PERMISSION_DENIED"


class QuotaExceeded(DiptychError):
    """A key has used up what it may; `quota` says which bound, as "600 requests a minute"."""

    code = grpc.StatusCode.RESOURCE_EXHAUSTED
    reason = "QUOTA_EXCEEDED"

    def __init__(self, key_name: str, quota: str, retry_after_s: float) -> None:
        super().__init__(f"this API key has at most {quota}", retry_after_s=retry_after_s)
        self.subject = f"key:{key_name}"
        self.quota = quota
