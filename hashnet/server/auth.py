"""Who may do what: the read and the write token, and the host names a local server responds to."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
from dataclasses import dataclass
from functools import lru_cache

from hashnet.errors import ConfigError
from hashnet.server.errors import ApiError

READ_TOKEN, WRITE_TOKEN = "HASHNET_TOKEN", "HASHNET_WRITE_TOKEN"


@dataclass(frozen=True)
class Access:
    """sha256 digests of the tokens, "" for none. The tokens themselves stay in the launcher.

    ``local_only``: a server on loopback without a read token responds to local host names alone, so
    that a web page from elsewhere cannot reach it through a name it controls (DNS rebinding).
    """

    read: str = ""
    write: str = ""
    local_only: bool = True

    @classmethod
    def of(cls, read: str = "", write: str = "", *, local_only: bool = True) -> Access:
        """The rules for these tokens."""
        return cls(_digest(read), _digest(write), local_only)

    @classmethod
    def from_environment(cls, host: str) -> Access:
        """The rules for the tokens of the environment; refuses to listen on ``host`` without one."""
        read, write = (os.environ.get(name, "").strip() for name in (READ_TOKEN, WRITE_TOKEN))
        mistakes = []
        if not is_loopback(host) and not read:
            mistakes.append(
                f"host={host} is reachable from other machines: set {READ_TOKEN} to a long random text "
                "(clients send it as a bearer token), or listen on host=127.0.0.1"
            )
        if read and read == write:
            mistakes.append(
                f"{READ_TOKEN} and {WRITE_TOKEN} are the same; readers could write: make them differ"
            )
        for name, value in ((READ_TOKEN, read), (WRITE_TOKEN, write)):
            if value and len(value) < 16:
                mistakes.append(
                    f"{name} has {len(value)} characters; use at least 16, for example openssl rand -hex 24"
                )
        if mistakes:
            raise ConfigError(mistakes)
        return cls.of(read, write, local_only=is_loopback(host) and not read)

    def check_host(self, host: str) -> None:
        """Refuses a Host header that is not a local name, where only those are served."""
        name = host.rsplit(":", 1)[0] if not host.endswith("]") else host
        if self.local_only and not is_loopback(name.strip("[]").lower()):
            raise ApiError("wrong_host", "this server responds only to its local name", 421)

    def check_token(self, authorization: str, write: bool) -> None:
        """Refuses an Authorization header that does not allow reading or, with ``write``, writing."""
        scheme, _, token = authorization.partition(" ")
        given = _digest(token.strip()) if scheme.lower() == "bearer" else ""
        may_write = bool(self.write) and hmac.compare_digest(given, self.write)
        if write:
            if not self.write:
                raise ApiError(
                    "writes_off", f"this server was started without a write token ({WRITE_TOKEN})", 403
                )
            if not may_write:
                status = 403 if given else 401
                raise ApiError("write_token_needed", "adding and removing need the write token", status)
        elif self.read and not (hmac.compare_digest(given, self.read) or may_write):
            raise ApiError("unauthorized", "send the token as: Authorization: Bearer TOKEN", 401)


@lru_cache(maxsize=100)
def is_loopback(host: str) -> bool:
    """Whether only this machine reaches the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest() if token else ""
