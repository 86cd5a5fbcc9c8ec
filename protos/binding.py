"""Which addresses a server may bind: there is no transport security yet, so loopback unless told."""

import ipaddress
from typing import Self

from pydantic import Field, model_validator

from protos.settings import Settings


class Binding(Settings):
    """Where a server listens: loopback, or elsewhere with `insecure` said outright."""

    host: str = "127.0.0.1"
    port: int = Field(default=0, ge=0, le=65535)  # 0: any free one
    insecure: bool = False  # serve whoever reaches the host, unencrypted and, but for control calls, unasked

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches the host."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:  # a name, which may resolve to anything
            return False

    def address(self, port: int) -> str:
        """host:port as gRPC writes it."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        if not (self.is_loopback or self.insecure):
            raise ValueError(
                f"host is {self.host!r}; it must be a loopback address unless insecure is set: there is no "
                "encryption, and whoever reaches the host is served"
            )
        return self
