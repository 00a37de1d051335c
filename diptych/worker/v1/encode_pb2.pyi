from diptych.worker.v1 import work_pb2 as _work_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EncodeServiceLinkRequest(_message.Message):
    __slots__ = ("hello", "encode", "cancel", "heartbeat", "drain", "flush", "image")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENCODE_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    hello: _work_pb2.GatewayHello
    encode: Encode
    cancel: _work_pb2.Cancel
    heartbeat: _work_pb2.Heartbeat
    drain: _work_pb2.Drain
    flush: _work_pb2.FlushPrefixCache
    image: _work_pb2.ImagePart
    def __init__(self, hello: _Optional[_Union[_work_pb2.GatewayHello, _Mapping]] = ..., encode: _Optional[_Union[Encode, _Mapping]] = ..., cancel: _Optional[_Union[_work_pb2.Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ..., drain: _Optional[_Union[_work_pb2.Drain, _Mapping]] = ..., flush: _Optional[_Union[_work_pb2.FlushPrefixCache, _Mapping]] = ..., image: _Optional[_Union[_work_pb2.ImagePart, _Mapping]] = ...) -> None: ...

class Encode(_message.Message):
    __slots__ = ("id", "cache_namespace", "images", "traceparent", "tracestate")
    ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    id: _work_pb2.AttemptId
    cache_namespace: bytes
    images: _containers.RepeatedCompositeFieldContainer[_work_pb2.ImageSpan]
    traceparent: str
    tracestate: str
    def __init__(self, id: _Optional[_Union[_work_pb2.AttemptId, _Mapping]] = ..., cache_namespace: _Optional[bytes] = ..., images: _Optional[_Iterable[_Union[_work_pb2.ImageSpan, _Mapping]]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ...) -> None: ...

class EncodeServiceLinkResponse(_message.Message):
    __slots__ = ("hello", "ended", "heartbeat", "flushed")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_FIELD_NUMBER: _ClassVar[int]
    hello: _work_pb2.WorkerHello
    ended: EncodeEnded
    heartbeat: _work_pb2.Heartbeat
    flushed: _work_pb2.PrefixCacheFlushed
    def __init__(self, hello: _Optional[_Union[_work_pb2.WorkerHello, _Mapping]] = ..., ended: _Optional[_Union[EncodeEnded, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ..., flushed: _Optional[_Union[_work_pb2.PrefixCacheFlushed, _Mapping]] = ...) -> None: ...

class EncodeEnded(_message.Message):
    __slots__ = ("id", "delivered", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    DELIVERED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: _work_pb2.AttemptId
    delivered: Delivered
    failure: _work_pb2.Failure
    def __init__(self, id: _Optional[_Union[_work_pb2.AttemptId, _Mapping]] = ..., delivered: _Optional[_Union[Delivered, _Mapping]] = ..., failure: _Optional[_Union[_work_pb2.Failure, _Mapping]] = ...) -> None: ...

class Delivered(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EmbeddingFingerprint(_message.Message):
    __slots__ = ("model_digest", "encoder", "dtype")
    MODEL_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    model_digest: str
    encoder: str
    dtype: str
    def __init__(self, model_digest: _Optional[str] = ..., encoder: _Optional[str] = ..., dtype: _Optional[str] = ...) -> None: ...

class EmbeddingServiceLinkRequest(_message.Message):
    __slots__ = ("hello", "ask", "taken", "heartbeat", "opened", "read")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ASK_FIELD_NUMBER: _ClassVar[int]
    TAKEN_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    OPENED_FIELD_NUMBER: _ClassVar[int]
    READ_FIELD_NUMBER: _ClassVar[int]
    hello: EmbeddingHello
    ask: AskRows
    taken: RowsTaken
    heartbeat: _work_pb2.Heartbeat
    opened: RowsChannelOpened
    read: RowsRead
    def __init__(self, hello: _Optional[_Union[EmbeddingHello, _Mapping]] = ..., ask: _Optional[_Union[AskRows, _Mapping]] = ..., taken: _Optional[_Union[RowsTaken, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ..., opened: _Optional[_Union[RowsChannelOpened, _Mapping]] = ..., read: _Optional[_Union[RowsRead, _Mapping]] = ...) -> None: ...

class EmbeddingServiceLinkResponse(_message.Message):
    __slots__ = ("welcome", "part", "denied", "heartbeat")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PART_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    welcome: EmbeddingHello
    part: RowsPart
    denied: RowsDenied
    heartbeat: _work_pb2.Heartbeat
    def __init__(self, welcome: _Optional[_Union[EmbeddingHello, _Mapping]] = ..., part: _Optional[_Union[RowsPart, _Mapping]] = ..., denied: _Optional[_Union[RowsDenied, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ...) -> None: ...

class EmbeddingHello(_message.Message):
    __slots__ = ("worker_id", "incarnation", "fingerprint", "transports", "host_id", "pid", "channel")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    CHANNEL_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    incarnation: int
    fingerprint: EmbeddingFingerprint
    transports: _containers.RepeatedScalarFieldContainer[str]
    host_id: str
    pid: int
    channel: RowsChannel
    def __init__(self, worker_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., fingerprint: _Optional[_Union[EmbeddingFingerprint, _Mapping]] = ..., transports: _Optional[_Iterable[str]] = ..., host_id: _Optional[str] = ..., pid: _Optional[int] = ..., channel: _Optional[_Union[RowsChannel, _Mapping]] = ...) -> None: ...

class RowsChannel(_message.Message):
    __slots__ = ("transport", "endpoint", "token")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FIELD_NUMBER: _ClassVar[int]
    transport: str
    endpoint: str
    token: bytes
    def __init__(self, transport: _Optional[str] = ..., endpoint: _Optional[str] = ..., token: _Optional[bytes] = ...) -> None: ...

class RowsChannelOpened(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RowsRead(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: int
    def __init__(self, parts: _Optional[int] = ...) -> None: ...

class AskRows(_message.Message):
    __slots__ = ("id", "digest", "generation")
    ID_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    id: _work_pb2.AttemptId
    digest: bytes
    generation: int
    def __init__(self, id: _Optional[_Union[_work_pb2.AttemptId, _Mapping]] = ..., digest: _Optional[bytes] = ..., generation: _Optional[int] = ...) -> None: ...

class RowsPart(_message.Message):
    __slots__ = ("generation", "first_row", "rows", "total_rows", "width", "data", "checksum", "slot")
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    ROWS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_ROWS_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    generation: int
    first_row: int
    rows: int
    total_rows: int
    width: int
    data: bytes
    checksum: bytes
    slot: int
    def __init__(self, generation: _Optional[int] = ..., first_row: _Optional[int] = ..., rows: _Optional[int] = ..., total_rows: _Optional[int] = ..., width: _Optional[int] = ..., data: _Optional[bytes] = ..., checksum: _Optional[bytes] = ..., slot: _Optional[int] = ...) -> None: ...

class RowsDenied(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class RowsTaken(_message.Message):
    __slots__ = ("id",)
    ID_FIELD_NUMBER: _ClassVar[int]
    id: _work_pb2.AttemptId
    def __init__(self, id: _Optional[_Union[_work_pb2.AttemptId, _Mapping]] = ...) -> None: ...
