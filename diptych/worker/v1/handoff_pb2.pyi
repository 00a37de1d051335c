from diptych.worker.v1 import work_pb2 as _work_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Fingerprint(_message.Message):
    __slots__ = ("model_digest", "dtype", "kv_dtype", "kv_layout", "block_size", "num_layers", "num_kv_heads", "head_dim", "hash_version", "tensor_parallel", "draft_digest", "sum_parts", "expert_parallel", "expert_all_to_all")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_LAYOUT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
    NUM_KV_HEADS_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    HASH_VERSION_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    DRAFT_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SUM_PARTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    EXPERT_ALL_TO_ALL_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    dtype: str
    kv_dtype: str
    kv_layout: str
    block_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    hash_version: int
    tensor_parallel: int
    draft_digest: str
    sum_parts: int
    expert_parallel: bool
    expert_all_to_all: bool
    def __init__(self, model_digest: _Optional[str] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., kv_layout: _Optional[str] = ..., block_size: _Optional[int] = ..., num_layers: _Optional[int] = ..., num_kv_heads: _Optional[int] = ..., head_dim: _Optional[int] = ..., hash_version: _Optional[int] = ..., tensor_parallel: _Optional[int] = ..., draft_digest: _Optional[str] = ..., sum_parts: _Optional[int] = ..., expert_parallel: _Optional[bool] = ..., expert_all_to_all: _Optional[bool] = ...) -> None: ...

class GrantId(_message.Message):
    __slots__ = ("id", "slot", "generation")
    ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    id: _work_pb2.AttemptId
    slot: int
    generation: int
    def __init__(self, id: _Optional[_Union[_work_pb2.AttemptId, _Mapping]] = ..., slot: _Optional[int] = ..., generation: _Optional[int] = ...) -> None: ...

class HandoffServiceLinkRequest(_message.Message):
    __slots__ = ("hello", "ask", "pushed", "commit", "stopped", "heartbeat")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    PUSHED_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    hello: HandoffHello
    ask: GrantAsk
    pushed: Pushed
    commit: Commit
    stopped: Stopped
    heartbeat: _work_pb2.Heartbeat
    def __init__(self, hello: _Optional[_Union[HandoffHello, _Mapping]] = ..., ask: _Optional[_Union[GrantAsk, _Mapping]] = ..., pushed: _Optional[_Union[Pushed, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., stopped: _Optional[_Union[Stopped, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class HandoffServiceLinkResponse(_message.Message):
    __slots__ = ("welcome", "grant", "denied", "abort", "heartbeat", "forgotten")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    welcome: HandoffWelcome
    grant: Grant
    denied: GrantDenied
    abort: Abort
    heartbeat: _work_pb2.Heartbeat
    forgotten: PrefixForgotten
    def __init__(self, welcome: _Optional[_Union[HandoffWelcome, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., denied: _Optional[_Union[GrantDenied, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ..., forgotten: _Optional[_Union[PrefixForgotten, _Mapping]] = ...) -> None: ...

class KVHolder(_message.Message):
    __slots__ = ("shares", "endpoint", "tokens")
    class Share(_message.Message):
        __slots__ = ("first_layer", "num_layers", "first_head", "num_heads")
        FIRST_LAYER_FIELD_NUMBER: _ClassVar[int]
        NUM_LAYERS_FIELD_NUMBER: _ClassVar[int]
        FIRST_HEAD_FIELD_NUMBER: _ClassVar[int]
        NUM_HEADS_FIELD_NUMBER: _ClassVar[int]
        first_layer: int
        num_layers: int
        first_head: int
        num_heads: int
        def __init__(self, first_layer: _Optional[int] = ..., num_layers: _Optional[int] = ..., first_head: _Optional[int] = ..., num_heads: _Optional[int] = ...) -> None: ...
    SHARES_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    shares: _containers.RepeatedCompositeFieldContainer[KVHolder.Share]
    endpoint: str
    tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, shares: _Optional[_Iterable[_Union[KVHolder.Share, _Mapping]]] = ..., endpoint: _Optional[str] = ..., tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class HandoffHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "pid", "fingerprint", "transports", "host_id", "device", "rank_pids", "holders", "holder_devices", "chunk_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RANK_PIDS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    HOLDER_DEVICES_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    pid: int
    fingerprint: Fingerprint
    transports: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    device: str
    rank_pids: _containers.RepeatedScalarFieldContainer[int]
    holders: _containers.RepeatedCompositeFieldContainer[KVHolder]
    holder_devices: _containers.RepeatedScalarFieldContainer[str]
    chunk_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., pid: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ..., device: _Optional[str] = ..., rank_pids: _Optional[_Iterable[int]] = ..., holders: _Optional[_Iterable[_Union[KVHolder, _Mapping]]] = ..., holder_devices: _Optional[_Iterable[str]] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class HandoffWelcome(_message.Message):
    __slots__ = ("worker_id", "incarnation", "fingerprint", "transport", "endpoint", "token", "num_blocks", "pull_endpoint", "pull_token", "forgotten", "block_bytes", "holders", "rank_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PULL_ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    PULL_TOKEN_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    RANK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    fingerprint: Fingerprint
    transport: str
    endpoint: str
    token: bytes
    num_blocks: int
    pull_endpoint: str
    pull_token: bytes
    forgotten: int
    block_bytes: int
    holders: _containers.RepeatedCompositeFieldContainer[KVHolder]
    rank_tokens: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., fingerprint: _Optional[_Union[Fingerprint, _Mapping]] = ..., transport: _Optional[str] = ..., endpoint: _Optional[str] = ..., token: _Optional[bytes] = ..., num_blocks: _Optional[int] = ..., pull_endpoint: _Optional[str] = ..., pull_token: _Optional[bytes] = ..., forgotten: _Optional[int] = ..., block_bytes: _Optional[int] = ..., holders: _Optional[_Iterable[_Union[KVHolder, _Mapping]]] = ..., rank_tokens: _Optional[_Iterable[bytes]] = ...) -> None: ...

class GrantAsk(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: _work_pb2.AttemptId
    def __init__(self, id: _Optional[_Union[_work_pb2.AttemptId, _Mapping]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("grant", "block_ids", "cached_tokens", "window_pins")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    BLOCK_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WINDOW_PINS_FIELD_NUMBER: _ClassVar[int]
    grant: GrantId
    block_ids: _containers.RepeatedScalarFieldContainer[int]
    cached_tokens: int
    window_pins: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, grant: _Optional[_Union[GrantId, _Mapping]] = ..., block_ids: _Optional[_Iterable[int]] = ..., cached_tokens: _Optional[int] = ..., window_pins: _Optional[_Iterable[int]] = ...) -> None: ...

class GrantDenied(_message.Message):
    __slots__ = ("id", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: _work_pb2.AttemptId
    failure: _work_pb2.Failure
    def __init__(self, id: _Optional[_Union[_work_pb2.AttemptId, _Mapping]] = ..., failure: _Optional[_Union[_work_pb2.Failure, _Mapping]] = ...) -> None: ...

class Pushed(_message.Message):
    __slots__ = ("grant", "first_block", "num_blocks", "digests")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DIGESTS_FIELD_NUMBER: _ClassVar[int]
    grant: GrantId
    first_block: int
    num_blocks: int
    digests: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, grant: _Optional[_Union[GrantId, _Mapping]] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ..., digests: _Optional[_Iterable[bytes]] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("grant", "num_tokens", "times", "first_tokens")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    grant: GrantId
    num_tokens: int
    times: _work_pb2.PhaseTimes
    first_tokens: _containers.RepeatedCompositeFieldContainer[_work_pb2.SampledToken]
    def __init__(self, grant: _Optional[_Union[GrantId, _Mapping]] = ..., num_tokens: _Optional[int] = ..., times: _Optional[_Union[_work_pb2.PhaseTimes, _Mapping]] = ..., first_tokens: _Optional[_Iterable[_Union[_work_pb2.SampledToken, _Mapping]]] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("grant",)
    GRANT_FIELD_NUMBER: _ClassVar[int]
    grant: GrantId
    def __init__(self, grant: _Optional[_Union[GrantId, _Mapping]] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ("grant", "failure")
    GRANT_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    grant: GrantId
    failure: _work_pb2.Failure
    def __init__(self, grant: _Optional[_Union[GrantId, _Mapping]] = ..., failure: _Optional[_Union[_work_pb2.Failure, _Mapping]] = ...) -> None: ...

class PrefixForgotten(_message.Message):
    __slots__ = ("keys", "count")
    KEYS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    keys: _containers.RepeatedScalarFieldContainer[bytes]
    count: int
    def __init__(self, keys: _Optional[_Iterable[bytes]] = ..., count: _Optional[int] = ...) -> None: ...
