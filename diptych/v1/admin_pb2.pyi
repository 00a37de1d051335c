import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf import timestamp_pb2 as _timestamp_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WorkerRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_ROLE_UNSPECIFIED: _ClassVar[WorkerRole]
    WORKER_ROLE_PREFILL: _ClassVar[WorkerRole]
    WORKER_ROLE_DECODE: _ClassVar[WorkerRole]
    WORKER_ROLE_ENCODE: _ClassVar[WorkerRole]

class WorkerState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_STATE_UNSPECIFIED: _ClassVar[WorkerState]
    WORKER_STATE_READY: _ClassVar[WorkerState]
    WORKER_STATE_CONNECTING: _ClassVar[WorkerState]
    WORKER_STATE_DRAINING: _ClassVar[WorkerState]
    WORKER_STATE_INCOMPATIBLE: _ClassVar[WorkerState]
WORKER_ROLE_UNSPECIFIED: WorkerRole
WORKER_ROLE_PREFILL: WorkerRole
WORKER_ROLE_DECODE: WorkerRole
WORKER_ROLE_ENCODE: WorkerRole
WORKER_STATE_UNSPECIFIED: WorkerState
WORKER_STATE_READY: WorkerState
WORKER_STATE_CONNECTING: WorkerState
WORKER_STATE_DRAINING: WorkerState
WORKER_STATE_INCOMPATIBLE: WorkerState

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("version", "gateway_id", "start_time", "model", "model_digest", "max_context_length", "kv_block_size", "ready", "draining", "directory_connected", "config_digest", "models")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    START_TIME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LENGTH_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    DIRECTORY_CONNECTED_FIELD_NUMBER: _ClassVar[int]
    CONFIG_DIGEST_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    version: str
    gateway_id: str
    start_time: _timestamp_pb2.Timestamp
    model: str
    model_digest: str
    max_context_length: int
    kv_block_size: int
    ready: bool
    draining: bool
    directory_connected: bool
    config_digest: str
    models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    def __init__(self, version: _Optional[str] = ..., gateway_id: _Optional[str] = ..., start_time: _Optional[_Union[datetime.datetime, _timestamp_pb2.Timestamp, _Mapping]] = ..., model: _Optional[str] = ..., model_digest: _Optional[str] = ..., max_context_length: _Optional[int] = ..., kv_block_size: _Optional[int] = ..., ready: _Optional[bool] = ..., draining: _Optional[bool] = ..., directory_connected: _Optional[bool] = ..., config_digest: _Optional[str] = ..., models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ...) -> None: ...

class ListWorkersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListWorkersResponse(_message.Message):
    __slots__ = ("workers",)
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    def __init__(self, workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ...) -> None: ...

class WorkerInfo(_message.Message):
    __slots__ = ("worker_id", "role", "address", "state", "detail", "load", "since_heartbeat", "model")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    SINCE_HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    address: str
    state: WorkerState
    detail: str
    load: WorkerLoad
    since_heartbeat: _duration_pb2.Duration
    model: str
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., address: _Optional[str] = ..., state: _Optional[_Union[WorkerState, str]] = ..., detail: _Optional[str] = ..., load: _Optional[_Union[WorkerLoad, _Mapping]] = ..., since_heartbeat: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., model: _Optional[str] = ...) -> None: ...

class WorkerRank(_message.Message):
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

class WorkerLoad(_message.Message):
    __slots__ = ("running", "waiting", "waiting_tokens", "free_blocks", "total_blocks", "quarantined_blocks", "local_prefills", "adapters", "max_loras", "drafted_tokens", "accepted_draft_tokens", "ranks", "stages")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_PREFILLS_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    MAX_LORAS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    waiting_tokens: int
    free_blocks: int
    total_blocks: int
    quarantined_blocks: int
    local_prefills: int
    adapters: _containers.RepeatedScalarFieldContainer[str]
    max_loras: int
    drafted_tokens: int
    accepted_draft_tokens: int
    ranks: _containers.RepeatedCompositeFieldContainer[WorkerRank]
    stages: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., free_blocks: _Optional[int] = ..., total_blocks: _Optional[int] = ..., quarantined_blocks: _Optional[int] = ..., local_prefills: _Optional[int] = ..., adapters: _Optional[_Iterable[str]] = ..., max_loras: _Optional[int] = ..., drafted_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ..., ranks: _Optional[_Iterable[_Union[WorkerRank, _Mapping]]] = ..., stages: _Optional[int] = ...) -> None: ...

class WatchLoadRequest(_message.Message):
    __slots__ = ("interval",)
    INTERVAL_FIELD_NUMBER: _ClassVar[int]
    interval: _duration_pb2.Duration
    def __init__(self, interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class WatchLoadResponse(_message.Message):
    __slots__ = ("running", "waiting", "workers", "phases", "tenants", "generated_tokens", "prompt_tokens")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerInfo]
    phases: PhaseLoad
    tenants: _containers.RepeatedCompositeFieldContainer[TenantLoad]
    generated_tokens: int
    prompt_tokens: int
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerInfo, _Mapping]]] = ..., phases: _Optional[_Union[PhaseLoad, _Mapping]] = ..., tenants: _Optional[_Iterable[_Union[TenantLoad, _Mapping]]] = ..., generated_tokens: _Optional[int] = ..., prompt_tokens: _Optional[int] = ...) -> None: ...

class PhaseLoad(_message.Message):
    __slots__ = ("queued", "routing", "prefill", "decode")
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    queued: int
    routing: int
    prefill: int
    decode: int
    def __init__(self, queued: _Optional[int] = ..., routing: _Optional[int] = ..., prefill: _Optional[int] = ..., decode: _Optional[int] = ...) -> None: ...

class TenantLoad(_message.Message):
    __slots__ = ("tenant", "phases", "generated_tokens")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    PHASES_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    phases: PhaseLoad
    generated_tokens: int
    def __init__(self, tenant: _Optional[str] = ..., phases: _Optional[_Union[PhaseLoad, _Mapping]] = ..., generated_tokens: _Optional[int] = ...) -> None: ...

class DrainWorkerRequest(_message.Message):
    __slots__ = ("worker_id", "grace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    grace: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class DrainWorkerResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ChangeWorkerRoleRequest(_message.Message):
    __slots__ = ("worker_id", "role", "grace")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    GRACE_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    role: WorkerRole
    grace: _duration_pb2.Duration
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[_Union[WorkerRole, str]] = ..., grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ChangeWorkerRoleResponse(_message.Message):
    __slots__ = ("changed",)
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    changed: bool
    def __init__(self, changed: _Optional[bool] = ...) -> None: ...

class FlushPrefixCacheRequest(_message.Message):
    __slots__ = ("worker_id",)
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    def __init__(self, worker_id: _Optional[str] = ...) -> None: ...

class FlushPrefixCacheResponse(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class LoadAdapterRequest(_message.Message):
    __slots__ = ("name", "path", "replace", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    REPLACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    replace: bool
    model: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., replace: _Optional[bool] = ..., model: _Optional[str] = ...) -> None: ...

class LoadAdapterResponse(_message.Message):
    __slots__ = ("adapter",)
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    adapter: Adapter
    def __init__(self, adapter: _Optional[_Union[Adapter, _Mapping]] = ...) -> None: ...

class UnloadAdapterRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadAdapterResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "digest", "path", "rank", "workers", "running", "draining", "refusals", "model")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REFUSALS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    rank: int
    workers: _containers.RepeatedScalarFieldContainer[str]
    running: int
    draining: bool
    refusals: _containers.RepeatedScalarFieldContainer[str]
    model: str
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., rank: _Optional[int] = ..., workers: _Optional[_Iterable[str]] = ..., running: _Optional[int] = ..., draining: _Optional[bool] = ..., refusals: _Optional[_Iterable[str]] = ..., model: _Optional[str] = ...) -> None: ...

class ServedModel(_message.Message):
    __slots__ = ("name", "digest", "path", "running", "ready", "detail", "leaving")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    READY_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    LEAVING_FIELD_NUMBER: _ClassVar[int]
    name: str
    digest: str
    path: str
    running: int
    ready: bool
    detail: str
    leaving: bool
    def __init__(self, name: _Optional[str] = ..., digest: _Optional[str] = ..., path: _Optional[str] = ..., running: _Optional[int] = ..., ready: _Optional[bool] = ..., detail: _Optional[str] = ..., leaving: _Optional[bool] = ...) -> None: ...

class ModelShare(_message.Message):
    __slots__ = ("model", "weight")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_FIELD_NUMBER: _ClassVar[int]
    model: str
    weight: int
    def __init__(self, model: _Optional[str] = ..., weight: _Optional[int] = ...) -> None: ...

class ModelAlias(_message.Message):
    __slots__ = ("name", "shares")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHARES_FIELD_NUMBER: _ClassVar[int]
    name: str
    shares: _containers.RepeatedCompositeFieldContainer[ModelShare]
    def __init__(self, name: _Optional[str] = ..., shares: _Optional[_Iterable[_Union[ModelShare, _Mapping]]] = ...) -> None: ...

class LoadModelRequest(_message.Message):
    __slots__ = ("name", "path")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ...) -> None: ...

class LoadModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: ServedModel
    def __init__(self, model: _Optional[_Union[ServedModel, _Mapping]] = ...) -> None: ...

class UnloadModelRequest(_message.Message):
    __slots__ = ("name",)
    NAME_FIELD_NUMBER: _ClassVar[int]
    name: str
    def __init__(self, name: _Optional[str] = ...) -> None: ...

class UnloadModelResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListServedModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListServedModelsResponse(_message.Message):
    __slots__ = ("models", "aliases", "problems")
    MODELS_FIELD_NUMBER: _ClassVar[int]
    ALIASES_FIELD_NUMBER: _ClassVar[int]
    PROBLEMS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[ServedModel]
    aliases: _containers.RepeatedCompositeFieldContainer[ModelAlias]
    problems: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, models: _Optional[_Iterable[_Union[ServedModel, _Mapping]]] = ..., aliases: _Optional[_Iterable[_Union[ModelAlias, _Mapping]]] = ..., problems: _Optional[_Iterable[str]] = ...) -> None: ...

class SetModelAliasRequest(_message.Message):
    __slots__ = ("alias",)
    ALIAS_FIELD_NUMBER: _ClassVar[int]
    alias: ModelAlias
    def __init__(self, alias: _Optional[_Union[ModelAlias, _Mapping]] = ...) -> None: ...

class SetModelAliasResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
