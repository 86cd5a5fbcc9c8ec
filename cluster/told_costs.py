"""What the workers of a deployment tell of their passes, asked of its coordinator.

Knows the control service and its token. Does nothing with the costs.
"""

from dataclasses import dataclass

import grpc

from protos.authorization import metadata
from protos.control_pb2 import DeploymentStatus, GetDeploymentStatusRequest
from protos.control_pb2_grpc import ControlStub
from protos.pass_cost import PassCost

_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PassCosts:
    """What passes of both models take, at one moment."""

    draft: PassCost
    target: PassCost


def told_costs(address: str, control_token: str) -> PassCosts | None:
    """None while a worker of either role does not tell, or the coordinator does not answer."""
    with grpc.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            status: DeploymentStatus = ControlStub(channel).GetStatus(
                GetDeploymentStatusRequest(), timeout=_ANSWER_SECONDS, metadata=metadata(control_token)
            )
            told = {w.role: PassCost.from_message(w.cost) for w in status.workers if w.HasField("cost")}
        except (grpc.RpcError, ValueError):
            return None
    return PassCosts(told["draft"], told["target"]) if told.keys() >= {"draft", "target"} else None
