"""The control token on a call: how callers show it, and how servers check it.

Knows call metadata and one shared secret; not which methods need it, nor where the secret is kept.
"""

import hmac
from collections.abc import Iterable

import grpc
from pydantic import SecretStr

from protos.status import TaskError

_KEY, _SCHEME = "authorization", "Bearer "


def metadata(token: str) -> tuple[tuple[str, str], ...]:
    """What a caller sends along to show the token."""
    return ((_KEY, _SCHEME + token),)


def require(token: SecretStr | None, shown: Iterable[tuple[str, str | bytes]] | None) -> None:
    """Let a call pass whose metadata shows the token; compared in constant time.

    Raises TaskError: PERMISSION_DENIED when there is no token, so that nobody may call, UNAUTHENTICATED when
    the call shows none or another.
    """
    if token is None:
        raise TaskError(grpc.StatusCode.PERMISSION_DENIED, "control calls are off: there is no control token")
    expected = (_SCHEME + token.get_secret_value()).encode()
    values = [value for key, value in shown or () if key == _KEY]
    given = values[0] if values else b""
    if not hmac.compare_digest(given.encode() if isinstance(given, str) else given, expected):
        raise TaskError(grpc.StatusCode.UNAUTHENTICATED, "the control token is missing or wrong")
