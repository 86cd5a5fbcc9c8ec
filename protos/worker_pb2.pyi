from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Encoding(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ENCODING_UNSPECIFIED: _ClassVar[Encoding]
    ENCODING_SPARSE: _ClassVar[Encoding]
    ENCODING_FULL: _ClassVar[Encoding]
    ENCODING_ONE_HOT: _ClassVar[Encoding]

class Rule(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RULE_UNSPECIFIED: _ClassVar[Rule]
    RULE_TOKEN: _ClassVar[Rule]
    RULE_BLOCK: _ClassVar[Rule]
ENCODING_UNSPECIFIED: Encoding
ENCODING_SPARSE: Encoding
ENCODING_FULL: Encoding
ENCODING_ONE_HOT: Encoding
RULE_UNSPECIFIED: Rule
RULE_TOKEN: Rule
RULE_BLOCK: Rule

class HandshakeRequest(_message.Message):
    __slots__ = ("protocol_version", "coordinator")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    coordinator: str
    def __init__(self, protocol_version: _Optional[int] = ..., coordinator: _Optional[str] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("protocol_version", "epoch", "model", "vocab_size", "tokenizer_fingerprint", "max_length", "end_token_ids", "dtype", "num_slots", "task_credits", "byte_credits", "computes_on")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    TASK_CREDITS_FIELD_NUMBER: _ClassVar[int]
    BYTE_CREDITS_FIELD_NUMBER: _ClassVar[int]
    COMPUTES_ON_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    epoch: int
    model: str
    vocab_size: int
    tokenizer_fingerprint: str
    max_length: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    num_slots: int
    task_credits: int
    byte_credits: int
    computes_on: str
    def __init__(self, protocol_version: _Optional[int] = ..., epoch: _Optional[int] = ..., model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., tokenizer_fingerprint: _Optional[str] = ..., max_length: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., num_slots: _Optional[int] = ..., task_credits: _Optional[int] = ..., byte_credits: _Optional[int] = ..., computes_on: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("epoch", "num_slots", "num_slots_used", "num_tasks", "process_id", "cost", "num_broken_rows", "busy", "prefixes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    NUM_BROKEN_ROWS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    num_slots: int
    num_slots_used: int
    num_tasks: int
    process_id: int
    cost: PassCost
    num_broken_rows: int
    busy: BusyTime
    prefixes: PrefixCache
    def __init__(self, epoch: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_slots_used: _Optional[int] = ..., num_tasks: _Optional[int] = ..., process_id: _Optional[int] = ..., cost: _Optional[_Union[PassCost, _Mapping]] = ..., num_broken_rows: _Optional[int] = ..., busy: _Optional[_Union[BusyTime, _Mapping]] = ..., prefixes: _Optional[_Union[PrefixCache, _Mapping]] = ...) -> None: ...

class BusyTime(_message.Message):
    __slots__ = ("serving_seconds", "busy_seconds", "num_passes", "num_rows", "recent_share")
    SERVING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    BUSY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    NUM_PASSES_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    RECENT_SHARE_FIELD_NUMBER: _ClassVar[int]
    serving_seconds: float
    busy_seconds: float
    num_passes: int
    num_rows: int
    recent_share: float
    def __init__(self, serving_seconds: _Optional[float] = ..., busy_seconds: _Optional[float] = ..., num_passes: _Optional[int] = ..., num_rows: _Optional[int] = ..., recent_share: _Optional[float] = ...) -> None: ...

class PrefixCache(_message.Message):
    __slots__ = ("num_prefills", "num_hits", "num_prefill_tokens", "num_cached_tokens")
    NUM_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    NUM_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    num_prefills: int
    num_hits: int
    num_prefill_tokens: int
    num_cached_tokens: int
    def __init__(self, num_prefills: _Optional[int] = ..., num_hits: _Optional[int] = ..., num_prefill_tokens: _Optional[int] = ..., num_cached_tokens: _Optional[int] = ...) -> None: ...

class PassCost(_message.Message):
    __slots__ = ("rows", "seconds", "seconds_per_position", "seconds_per_sequence")
    ROWS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    SECONDS_PER_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedScalarFieldContainer[int]
    seconds: _containers.RepeatedScalarFieldContainer[float]
    seconds_per_position: float
    seconds_per_sequence: float
    def __init__(self, rows: _Optional[_Iterable[int]] = ..., seconds: _Optional[_Iterable[float]] = ..., seconds_per_position: _Optional[float] = ..., seconds_per_sequence: _Optional[float] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("tokens", "num_rows", "sampling")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROWS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    num_rows: int
    sampling: Sampling
    def __init__(self, tokens: _Optional[bytes] = ..., num_rows: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[ProbabilityRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[ProbabilityRow, _Mapping]]] = ...) -> None: ...

class ProbabilityRow(_message.Message):
    __slots__ = ("ids", "probabilities")
    IDS_FIELD_NUMBER: _ClassVar[int]
    PROBABILITIES_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    probabilities: bytes
    def __init__(self, ids: _Optional[bytes] = ..., probabilities: _Optional[bytes] = ...) -> None: ...

class TaskBatch(_message.Message):
    __slots__ = ("generation", "tasks", "released_sessions", "echo")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    TASKS_FIELD_NUMBER: _ClassVar[int]
    RELEASED_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    generation: int
    tasks: _containers.RepeatedCompositeFieldContainer[Sealed]
    released_sessions: _containers.RepeatedScalarFieldContainer[str]
    echo: int
    def __init__(self, generation: _Optional[int] = ..., tasks: _Optional[_Iterable[_Union[Sealed, _Mapping]]] = ..., released_sessions: _Optional[_Iterable[str]] = ..., echo: _Optional[int] = ...) -> None: ...

class ReplyBatch(_message.Message):
    __slots__ = ("generation", "replies", "cost", "echo")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    REPLIES_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    ECHO_FIELD_NUMBER: _ClassVar[int]
    generation: int
    replies: _containers.RepeatedCompositeFieldContainer[Sealed]
    cost: PassCost
    echo: int
    def __init__(self, generation: _Optional[int] = ..., replies: _Optional[_Iterable[_Union[Sealed, _Mapping]]] = ..., cost: _Optional[_Union[PassCost, _Mapping]] = ..., echo: _Optional[int] = ...) -> None: ...

class Sealed(_message.Message):
    __slots__ = ("task_id", "body", "crc32c")
    TASK_ID_FIELD_NUMBER: _ClassVar[int]
    BODY_FIELD_NUMBER: _ClassVar[int]
    CRC32C_FIELD_NUMBER: _ClassVar[int]
    task_id: int
    body: bytes
    crc32c: int
    def __init__(self, task_id: _Optional[int] = ..., body: _Optional[bytes] = ..., crc32c: _Optional[int] = ...) -> None: ...

class SessionState(_message.Message):
    __slots__ = ("session", "epoch", "round", "base_length", "start", "start_hash", "tokens", "timeout_ns")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    BASE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    START_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_NS_FIELD_NUMBER: _ClassVar[int]
    session: str
    epoch: int
    round: int
    base_length: int
    start: int
    start_hash: int
    tokens: bytes
    timeout_ns: int
    def __init__(self, session: _Optional[str] = ..., epoch: _Optional[int] = ..., round: _Optional[int] = ..., base_length: _Optional[int] = ..., start: _Optional[int] = ..., start_hash: _Optional[int] = ..., tokens: _Optional[bytes] = ..., timeout_ns: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_k", "top_p", "min_p")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    def __init__(self, temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ...) -> None: ...

class DraftTask(_message.Message):
    __slots__ = ("state", "num_draft_tokens", "sampling", "draft_key", "choice", "encoding", "support", "vocab_size")
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KEY_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    ENCODING_FIELD_NUMBER: _ClassVar[int]
    SUPPORT_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    state: SessionState
    num_draft_tokens: int
    sampling: Sampling
    draft_key: bytes
    choice: int
    encoding: Encoding
    support: int
    vocab_size: int
    def __init__(self, state: _Optional[_Union[SessionState, _Mapping]] = ..., num_draft_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., draft_key: _Optional[bytes] = ..., choice: _Optional[int] = ..., encoding: _Optional[_Union[Encoding, str]] = ..., support: _Optional[int] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class Proposal(_message.Message):
    __slots__ = ("tokens", "rows")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    rows: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., rows: _Optional[bytes] = ...) -> None: ...

class QRows(_message.Message):
    __slots__ = ("rows",)
    ROWS_FIELD_NUMBER: _ClassVar[int]
    rows: _containers.RepeatedCompositeFieldContainer[QRow]
    def __init__(self, rows: _Optional[_Iterable[_Union[QRow, _Mapping]]] = ...) -> None: ...

class QRow(_message.Message):
    __slots__ = ("sparse", "full", "one_hot")
    SPARSE_FIELD_NUMBER: _ClassVar[int]
    FULL_FIELD_NUMBER: _ClassVar[int]
    ONE_HOT_FIELD_NUMBER: _ClassVar[int]
    sparse: SparseRow
    full: FullRow
    one_hot: OneHotRow
    def __init__(self, sparse: _Optional[_Union[SparseRow, _Mapping]] = ..., full: _Optional[_Union[FullRow, _Mapping]] = ..., one_hot: _Optional[_Union[OneHotRow, _Mapping]] = ...) -> None: ...

class SparseRow(_message.Message):
    __slots__ = ("ids", "counts")
    IDS_FIELD_NUMBER: _ClassVar[int]
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    ids: bytes
    counts: bytes
    def __init__(self, ids: _Optional[bytes] = ..., counts: _Optional[bytes] = ...) -> None: ...

class FullRow(_message.Message):
    __slots__ = ("counts",)
    COUNTS_FIELD_NUMBER: _ClassVar[int]
    counts: bytes
    def __init__(self, counts: _Optional[bytes] = ...) -> None: ...

class OneHotRow(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class VerifyTask(_message.Message):
    __slots__ = ("state", "proposal", "digest", "sampling", "seed", "draft_key", "choice", "rule")
    STATE_FIELD_NUMBER: _ClassVar[int]
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    DRAFT_KEY_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    state: SessionState
    proposal: Proposal
    digest: bytes
    sampling: Sampling
    seed: int
    draft_key: bytes
    choice: int
    rule: Rule
    def __init__(self, state: _Optional[_Union[SessionState, _Mapping]] = ..., proposal: _Optional[_Union[Proposal, _Mapping]] = ..., digest: _Optional[bytes] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., seed: _Optional[int] = ..., draft_key: _Optional[bytes] = ..., choice: _Optional[int] = ..., rule: _Optional[_Union[Rule, str]] = ...) -> None: ...

class TaskReply(_message.Message):
    __slots__ = ("draft", "verify", "error", "score")
    DRAFT_FIELD_NUMBER: _ClassVar[int]
    VERIFY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    draft: DraftResult
    verify: VerifyResult
    error: _status_pb2.Status
    score: ScoreReply
    def __init__(self, draft: _Optional[_Union[DraftResult, _Mapping]] = ..., verify: _Optional[_Union[VerifyResult, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., score: _Optional[_Union[ScoreReply, _Mapping]] = ...) -> None: ...

class DraftResult(_message.Message):
    __slots__ = ("proposal", "times")
    PROPOSAL_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    proposal: Proposal
    times: WorkTimes
    def __init__(self, proposal: _Optional[_Union[Proposal, _Mapping]] = ..., times: _Optional[_Union[WorkTimes, _Mapping]] = ...) -> None: ...

class VerifyResult(_message.Message):
    __slots__ = ("digest", "num_accepted", "token", "num_unusable_rows", "num_redraw_mismatches", "times", "sum_min_pq")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_UNUSABLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_REDRAW_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    SUM_MIN_PQ_FIELD_NUMBER: _ClassVar[int]
    digest: bytes
    num_accepted: int
    token: int
    num_unusable_rows: int
    num_redraw_mismatches: int
    times: WorkTimes
    sum_min_pq: float
    def __init__(self, digest: _Optional[bytes] = ..., num_accepted: _Optional[int] = ..., token: _Optional[int] = ..., num_unusable_rows: _Optional[int] = ..., num_redraw_mismatches: _Optional[int] = ..., times: _Optional[_Union[WorkTimes, _Mapping]] = ..., sum_min_pq: _Optional[float] = ...) -> None: ...

class WorkTimes(_message.Message):
    __slots__ = ("queue_ns", "pass_ns", "total_ns", "first_pass")
    QUEUE_NS_FIELD_NUMBER: _ClassVar[int]
    PASS_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    FIRST_PASS_FIELD_NUMBER: _ClassVar[int]
    queue_ns: int
    pass_ns: int
    total_ns: int
    first_pass: int
    def __init__(self, queue_ns: _Optional[int] = ..., pass_ns: _Optional[int] = ..., total_ns: _Optional[int] = ..., first_pass: _Optional[int] = ...) -> None: ...
