from protos import worker_pb2 as _worker_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Circuit(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CIRCUIT_UNSPECIFIED: _ClassVar[Circuit]
    CIRCUIT_CLOSED: _ClassVar[Circuit]
    CIRCUIT_OPEN: _ClassVar[Circuit]
    CIRCUIT_HALF_OPEN: _ClassVar[Circuit]
CIRCUIT_UNSPECIFIED: Circuit
CIRCUIT_CLOSED: Circuit
CIRCUIT_OPEN: Circuit
CIRCUIT_HALF_OPEN: Circuit

class GetDeploymentStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DeploymentStatus(_message.Message):
    __slots__ = ("workers", "num_running_sessions", "num_waiting_sessions", "totals", "uptime_seconds", "process_id")
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOTALS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerHealth]
    num_running_sessions: int
    num_waiting_sessions: int
    totals: Totals
    uptime_seconds: float
    process_id: int
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerHealth, _Mapping]]] = ..., num_running_sessions: _Optional[int] = ..., num_waiting_sessions: _Optional[int] = ..., totals: _Optional[_Union[Totals, _Mapping]] = ..., uptime_seconds: _Optional[float] = ..., process_id: _Optional[int] = ...) -> None: ...

class WorkerHealth(_message.Message):
    __slots__ = ("role", "model", "address", "is_healthy", "problem", "process_id", "num_slots", "num_slots_used", "num_sessions", "cost", "busy", "num_broken_rows", "prefixes", "circuit", "notice")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    IS_HEALTHY_FIELD_NUMBER: _ClassVar[int]
    PROBLEM_FIELD_NUMBER: _ClassVar[int]
    PROCESS_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_FIELD_NUMBER: _ClassVar[int]
    NUM_SLOTS_USED_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    NUM_BROKEN_ROWS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    role: str
    model: str
    address: str
    is_healthy: bool
    problem: str
    process_id: int
    num_slots: int
    num_slots_used: int
    num_sessions: int
    cost: _worker_pb2.PassCost
    busy: _worker_pb2.BusyTime
    num_broken_rows: int
    prefixes: _worker_pb2.PrefixCache
    circuit: Circuit
    notice: str
    def __init__(self, role: _Optional[str] = ..., model: _Optional[str] = ..., address: _Optional[str] = ..., is_healthy: _Optional[bool] = ..., problem: _Optional[str] = ..., process_id: _Optional[int] = ..., num_slots: _Optional[int] = ..., num_slots_used: _Optional[int] = ..., num_sessions: _Optional[int] = ..., cost: _Optional[_Union[_worker_pb2.PassCost, _Mapping]] = ..., busy: _Optional[_Union[_worker_pb2.BusyTime, _Mapping]] = ..., num_broken_rows: _Optional[int] = ..., prefixes: _Optional[_Union[_worker_pb2.PrefixCache, _Mapping]] = ..., circuit: _Optional[_Union[Circuit, str]] = ..., notice: _Optional[str] = ...) -> None: ...

class Totals(_message.Message):
    __slots__ = ("num_requests", "num_completion_tokens", "num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_fallbacks", "num_unusable_rows", "num_redraw_mismatches", "num_migrations")
    NUM_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNUSABLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_REDRAW_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    num_requests: int
    num_completion_tokens: int
    num_rounds: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_fallbacks: int
    num_unusable_rows: int
    num_redraw_mismatches: int
    num_migrations: int
    def __init__(self, num_requests: _Optional[int] = ..., num_completion_tokens: _Optional[int] = ..., num_rounds: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_fallbacks: _Optional[int] = ..., num_unusable_rows: _Optional[int] = ..., num_redraw_mismatches: _Optional[int] = ..., num_migrations: _Optional[int] = ...) -> None: ...

class WatchRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Spans(_message.Message):
    __slots__ = ("spans", "num_lost")
    SPANS_FIELD_NUMBER: _ClassVar[int]
    NUM_LOST_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    num_lost: int
    def __init__(self, spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ..., num_lost: _Optional[int] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("role", "address", "session", "round", "num_draft_tokens", "num_sent_tokens", "asked_ns", "answered_ns", "times", "num_tokens")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    SESSION_FIELD_NUMBER: _ClassVar[int]
    ROUND_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_SENT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ASKED_NS_FIELD_NUMBER: _ClassVar[int]
    ANSWERED_NS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    role: str
    address: str
    session: str
    round: int
    num_draft_tokens: int
    num_sent_tokens: int
    asked_ns: int
    answered_ns: int
    times: _worker_pb2.WorkTimes
    num_tokens: int
    def __init__(self, role: _Optional[str] = ..., address: _Optional[str] = ..., session: _Optional[str] = ..., round: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_sent_tokens: _Optional[int] = ..., asked_ns: _Optional[int] = ..., answered_ns: _Optional[int] = ..., times: _Optional[_Union[_worker_pb2.WorkTimes, _Mapping]] = ..., num_tokens: _Optional[int] = ...) -> None: ...
