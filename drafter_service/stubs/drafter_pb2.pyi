from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DraftShape(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DRAFT_SHAPE_UNSPECIFIED: _ClassVar[DraftShape]
    DRAFT_SHAPE_PATH: _ClassVar[DraftShape]
    DRAFT_SHAPE_TREE: _ClassVar[DraftShape]
DRAFT_SHAPE_UNSPECIFIED: DraftShape
DRAFT_SHAPE_PATH: DraftShape
DRAFT_SHAPE_TREE: DraftShape

class DraftRequest(_message.Message):
    __slots__ = ("step", "hello", "starts", "finishes", "batch", "counters", "draft_counts")
    STEP_FIELD_NUMBER: _ClassVar[int]
    HELLO_FIELD_NUMBER: _ClassVar[int]
    STARTS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    hello: Hello
    starts: _containers.RepeatedCompositeFieldContainer[Start]
    finishes: _containers.RepeatedCompositeFieldContainer[Finish]
    batch: Batch
    counters: ClientCounters
    draft_counts: DraftCounts
    def __init__(self, step: _Optional[int] = ..., hello: _Optional[_Union[Hello, _Mapping]] = ..., starts: _Optional[_Iterable[_Union[Start, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[Finish, _Mapping]]] = ..., batch: _Optional[_Union[Batch, _Mapping]] = ..., counters: _Optional[_Union[ClientCounters, _Mapping]] = ..., draft_counts: _Optional[_Union[DraftCounts, _Mapping]] = ...) -> None: ...

class DraftCounts(_message.Message):
    __slots__ = ("hits", "by_source", "by_position", "by_age", "calibration", "unlearned_steps", "unlearned_tokens")
    HITS_FIELD_NUMBER: _ClassVar[int]
    BY_SOURCE_FIELD_NUMBER: _ClassVar[int]
    BY_POSITION_FIELD_NUMBER: _ClassVar[int]
    BY_AGE_FIELD_NUMBER: _ClassVar[int]
    CALIBRATION_FIELD_NUMBER: _ClassVar[int]
    UNLEARNED_STEPS_FIELD_NUMBER: _ClassVar[int]
    UNLEARNED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hits: int
    by_source: bytes
    by_position: bytes
    by_age: bytes
    calibration: bytes
    unlearned_steps: int
    unlearned_tokens: int
    def __init__(self, hits: _Optional[int] = ..., by_source: _Optional[bytes] = ..., by_position: _Optional[bytes] = ..., by_age: _Optional[bytes] = ..., calibration: _Optional[bytes] = ..., unlearned_steps: _Optional[int] = ..., unlearned_tokens: _Optional[int] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("protocol", "client", "model", "namespace", "draft_shape", "step_sizes", "draft_lengths", "engine", "counted")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    CLIENT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_SHAPE_FIELD_NUMBER: _ClassVar[int]
    STEP_SIZES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    COUNTED_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    client: str
    model: Model
    namespace: str
    draft_shape: DraftShape
    step_sizes: bytes
    draft_lengths: bytes
    engine: str
    counted: ClientCounters
    def __init__(self, protocol: _Optional[int] = ..., client: _Optional[str] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., namespace: _Optional[str] = ..., draft_shape: _Optional[_Union[DraftShape, str]] = ..., step_sizes: _Optional[bytes] = ..., draft_lengths: _Optional[bytes] = ..., engine: _Optional[str] = ..., counted: _Optional[_Union[ClientCounters, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "tokenizer", "adapter", "vocab_size", "vocabulary", "configuration")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    tokenizer: str
    adapter: str
    vocab_size: int
    vocabulary: str
    configuration: str
    def __init__(self, name: _Optional[str] = ..., tokenizer: _Optional[str] = ..., adapter: _Optional[str] = ..., vocab_size: _Optional[int] = ..., vocabulary: _Optional[str] = ..., configuration: _Optional[str] = ...) -> None: ...

class Held(_message.Message):
    __slots__ = ("tokens", "other", "other_tokens")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OTHER_FIELD_NUMBER: _ClassVar[int]
    OTHER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    other: str
    other_tokens: int
    def __init__(self, tokens: _Optional[int] = ..., other: _Optional[str] = ..., other_tokens: _Optional[int] = ...) -> None: ...

class Welcome(_message.Message):
    __slots__ = ("protocol", "namespace", "may_learn", "max_draft", "max_sequences", "max_tokens", "held", "vocab_size")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MAY_LEARN_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    namespace: str
    may_learn: bool
    max_draft: int
    max_sequences: int
    max_tokens: int
    held: Held
    vocab_size: int
    def __init__(self, protocol: _Optional[int] = ..., namespace: _Optional[str] = ..., may_learn: bool = ..., max_draft: _Optional[int] = ..., max_sequences: _Optional[int] = ..., max_tokens: _Optional[int] = ..., held: _Optional[_Union[Held, _Mapping]] = ..., vocab_size: _Optional[int] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("sequence_id", "prompt", "committed", "session_id", "request_id", "learn", "hints", "shadow", "rollout", "seed", "age_s")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    HINTS_FIELD_NUMBER: _ClassVar[int]
    SHADOW_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    prompt: bytes
    committed: bytes
    session_id: str
    request_id: str
    learn: bool
    hints: bytes
    shadow: bool
    rollout: Rollout
    seed: int
    age_s: float
    def __init__(self, sequence_id: _Optional[int] = ..., prompt: _Optional[bytes] = ..., committed: _Optional[bytes] = ..., session_id: _Optional[str] = ..., request_id: _Optional[str] = ..., learn: bool = ..., hints: _Optional[bytes] = ..., shadow: bool = ..., rollout: _Optional[_Union[Rollout, _Mapping]] = ..., seed: _Optional[int] = ..., age_s: _Optional[float] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("group", "version")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    group: str
    version: int
    def __init__(self, group: _Optional[str] = ..., version: _Optional[int] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("sequence_id", "tokens", "learn", "verified", "steps")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: int
    tokens: bytes
    learn: bool
    verified: int
    steps: int
    def __init__(self, sequence_id: _Optional[int] = ..., tokens: _Optional[bytes] = ..., learn: bool = ..., verified: _Optional[int] = ..., steps: _Optional[int] = ...) -> None: ...

class Batch(_message.Message):
    __slots__ = ("sequence_ids", "tokens", "offsets", "verified", "max_draft", "cost", "steps", "step_tokens", "step_sequences", "step_seconds", "drafting_seconds", "other_tokens", "other_sequences", "min_path_prob")
    SEQUENCE_IDS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFT_FIELD_NUMBER: _ClassVar[int]
    COST_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STEP_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTING_SECONDS_FIELD_NUMBER: _ClassVar[int]
    OTHER_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OTHER_SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    MIN_PATH_PROB_FIELD_NUMBER: _ClassVar[int]
    sequence_ids: bytes
    tokens: bytes
    offsets: bytes
    verified: bytes
    max_draft: bytes
    cost: float
    steps: bytes
    step_tokens: bytes
    step_sequences: bytes
    step_seconds: bytes
    drafting_seconds: bytes
    other_tokens: int
    other_sequences: int
    min_path_prob: float
    def __init__(self, sequence_ids: _Optional[bytes] = ..., tokens: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., verified: _Optional[bytes] = ..., max_draft: _Optional[bytes] = ..., cost: _Optional[float] = ..., steps: _Optional[bytes] = ..., step_tokens: _Optional[bytes] = ..., step_sequences: _Optional[bytes] = ..., step_seconds: _Optional[bytes] = ..., drafting_seconds: _Optional[bytes] = ..., other_tokens: _Optional[int] = ..., other_sequences: _Optional[int] = ..., min_path_prob: _Optional[float] = ...) -> None: ...

class ClientCounters(_message.Message):
    __slots__ = ("timeouts", "dropped", "resyncs", "reconnects")
    TIMEOUTS_FIELD_NUMBER: _ClassVar[int]
    DROPPED_FIELD_NUMBER: _ClassVar[int]
    RESYNCS_FIELD_NUMBER: _ClassVar[int]
    RECONNECTS_FIELD_NUMBER: _ClassVar[int]
    timeouts: int
    dropped: int
    resyncs: int
    reconnects: int
    def __init__(self, timeouts: _Optional[int] = ..., dropped: _Optional[int] = ..., resyncs: _Optional[int] = ..., reconnects: _Optional[int] = ...) -> None: ...

class DraftResponse(_message.Message):
    __slots__ = ("step", "drafts", "error", "welcome", "lost_ids")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    LOST_IDS_FIELD_NUMBER: _ClassVar[int]
    step: int
    drafts: Drafts
    error: Error
    welcome: Welcome
    lost_ids: bytes
    def __init__(self, step: _Optional[int] = ..., drafts: _Optional[_Union[Drafts, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ..., welcome: _Optional[_Union[Welcome, _Mapping]] = ..., lost_ids: _Optional[bytes] = ...) -> None: ...

class Drafts(_message.Message):
    __slots__ = ("tokens", "parents", "accept_prob", "source", "offsets", "pause_steps")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    ACCEPT_PROB_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    PAUSE_STEPS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    parents: bytes
    accept_prob: bytes
    source: bytes
    offsets: bytes
    pause_steps: int
    def __init__(self, tokens: _Optional[bytes] = ..., parents: _Optional[bytes] = ..., accept_prob: _Optional[bytes] = ..., source: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., pause_steps: _Optional[int] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("protocol", "model", "namespace", "copy", "position", "max_tokens", "match_depth", "engine")
    PROTOCOL_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MATCH_DEPTH_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    protocol: int
    model: Model
    namespace: str
    copy: str
    position: int
    max_tokens: int
    match_depth: int
    engine: str
    def __init__(self, protocol: _Optional[int] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., namespace: _Optional[str] = ..., copy: _Optional[str] = ..., position: _Optional[int] = ..., max_tokens: _Optional[int] = ..., match_depth: _Optional[int] = ..., engine: _Optional[str] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("namespace", "copy", "snapshot", "changes", "position", "is_current", "seconds", "libraries")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    COPY_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    IS_CURRENT_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    LIBRARIES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    copy: str
    snapshot: bytes
    changes: _containers.RepeatedCompositeFieldContainer[Change]
    position: int
    is_current: bool
    seconds: float
    libraries: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., copy: _Optional[str] = ..., snapshot: _Optional[bytes] = ..., changes: _Optional[_Iterable[_Union[Change, _Mapping]]] = ..., position: _Optional[int] = ..., is_current: bool = ..., seconds: _Optional[float] = ..., libraries: _Optional[_Iterable[str]] = ...) -> None: ...

class Change(_message.Message):
    __slots__ = ("finished", "forgotten", "forgotten_before")
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_FIELD_NUMBER: _ClassVar[int]
    FORGOTTEN_BEFORE_FIELD_NUMBER: _ClassVar[int]
    finished: FinishedText
    forgotten: str
    forgotten_before: float
    def __init__(self, finished: _Optional[_Union[FinishedText, _Mapping]] = ..., forgotten: _Optional[str] = ..., forgotten_before: _Optional[float] = ...) -> None: ...

class FinishedText(_message.Message):
    __slots__ = ("tokens", "request_id", "time", "tag")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    TIME_FIELD_NUMBER: _ClassVar[int]
    TAG_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    request_id: str
    time: float
    tag: int
    def __init__(self, tokens: _Optional[bytes] = ..., request_id: _Optional[str] = ..., time: _Optional[float] = ..., tag: _Optional[int] = ...) -> None: ...

class Texts(_message.Message):
    __slots__ = ("tokens", "offsets", "request_ids", "prompt_lengths", "times", "tags")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    OFFSETS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    TIMES_FIELD_NUMBER: _ClassVar[int]
    TAGS_FIELD_NUMBER: _ClassVar[int]
    tokens: bytes
    offsets: bytes
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    prompt_lengths: bytes
    times: bytes
    tags: bytes
    def __init__(self, tokens: _Optional[bytes] = ..., offsets: _Optional[bytes] = ..., request_ids: _Optional[_Iterable[str]] = ..., prompt_lengths: _Optional[bytes] = ..., times: _Optional[bytes] = ..., tags: _Optional[bytes] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("namespace", "model", "texts")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    model: Model
    texts: Texts
    def __init__(self, namespace: _Optional[str] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., texts: _Optional[_Union[Texts, _Mapping]] = ...) -> None: ...

class ObserveResponse(_message.Message):
    __slots__ = ("tokens", "texts", "duplicates", "namespace", "held")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    DUPLICATES_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    tokens: int
    texts: int
    duplicates: int
    namespace: str
    held: Held
    def __init__(self, tokens: _Optional[int] = ..., texts: _Optional[int] = ..., duplicates: _Optional[int] = ..., namespace: _Optional[str] = ..., held: _Optional[_Union[Held, _Mapping]] = ...) -> None: ...

class ForgetRequest(_message.Message):
    __slots__ = ("namespace", "request_id", "older_than_s", "everything")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_S_FIELD_NUMBER: _ClassVar[int]
    EVERYTHING_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    request_id: str
    older_than_s: float
    everything: bool
    def __init__(self, namespace: _Optional[str] = ..., request_id: _Optional[str] = ..., older_than_s: _Optional[float] = ..., everything: bool = ...) -> None: ...

class ForgetResponse(_message.Message):
    __slots__ = ("snapshot_saved", "texts", "set_aside_files", "is_shared")
    SNAPSHOT_SAVED_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FILES_FIELD_NUMBER: _ClassVar[int]
    IS_SHARED_FIELD_NUMBER: _ClassVar[int]
    snapshot_saved: bool
    texts: int
    set_aside_files: _containers.RepeatedScalarFieldContainer[str]
    is_shared: bool
    def __init__(self, snapshot_saved: bool = ..., texts: _Optional[int] = ..., set_aside_files: _Optional[_Iterable[str]] = ..., is_shared: bool = ...) -> None: ...

class ReportRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class ReportResponse(_message.Message):
    __slots__ = ("json",)
    JSON_FIELD_NUMBER: _ClassVar[int]
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ("namespace",)
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    def __init__(self, namespace: _Optional[str] = ...) -> None: ...

class SnapshotResponse(_message.Message):
    __slots__ = ("saved",)
    SAVED_FIELD_NUMBER: _ClassVar[int]
    saved: _containers.RepeatedCompositeFieldContainer[SavedSnapshot]
    def __init__(self, saved: _Optional[_Iterable[_Union[SavedSnapshot, _Mapping]]] = ...) -> None: ...

class SavedSnapshot(_message.Message):
    __slots__ = ("namespace", "bytes", "seconds")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SECONDS_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    bytes: int
    seconds: float
    def __init__(self, namespace: _Optional[str] = ..., bytes: _Optional[int] = ..., seconds: _Optional[float] = ...) -> None: ...

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[Namespace]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[Namespace, _Mapping]]] = ...) -> None: ...

class Namespace(_message.Message):
    __slots__ = ("name", "model", "is_loaded", "tokens", "capacity", "memory_bytes", "streams", "idle_s", "set_aside_files", "is_default")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    IS_LOADED_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    CAPACITY_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STREAMS_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FILES_FIELD_NUMBER: _ClassVar[int]
    IS_DEFAULT_FIELD_NUMBER: _ClassVar[int]
    name: str
    model: Model
    is_loaded: bool
    tokens: int
    capacity: int
    memory_bytes: int
    streams: int
    idle_s: float
    set_aside_files: _containers.RepeatedScalarFieldContainer[str]
    is_default: bool
    def __init__(self, name: _Optional[str] = ..., model: _Optional[_Union[Model, _Mapping]] = ..., is_loaded: bool = ..., tokens: _Optional[int] = ..., capacity: _Optional[int] = ..., memory_bytes: _Optional[int] = ..., streams: _Optional[int] = ..., idle_s: _Optional[float] = ..., set_aside_files: _Optional[_Iterable[str]] = ..., is_default: bool = ...) -> None: ...

class DropNamespaceRequest(_message.Message):
    __slots__ = ("namespace", "set_aside_only")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_ONLY_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    set_aside_only: bool
    def __init__(self, namespace: _Optional[str] = ..., set_aside_only: bool = ...) -> None: ...

class DropNamespaceResponse(_message.Message):
    __slots__ = ("set_aside_files",)
    SET_ASIDE_FILES_FIELD_NUMBER: _ClassVar[int]
    set_aside_files: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, set_aside_files: _Optional[_Iterable[str]] = ...) -> None: ...
