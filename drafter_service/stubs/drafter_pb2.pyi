from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftRequest(_message.Message):
    __slots__ = ("step", "starts", "finishes", "batch")
    STEP_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    step: int
    starts: _containers.RepeatedCompositeFieldContainer[Start]
    finishes: _containers.RepeatedCompositeFieldContainer[Finish]
    batch: Batch
    def __init__(self, step: _Optional[int] = ..., starts: _Optional[_Iterable[_Union[Start, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[Finish, _Mapping]]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("sequence_id", "prompt")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    prompt: bytes
    def __init__(self, sequence_id: _Optional[int] = ..., prompt: _Optional[bytes] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("sequence_id", "tokens", "learn", "verified", "accepted")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    tokens: bytes
    learn: bool
    verified: int
    accepted: int
    def __init__(self, sequence_id: _Optional[int] = ..., tokens: _Optional[bytes] = ..., learn: bool = ..., verified: _Optional[int] = ..., accepted: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("sequence_ids", "tokens", "offsets", "verified", "accepted", "max_draft", "cost")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    tokens: bytes
    offsets: bytes
    verified: bytes
    accepted: bytes
    max_draft: bytes
    cost: float
    def __init__(self, sequence_ids: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., verified: _Optional[bytes] = ..., accepted: _Optional[bytes] = ..., max_draft: _Optional[bytes] = ..., cost: _Optional[float] = ...) -> None: ...

class DraftReply(_message.Message):
    __slots__ = ("step", "drafts", "error")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    step: int
    drafts: Drafts
    error: Error
    def __init__(self, step: _Optional[int] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("tokens", "parents", "odds", "source", "offsets")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    ODDS_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    parents: bytes
    odds: bytes
    source: bytes
    offsets: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., odds: _Optional[bytes] = ..., source: _Optional[bytes] = ..., offsets: _Optional[bytes] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...
