"""Whether a deployment that is up answers: asked before a request, which may take long for good reasons."""

import grpc

from cluster.deployment_state import DeploymentState
from protos import inference_pb2_grpc
from protos.inference_pb2 import GetModelInfoRequest, ModelInfo

ANSWER_SECONDS = 10.0


class NoAnswer(RuntimeError):
    """The sentence names the deployment and what to do."""


def require_answer(state: DeploymentState) -> ModelInfo:
    """What the deployment says that it serves. Raises NoAnswer when it says nothing."""
    with grpc.insecure_channel(state.address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        try:
            info: ModelInfo = inference_pb2_grpc.InferenceStub(channel).GetModelInfo(
                GetModelInfoRequest(), timeout=ANSWER_SECONDS
            )
            return info
        except grpc.RpcError as error:
            raise NoAnswer(
                f"The deployment {state.name!r} at {state.address} does not answer ({error.code().name}): see"
                f" `outrider ps`; `outrider down {state.name}` and `outrider up` start it anew."
            ) from error
