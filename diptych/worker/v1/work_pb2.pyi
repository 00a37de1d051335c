import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LocalPrefill(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOCAL_PREFILL_UNSPECIFIED: _ClassVar[LocalPrefill]
    LOCAL_PREFILL_SHORT: _ClassVar[LocalPrefill]
    LOCAL_PREFILL_FALLBACK: _ClassVar[LocalPrefill]

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]

class FailureReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_REASON_UNSPECIFIED: _ClassVar[FailureReason]
    FAILURE_REASON_INTERNAL: _ClassVar[FailureReason]
    FAILURE_REASON_KV_TRANSFER_FAILED: _ClassVar[FailureReason]
    FAILURE_REASON_PEER_LOST: _ClassVar[FailureReason]
    FAILURE_REASON_DRAINING: _ClassVar[FailureReason]
    FAILURE_REASON_EXCEEDS_KV_CAPACITY: _ClassVar[FailureReason]
    FAILURE_REASON_DEADLINE: _ClassVar[FailureReason]
    FAILURE_REASON_INCOMPATIBLE: _ClassVar[FailureReason]
    FAILURE_REASON_NO_VALID_TOKEN: _ClassVar[FailureReason]
    FAILURE_REASON_COMPUTE_FAILED: _ClassVar[FailureReason]
    FAILURE_REASON_TOO_MANY_NEW: _ClassVar[FailureReason]
    FAILURE_REASON_ADAPTER_NOT_LOADED: _ClassVar[FailureReason]
    FAILURE_REASON_ENCODER_LOST: _ClassVar[FailureReason]
LOCAL_PREFILL_UNSPECIFIED: LocalPrefill
LOCAL_PREFILL_SHORT: LocalPrefill
LOCAL_PREFILL_FALLBACK: LocalPrefill
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FAILURE_REASON_UNSPECIFIED: FailureReason
FAILURE_REASON_INTERNAL: FailureReason
FAILURE_REASON_KV_TRANSFER_FAILED: FailureReason
FAILURE_REASON_PEER_LOST: FailureReason
FAILURE_REASON_DRAINING: FailureReason
FAILURE_REASON_EXCEEDS_KV_CAPACITY: FailureReason
FAILURE_REASON_DEADLINE: FailureReason
FAILURE_REASON_INCOMPATIBLE: FailureReason
FAILURE_REASON_NO_VALID_TOKEN: FailureReason
FAILURE_REASON_COMPUTE_FAILED: FailureReason
FAILURE_REASON_TOO_MANY_NEW: FailureReason
FAILURE_REASON_ADAPTER_NOT_LOADED: FailureReason
FAILURE_REASON_ENCODER_LOST: FailureReason

class AttemptId(_message.Message):
    __slots__ = ("request_id", "attempt")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ...) -> None: ...

class Sampling(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "logit_bias", "allowed_token_ids", "bad_words", "logprobs", "beam_width", "grammar", "top_n_sigma")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    BEAM_WIDTH_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    TOP_N_SIGMA_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    frequency_penalty: float
    presence_penalty: float
    repetition_penalty: float
    seed: int
    logit_bias: _containers.ScalarMap[int, float]
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedCompositeFieldContainer[TokenSequence]
    logprobs: int
    beam_width: int
    grammar: Grammar
    top_n_sigma: float
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., seed: _Optional[int] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[_Union[TokenSequence, _Mapping]]] = ..., logprobs: _Optional[int] = ..., beam_width: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., top_n_sigma: _Optional[float] = ...) -> None: ...

class TokenSequence(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text", "after")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[Grammar.Kind]
        KIND_JSON_SCHEMA: _ClassVar[Grammar.Kind]
        KIND_REGEX: _ClassVar[Grammar.Kind]
        KIND_LARK: _ClassVar[Grammar.Kind]
    KIND_UNSPECIFIED: Grammar.Kind
    KIND_JSON_SCHEMA: Grammar.Kind
    KIND_REGEX: Grammar.Kind
    KIND_LARK: Grammar.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    kind: Grammar.Kind
    text: str
    after: ReasoningSpan
    def __init__(self, kind: _Optional[_Union[Grammar.Kind, str]] = ..., text: _Optional[str] = ..., after: _Optional[_Union[ReasoningSpan, _Mapping]] = ...) -> None: ...

class ReasoningSpan(_message.Message):
    __slots__ = ("open", "opens", "ends", "leads")
    class Mark(_message.Message):
        __slots__ = ("ids", "until")
        IDS_FIELD_NUMBER: _ClassVar[int]
        UNTIL_FIELD_NUMBER: _ClassVar[int]
        ids: _containers.RepeatedScalarFieldContainer[int]
        until: int
        def __init__(self, ids: _Optional[_Iterable[int]] = ..., until: _Optional[int] = ...) -> None: ...
    OPEN_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    LEADS_FIELD_NUMBER: _ClassVar[int]
    open: bool
    opens: _containers.RepeatedScalarFieldContainer[int]
    ends: _containers.RepeatedCompositeFieldContainer[ReasoningSpan.Mark]
    leads: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, open: _Optional[bool] = ..., opens: _Optional[_Iterable[int]] = ..., ends: _Optional[_Iterable[_Union[ReasoningSpan.Mark, _Mapping]]] = ..., leads: _Optional[_Iterable[int]] = ...) -> None: ...

class Stopping(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "stop_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class Work(_message.Message):
    __slots__ = ("id", "token_ids", "prompt_tokens", "sampling", "stopping", "cache_namespace", "cache_read", "cache_write", "priority", "time_left", "traceparent", "tracestate", "reserve_worst_case", "choices", "prompt_logprobs", "waited", "local_prefill", "adapter", "images")
    ID_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    STOPPING_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CACHE_READ_FIELD_NUMBER: _ClassVar[int]
    CACHE_WRITE_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TIME_LEFT_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    RESERVE_WORST_CASE_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    WAITED_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    prompt_tokens: int
    sampling: Sampling
    stopping: Stopping
    cache_namespace: bytes
    cache_read: bool
    cache_write: bool
    priority: int
    time_left: _duration_pb2.Duration
    traceparent: str
    tracestate: str
    reserve_worst_case: bool
    choices: _containers.RepeatedScalarFieldContainer[int]
    prompt_logprobs: int
    waited: _duration_pb2.Duration
    local_prefill: LocalPrefill
    adapter: bytes
    images: _containers.RepeatedCompositeFieldContainer[ImageSpan]
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., token_ids: _Optional[_Iterable[int]] = ..., prompt_tokens: _Optional[int] = ..., sampling: _Optional[_Union[Sampling, _Mapping]] = ..., stopping: _Optional[_Union[Stopping, _Mapping]] = ..., cache_namespace: _Optional[bytes] = ..., cache_read: _Optional[bool] = ..., cache_write: _Optional[bool] = ..., priority: _Optional[int] = ..., time_left: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., reserve_worst_case: _Optional[bool] = ..., choices: _Optional[_Iterable[int]] = ..., prompt_logprobs: _Optional[int] = ..., waited: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., local_prefill: _Optional[_Union[LocalPrefill, str]] = ..., adapter: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[ImageSpan, _Mapping]]] = ...) -> None: ...

class ImageSpan(_message.Message):
    __slots__ = ("first_position", "rows", "digest", "first_row", "columns")
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    COLUMNS_FIELD_NUMBER: _ClassVar[int]
    first_position: int
    rows: int
    digest: bytes
    first_row: int
    columns: int
    def __init__(self, first_position: _Optional[int] = ..., rows: _Optional[int] = ..., digest: _Optional[bytes] = ..., first_row: _Optional[int] = ..., columns: _Optional[int] = ...) -> None: ...

class ImagePart(_message.Message):
    __slots__ = ("id", "digest", "shape", "data")
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    digest: bytes
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., digest: _Optional[bytes] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("id", "choices")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    choices: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., choices: _Optional[_Iterable[int]] = ...) -> None: ...

class Score(_message.Message):
    __slots__ = ("logprob", "rank", "top")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[Alternative]
    def __init__(self, logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[Alternative, _Mapping]]] = ...) -> None: ...

class Alternative(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class PromptScores(_message.Message):
    __slots__ = ("id", "first_position", "scores")
    ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_POSITION_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    first_position: int
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., first_position: _Optional[int] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("id", "index", "token_ids", "cached_tokens", "times", "choice", "scores")
    ID_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    SCORES_FIELD_NUMBER: _ClassVar[int]
    id: AttemptId
    index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    times: PhaseTimes
    choice: int
    scores: _containers.RepeatedCompositeFieldContainer[Score]
    def __init__(self, id: _Optional[_Union[AttemptId, _Mapping]] = ..., index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ..., times: _Optional[_Union[PhaseTimes, _Mapping]] = ..., choice: _Optional[int] = ..., scores: _Optional[_Iterable[_Union[Score, _Mapping]]] = ...) -> None: ...

class SampledToken(_message.Message):
    __slots__ = ("token_id", "score", "beam_logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    BEAM_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    score: Score
    beam_logprob: float
    def __init__(self, token_id: _Optional[int] = ..., score: _Optional[_Union[Score, _Mapping]] = ..., beam_logprob: _Optional[float] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace", "become")
    GRACE_FIELD_NUMBER: _ClassVar[int]
    BECOME_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    become: WorkerRole
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., become: _Optional[_Union[WorkerRole, str]] = ...) -> None: ...

class Failure(_message.Message):
    __slots__ = ("reason", "message")
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    reason: FailureReason
    message: str
    def __init__(self, reason: _Optional[_Union[FailureReason, str]] = ..., message: _Optional[str] = ...) -> None: ...

class PhaseTimes(_message.Message):
    __slots__ = ("prefill_queue", "grant_wait", "prefill", "kv_send", "kv_receive", "decode_queue", "decode", "kv_bytes_transferred", "cached_tokens", "prefill_steps", "kv_pull", "local_prefill", "drafted_tokens", "accepted_draft_tokens", "tier_blocks", "kv_load", "encode")
    PREFILL_QUEUE_FIELD_NUMBER: _ClassVar[int]
    GRANT_WAIT_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    KV_SEND_FIELD_NUMBER: _ClassVar[int]
    KV_RECEIVE_FIELD_NUMBER: _ClassVar[int]
    DECODE_QUEUE_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_TRANSFERRED_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_STEPS_FIELD_NUMBER: _ClassVar[int]
    KV_PULL_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIER_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    KV_LOAD_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    prefill_queue: _duration_pb2.Duration
    grant_wait: _duration_pb2.Duration
    prefill: _duration_pb2.Duration
    kv_send: _duration_pb2.Duration
    kv_receive: _duration_pb2.Duration
    decode_queue: _duration_pb2.Duration
    decode: _duration_pb2.Duration
    kv_bytes_transferred: int
    cached_tokens: int
    prefill_steps: int
    kv_pull: _duration_pb2.Duration
    local_prefill: bool
    drafted_tokens: int
    accepted_draft_tokens: int
    tier_blocks: int
    kv_load: _duration_pb2.Duration
    encode: _duration_pb2.Duration
    def __init__(self, prefill_queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., grant_wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., prefill: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kv_send: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kv_receive: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode_queue: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., decode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kv_bytes_transferred: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., prefill_steps: _Optional[int] = ..., kv_pull: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., local_prefill: _Optional[bool] = ..., drafted_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., tier_blocks: _Optional[int] = ..., kv_load: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., encode: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker_id", "incarnation")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class GatewayHello(_message.Message):
    __slots__ = ("gateway_id", "incarnation")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    incarnation: int
    def __init__(self, gateway_id: _Optional[str] = ..., incarnation: _Optional[int] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("progress", "busy", "load", "late")
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    LATE_FIELD_NUMBER: _ClassVar[int]
    progress: int
    busy: bool
    load: Load
    late: _duration_pb2.Duration
    def __init__(self, progress: _Optional[int] = ..., busy: _Optional[bool] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., late: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class Rank(_message.Message):
    __slots__ = ("pid", "state", "weight_bytes", "kv_bytes", "other_bytes", "left_bytes")
    PID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_FIELD_NUMBER: _ClassVar[int]
    OTHER_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEFT_BYTES_FIELD_NUMBER: _ClassVar[int]
    pid: int
    state: str
    weight_bytes: int
    kv_bytes: int
    other_bytes: int
    left_bytes: int
    def __init__(self, pid: _Optional[int] = ..., state: _Optional[str] = ..., weight_bytes: _Optional[int] = ..., kv_bytes: _Optional[int] = ..., other_bytes: _Optional[int] = ..., left_bytes: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "free_blocks", "total_blocks", "quarantined_blocks", "step_times", "draining", "max_running", "pull_cost", "max_local_prefill_tokens", "max_fallback_prefill_tokens", "local_prefill_chunk", "local_prefills", "adapters", "max_loras", "tier_token_s", "drafted_tokens", "accepted_draft_tokens", "becomes", "busy_share", "ranks", "stages")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMES_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    PULL_COST_FIELD_NUMBER: _ClassVar[int]
    MAX_LOCAL_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_FALLBACK_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILL_CHUNK_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    TIER_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BECOMES_FIELD_NUMBER: _ClassVar[int]
    BUSY_SHARE_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    quarantined_blocks: int
    step_times: _containers.RepeatedCompositeFieldContainer[StepTime]
    draining: bool
    max_running: int
    pull_cost: float
    max_local_prefill_tokens: int
    max_fallback_prefill_tokens: int
    local_prefill_chunk: int
    local_prefills: int
    adapters: _containers.RepeatedScalarFieldContainer[bytes]
    max_loras: int
    tier_token_s: float
    drafted_tokens: int
    accepted_draft_tokens: int
    becomes: WorkerRole
    busy_share: float
    ranks: _containers.RepeatedCompositeFieldContainer[Rank]
    stages: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., step_times: _Optional[_Iterable[_Union[StepTime, _Mapping]]] = ..., draining: _Optional[bool] = ..., max_running: _Optional[int] = ..., pull_cost: _Optional[float] = ..., max_local_prefill_tokens: _Optional[int] = ..., max_fallback_prefill_tokens: _Optional[int] = ..., local_prefill_chunk: _Optional[int] = ..., local_prefills: _Optional[int] = ..., adapters: _Optional[_Iterable[bytes]] = ..., max_loras: _Optional[int] = ..., tier_token_s: _Optional[float] = ..., drafted_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., becomes: _Optional[_Union[WorkerRole, str]] = ..., busy_share: _Optional[float] = ..., ranks: _Optional[_Iterable[_Union[Rank, _Mapping]]] = ..., stages: _Optional[int] = ...) -> None: ...

class StepTime(_message.Message):
    __slots__ = ("size_class", "steps", "median", "tokens")
    SIZE_CLASS_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    size_class: int
    steps: int
    median: _duration_pb2.Duration
    tokens: int
    def __init__(self, size_class: _Optional[int] = ..., steps: _Optional[int] = ..., median: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., tokens: _Optional[int] = ...) -> None: ...

class FlushPrefixCache(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: int
    def __init__(self, id: _Optional[int] = ...) -> None: ...

class PrefixCacheFlushed(_message.Message):
    __slots__ = ("id", "blocks")
    ID_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    id: int
    blocks: int
    def __init__(self, id: _Optional[int] = ..., blocks: _Optional[int] = ...) -> None: ...

class LoadAdapter(_message.Message):
    __slots__ = ("id", "digest", "name", "path")
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    id: int
    digest: bytes
    name: str
    path: str
    def __init__(self, id: _Optional[int] = ..., digest: _Optional[bytes] = ..., name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class UnloadAdapter(_message.Message):
    __slots__ = ("id", "digest")
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    id: int
    digest: bytes
    def __init__(self, id: _Optional[int] = ..., digest: _Optional[bytes] = ...) -> None: ...

class AdapterAnswer(_message.Message):
    __slots__ = ("id", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: int
    failure: Failure
    def __init__(self, id: _Optional[int] = ..., failure: _Optional[_Union[Failure, _Mapping]] = ...) -> None: ...
