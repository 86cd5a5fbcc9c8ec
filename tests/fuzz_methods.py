"""Every method of the public, control and worker services: requests that it takes, and how it refuses others.

Knows messages and statuses; sends nothing.
"""

from dataclasses import dataclass

from google.protobuf.message import Message

from protos.control_pb2 import GetDeploymentStatusRequest, WatchRequest
from protos.inference_pb2 import (
    AbortRequest,
    Chat,
    ChatMessage,
    GenerateRequest,
    GetModelInfoRequest,
    TokenIds,
)
from protos.wire import PROTOCOL_VERSION, pack_tokens
from protos.worker_pb2 import GetStatusRequest, HandshakeRequest, Sampling, ScoreRequest

REFUSALS = frozenset({"INVALID_ARGUMENT", "FAILED_PRECONDITION", "ABORTED", "RESOURCE_EXHAUSTED"})
REFUSALS_OF_TASKS = REFUSALS | {"DATA_LOSS", "UNAVAILABLE", "DEADLINE_EXCEEDED"}  # damaged; at work; too late
REFUSALS_OF_CALLS = REFUSALS | {"NOT_FOUND", "OUT_OF_RANGE", "ALREADY_EXISTS"}
REFUSALS_OF_CALLS |= {"UNAUTHENTICATED", "PERMISSION_DENIED"}
STREAMS = {"draft": "Draft/Propose", "target": "Target/Verify"}

_PLAIN = Sampling(temperature=1.0, top_p=1.0)
_IDS = TokenIds(ids=[1, 2, 3])


@dataclass(frozen=True)
class Method:
    """A method that takes one request, and requests that it takes."""

    where: str  # "coordinator" or a role
    requests: tuple[Message, ...]
    is_stream: bool = False


METHODS = {
    "Inference/Generate": Method(
        "coordinator",
        (
            GenerateRequest(token_ids=_IDS, max_tokens=6, request_id="again", seed=1, rule="block"),
            GenerateRequest(
                token_ids=_IDS, max_tokens=6, n=3, temperature=0.7, top_k=4, top_p=0.9, min_p=0.1
            ),
            GenerateRequest(token_ids=_IDS, max_tokens=9, auto_draft_tokens=True, num_draft_tokens=5),
            GenerateRequest(text="abc", max_tokens=3, ignore_end_tokens=True),
            GenerateRequest(chat=Chat(messages=[ChatMessage(role="user", content="ab")] * 2), max_tokens=3),
        ),
        is_stream=True,
    ),
    "Inference/Abort": Method("coordinator", (AbortRequest(request_id="again"),)),
    "Inference/GetModelInfo": Method("coordinator", (GetModelInfoRequest(),)),
    "Control/GetStatus": Method("coordinator", (GetDeploymentStatusRequest(),)),
    "Control/Watch": Method("coordinator", (WatchRequest(),), is_stream=True),
    "Draft/Handshake": Method(
        "draft", (HandshakeRequest(protocol_version=PROTOCOL_VERSION, coordinator="c"),)
    ),
    "Draft/GetStatus": Method("draft", (GetStatusRequest(),)),
    "Target/Handshake": Method(
        "target", (HandshakeRequest(protocol_version=PROTOCOL_VERSION, coordinator="c"),)
    ),
    "Target/GetStatus": Method("target", (GetStatusRequest(),)),
    "Target/Score": Method(
        "target", (ScoreRequest(tokens=pack_tokens([1, 2, 3]), num_rows=2, sampling=_PLAIN),)
    ),
}
