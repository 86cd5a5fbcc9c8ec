"""What a deployment is to run, and what it is once it serves: the messages between its owner and its keeper.

Knows names, numbers and addresses. Does not know Ray, processes or files.
"""

import secrets
from typing import Literal

from pydantic import Field

from cluster.actors import WorkerSettings
from cluster.deployment_state import WorkerAddress
from protos.limits import NumDraftTokens
from protos.settings import Settings


class Plan(Settings):
    """What runs in a deployment, private or staying."""

    target: WorkerSettings
    draft: WorkerSettings | None  # None: plain decoding
    num_targets: int = Field(default=1, ge=1)
    num_drafters: int = Field(default=1, ge=1)  # of no account without a draft
    num_draft_tokens: NumDraftTokens  # K of rounds unless a request says otherwise
    rule: Literal["token", "block"] = "token"
    port: int = Field(default=0, ge=0, le=65535)  # of the public service; 0: any free one
    control_token: str = Field(default_factory=lambda: secrets.token_hex(32), repr=False)

    def workers(self) -> list[tuple[str, Literal["target", "draft"], WorkerSettings]]:
        """Name, role and settings of each worker, targets first."""
        workers: list[tuple[str, Literal["target", "draft"], WorkerSettings]] = []
        workers += [(f"target-{i}", "target", self.target) for i in range(self.num_targets)]
        if self.draft is not None:
            workers += [(f"drafter-{i}", "draft", self.draft) for i in range(self.num_drafters)]
        return workers


class Deployed(Settings):
    """A deployment that serves."""

    address: str  # host:port of the public service
    control_token: str = Field(repr=False)
    workers: tuple[WorkerAddress, ...]  # targets first
    coordinator_pid: int
    ray_address: str  # host:port
