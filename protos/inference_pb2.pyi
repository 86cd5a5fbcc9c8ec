from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Origin(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ORIGIN_UNSPECIFIED: _ClassVar[Origin]
    ORIGIN_ACCEPTED: _ClassVar[Origin]
    ORIGIN_RECOVERED: _ClassVar[Origin]
    ORIGIN_BONUS: _ClassVar[Origin]
    ORIGIN_PLAIN: _ClassVar[Origin]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORT: _ClassVar[FinishReason]
ORIGIN_UNSPECIFIED: Origin
ORIGIN_ACCEPTED: Origin
ORIGIN_RECOVERED: Origin
ORIGIN_BONUS: Origin
ORIGIN_PLAIN: Origin
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORT: FinishReason

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "text", "token_ids", "chat", "max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "n", "num_draft_tokens", "ignore_end_tokens", "auto_draft_tokens", "rule", "resume_from", "stop", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_END_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AUTO_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RULE_FIELD_NUMBER: _ClassVar[int]
    RESUME_FROM_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    text: str
    token_ids: TokenIds
    chat: Chat
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    n: int
    num_draft_tokens: int
    ignore_end_tokens: bool
    auto_draft_tokens: bool
    rule: str
    resume_from: _containers.RepeatedScalarFieldContainer[int]
    stop: _containers.RepeatedScalarFieldContainer[str]
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    logprobs: int
    def __init__(self, request_id: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., max_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., seed: _Optional[int] = ..., n: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., ignore_end_tokens: _Optional[bool] = ..., auto_draft_tokens: _Optional[bool] = ..., rule: _Optional[str] = ..., resume_from: _Optional[_Iterable[int]] = ..., stop: _Optional[_Iterable[str]] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., logprobs: _Optional[int] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class GenerateReply(_message.Message):
    __slots__ = ("started", "tokens", "finished", "usage")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    started: Started
    tokens: Tokens
    finished: Finished
    usage: Usage
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., tokens: _Optional[_Union[Tokens, _Mapping]] = ..., finished: _Optional[_Union[Finished, _Mapping]] = ..., usage: _Optional[_Union[Usage, _Mapping]] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "seed", "num_prompt_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    seed: int
    num_prompt_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., seed: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("choice", "tokens", "first_index")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FIRST_INDEX_FIELD_NUMBER: _ClassVar[int]
    choice: int
    tokens: _containers.RepeatedCompositeFieldContainer[Token]
    first_index: int
    def __init__(self, choice: _Optional[int] = ..., tokens: _Optional[_Iterable[_Union[Token, _Mapping]]] = ..., first_index: _Optional[int] = ...) -> None: ...

class Token(_message.Message):
    __slots__ = ("id", "text", "origin")
    ID_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    ORIGIN_FIELD_NUMBER: _ClassVar[int]
    id: int
    text: str
    origin: Origin
    def __init__(self, id: _Optional[int] = ..., text: _Optional[str] = ..., origin: _Optional[_Union[Origin, str]] = ...) -> None: ...

class Finished(_message.Message):
    __slots__ = ("choice", "reason", "text")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    choice: int
    reason: FinishReason
    text: str
    def __init__(self, choice: _Optional[int] = ..., reason: _Optional[_Union[FinishReason, str]] = ..., text: _Optional[str] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("num_prompt_tokens", "num_completion_tokens", "num_rounds", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos", "acceptance_rate", "mean_acceptance_length", "num_q_bytes", "num_fallbacks", "num_unusable_rows", "num_judged_tokens", "mean_min_pq", "num_redraw_mismatches", "times", "num_migrations")
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_PER_POS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTANCE_RATE_FIELD_NUMBER: _ClassVar[int]
    MEAN_ACCEPTANCE_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_Q_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    NUM_UNUSABLE_ROWS_FIELD_NUMBER: _ClassVar[int]
    NUM_JUDGED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MEAN_MIN_PQ_FIELD_NUMBER: _ClassVar[int]
    NUM_REDRAW_MISMATCHES_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    NUM_MIGRATIONS_FIELD_NUMBER: _ClassVar[int]
    num_prompt_tokens: int
    num_completion_tokens: int
    num_rounds: int
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    num_accepted_tokens_per_pos: _containers.RepeatedScalarFieldContainer[int]
    acceptance_rate: float
    mean_acceptance_length: float
    num_q_bytes: int
    num_fallbacks: int
    num_unusable_rows: int
    num_judged_tokens: int
    mean_min_pq: float
    num_redraw_mismatches: int
    times: RoundTimes
    num_migrations: int
    def __init__(self, num_prompt_tokens: _Optional[int] = ..., num_completion_tokens: _Optional[int] = ..., num_rounds: _Optional[int] = ..., num_drafts: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., num_accepted_tokens_per_pos: _Optional[_Iterable[int]] = ..., acceptance_rate: _Optional[float] = ..., mean_acceptance_length: _Optional[float] = ..., num_q_bytes: _Optional[int] = ..., num_fallbacks: _Optional[int] = ..., num_unusable_rows: _Optional[int] = ..., num_judged_tokens: _Optional[int] = ..., mean_min_pq: _Optional[float] = ..., num_redraw_mismatches: _Optional[int] = ..., times: _Optional[_Union[RoundTimes, _Mapping]] = ..., num_migrations: _Optional[int] = ...) -> None: ...

class RoundTimes(_message.Message):
    __slots__ = ("num_rounds", "draft_ns", "wire_ns", "target_ns", "total_ns")
    NUM_ROUNDS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_NS_FIELD_NUMBER: _ClassVar[int]
    WIRE_NS_FIELD_NUMBER: _ClassVar[int]
    TARGET_NS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_NS_FIELD_NUMBER: _ClassVar[int]
    num_rounds: int
    draft_ns: int
    wire_ns: int
    target_ns: int
    total_ns: int
    def __init__(self, num_rounds: _Optional[int] = ..., draft_ns: _Optional[int] = ..., wire_ns: _Optional[int] = ..., target_ns: _Optional[int] = ..., total_ns: _Optional[int] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ("aborted",)
    ABORTED_FIELD_NUMBER: _ClassVar[int]
    aborted: bool
    def __init__(self, aborted: _Optional[bool] = ...) -> None: ...

class GetModelInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ModelInfo(_message.Message):
    __slots__ = ("target_model", "draft_model", "vocab_size", "max_length", "num_draft_tokens", "auto_draft_tokens", "max_num_draft_tokens", "max_choices", "end_token_ids", "max_running_sessions", "num_running_sessions", "num_waiting_sessions")
    TARGET_MODEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_LENGTH_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AUTO_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CHOICES_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    target_model: str
    draft_model: str
    vocab_size: int
    max_length: int
    num_draft_tokens: int
    auto_draft_tokens: bool
    max_num_draft_tokens: int
    max_choices: int
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    max_running_sessions: int
    num_running_sessions: int
    num_waiting_sessions: int
    def __init__(self, target_model: _Optional[str] = ..., draft_model: _Optional[str] = ..., vocab_size: _Optional[int] = ..., max_length: _Optional[int] = ..., num_draft_tokens: _Optional[int] = ..., auto_draft_tokens: _Optional[bool] = ..., max_num_draft_tokens: _Optional[int] = ..., max_choices: _Optional[int] = ..., end_token_ids: _Optional[_Iterable[int]] = ..., max_running_sessions: _Optional[int] = ..., num_running_sessions: _Optional[int] = ..., num_waiting_sessions: _Optional[int] = ...) -> None: ...
