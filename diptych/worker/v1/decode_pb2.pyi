from diptych.worker.v1 import work_pb2 as _work_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DecodeServiceLinkRequest(_message.Message):
    __slots__ = ("hello", "attach", "cancel", "heartbeat", "drain", "flush", "load_adapter", "unload_adapter")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    ATTACH_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    FLUSH_FIELD_NUMBER: _ClassVar[int]
    LOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    UNLOAD_ADAPTER_FIELD_NUMBER: _ClassVar[int]
    hello: _work_pb2.GatewayHello
    attach: _work_pb2.Work
    cancel: _work_pb2.Cancel
    heartbeat: _work_pb2.Heartbeat
    drain: _work_pb2.Drain
    flush: _work_pb2.FlushPrefixCache
    load_adapter: _work_pb2.LoadAdapter
    unload_adapter: _work_pb2.UnloadAdapter
    def __init__(self, hello: _Optional[_Union[_work_pb2.GatewayHello, _Mapping]] = ..., attach: _Optional[_Union[_work_pb2.Work, _Mapping]] = ..., cancel: _Optional[_Union[_work_pb2.Cancel, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ..., drain: _Optional[_Union[_work_pb2.Drain, _Mapping]] = ..., flush: _Optional[_Union[_work_pb2.FlushPrefixCache, _Mapping]] = ..., load_adapter: _Optional[_Union[_work_pb2.LoadAdapter, _Mapping]] = ..., unload_adapter: _Optional[_Union[_work_pb2.UnloadAdapter, _Mapping]] = ...) -> None: ...

class DecodeServiceLinkResponse(_message.Message):
    __slots__ = ("hello", "step", "heartbeat", "flushed", "prompt_scores", "adapter_answer")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    FLUSHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SCORES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_ANSWER_FIELD_NUMBER: _ClassVar[int]
    hello: _work_pb2.WorkerHello
    step: StepBatch
    heartbeat: _work_pb2.Heartbeat
    flushed: _work_pb2.PrefixCacheFlushed
    prompt_scores: _work_pb2.PromptScores
    adapter_answer: _work_pb2.AdapterAnswer
    def __init__(self, hello: _Optional[_Union[_work_pb2.WorkerHello, _Mapping]] = ..., step: _Optional[_Union[StepBatch, _Mapping]] = ..., heartbeat: _Optional[_Union[_work_pb2.Heartbeat, _Mapping]] = ..., flushed: _Optional[_Union[_work_pb2.PrefixCacheFlushed, _Mapping]] = ..., prompt_scores: _Optional[_Union[_work_pb2.PromptScores, _Mapping]] = ..., adapter_answer: _Optional[_Union[_work_pb2.AdapterAnswer, _Mapping]] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("tokens", "ended")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[_work_pb2.Tokens]
    ended: _containers.RepeatedCompositeFieldContainer[DecodeEnded]
    def __init__(self, tokens: _Optional[_Iterable[_Union[_work_pb2.Tokens, _Mapping]]] = ..., ended: _Optional[_Iterable[_Union[DecodeEnded, _Mapping]]] = ...) -> None: ...

class DecodeEnded(_message.Message):
    __slots__ = ("id", "finished", "preempted", "failure", "times", "choice")
    ID_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    PREEMPTED_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    id: _work_pb2.AttemptId
    finished: _work_pb2.FinishReason
    preempted: Preempted
    failure: _work_pb2.Failure
    times: _work_pb2.PhaseTimes
    choice: int
    def __init__(self, id: _Optional[_Union[_work_pb2.AttemptId, _Mapping]] = ..., finished: _Optional[_Union[_work_pb2.FinishReason, str]] = ..., preempted: _Optional[_Union[Preempted, _Mapping]] = ..., failure: _Optional[_Union[_work_pb2.Failure, _Mapping]] = ..., times: _Optional[_Union[_work_pb2.PhaseTimes, _Mapping]] = ..., choice: _Optional[int] = ...) -> None: ...

class Preempted(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
