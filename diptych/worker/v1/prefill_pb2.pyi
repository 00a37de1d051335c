from diptych.worker.v1 import work_pb2 as _work_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class PrefillServiceLinkRequest(_message.Message):
    __slots__ = ("hello", "dispatch", "cancel", "heartbeat", "drain", "flush", "image", "load_adapter", "unload_adapter")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DISPATCH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    hello: _work_pb2.GatewayHello
    dispatch: Dispatch
    cancel: _work_pb2.Cancel
    heartbeat: _work_pb2.Heartbeat
    drain: _work_pb2.Drain
    flush: _work_pb2.FlushPrefixCache
    image: _work_pb2.ImagePart
    load_adapter: _work_pb2.LoadAdapter
    unload_adapter: _work_pb2.UnloadAdapter
    def __init__(self, hello: _Optional[_Union[_work_pb2.GatewayHello, _Mapping]] = ..., dispatch: _Optional[_Union[Dispatch, _Mapping]] = ..., cancel: _Optional[_Union[_work_pb2.Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ..., drain: _Optional[_Union[_work_pb2.Drain, _Mapping]] = ..., flush: _Optional[_Union[_work_pb2.FlushPrefixCache, _Mapping]] = ..., image: _Optional[_Union[_work_pb2.ImagePart, _Mapping]] = ..., load_adapter: _Optional[_Union[_work_pb2.LoadAdapter, _Mapping]] = ..., unload_adapter: _Optional[_Union[_work_pb2.UnloadAdapter, _Mapping]] = ...) -> None: ...

class Dispatch(_message.Message):
    __slots__ = ("work", "decode_worker_id", "decode_address", "decode_incarnation", "encoder")
    WORK_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    DECODE_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    ENCODER_FIELD_NUMBER: _ClassVar[int]
    work: _work_pb2.Work
    decode_worker_id: str
    decode_address: str
    decode_incarnation: int
    encoder: Encoder
    def __init__(self, work: _Optional[_Union[_work_pb2.Work, _Mapping]] = ..., decode_worker_id: _Optional[str] = ..., decode_address: _Optional[str] = ..., decode_incarnation: _Optional[int] = ..., encoder: _Optional[_Union[Encoder, _Mapping]] = ...) -> None: ...

class Encoder(_message.Message):
    __slots__ = ("worker_id", "address", "incarnation", "cached_tokens")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker_id: str
    address: str
    incarnation: int
    cached_tokens: int
    def __init__(self, worker_id: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[int] = ..., cached_tokens: _Optional[int] = ...) -> None: ...

class PrefillServiceLinkResponse(_message.Message):
    __slots__ = ("hello", "ended", "heartbeat", "prompt_scores", "flushed", "first_tokens", "adapter_answer")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ANSWER_FIELD_NUMBER: _ClassVar[int]
    hello: _work_pb2.WorkerHello
    ended: PrefillEnded
    heartbeat: _work_pb2.Heartbeat
    prompt_scores: _work_pb2.PromptScores
    flushed: _work_pb2.PrefixCacheFlushed
    first_tokens: FirstTokens
    adapter_answer: _work_pb2.AdapterAnswer
    def __init__(self, hello: _Optional[_Union[_work_pb2.WorkerHello, _Mapping]] = ..., ended: _Optional[_Union[PrefillEnded, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ..., prompt_scores: _Optional[_Union[_work_pb2.PromptScores, _Mapping]] = ..., flushed: _Optional[_Union[_work_pb2.PrefixCacheFlushed, _Mapping]] = ..., first_tokens: _Optional[_Union[FirstTokens, _Mapping]] = ..., adapter_answer: _Optional[_Union[_work_pb2.AdapterAnswer, _Mapping]] = ...) -> None: ...

class FirstTokens(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_work_pb2.Tokens]
    def __init__(self, tokens: _Optional[_Iterable[_Union[_work_pb2.Tokens, _Mapping]]] = ...) -> None: ...

class PrefillEnded(_message.Message):
    __slots__ = ("id", "committed", "failure")
    ID_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    id: _work_pb2.AttemptId
    committed: Committed
    failure: _work_pb2.Failure
    def __init__(self, id: _Optional[_Union[_work_pb2.AttemptId, _Mapping]] = ..., committed: _Optional[_Union[Committed, _Mapping]] = ..., failure: _Optional[_Union[_work_pb2.Failure, _Mapping]] = ...) -> None: ...

class Committed(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
