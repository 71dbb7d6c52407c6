"""Every message comes back from the wire the same, and nothing that is not exactly one of them comes back at all.

A message without an example fails here. From the examples all else follows: each field in turn is left out, and filled
with what cannot be there.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields, is_dataclass
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import pytest

from m1_single_request import SamplingParams
from m1_single_request.sampler import LogprobRow
from m6_multimodal_pd.disaggregation.runtime import messages
from m6_multimodal_pd.disaggregation.runtime.credentials import GroupKeys
from m6_multimodal_pd.errors import WireError
from m6_multimodal_pd.multimodal.inputs import Modality, MultimodalDataItem, MultimodalInputs
from m6_multimodal_pd.wire import Codec

UNIONS: dict[str, Codec[Any]] = {
    name: Codec(getattr(messages, name), 2**20) for name in ("ToEngine", "ToRouter", "PeerMessage")
}
PARAMS = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    temperature=0.5,
    top_k=7,
    top_p=0.75,
    min_p=0.125,
    presence_penalty=-1.5,
    frequency_penalty=0.5,
    repetition_penalty=1.25,
    logit_bias={4: -3.5, 2: 100.0},
    stop=("né", "\n"),
    stop_token_ids=(7, 3),
    include_stop_str_in_output=True,
    ignore_eos=True,
    seed=-(2**63),
    logprobs=2,
    prompt_logprobs=0,
    skip_special_tokens=False,
    n=2,
)
"""No field has its default."""
ITEM = MultimodalDataItem(
    modality=Modality.VIDEO,
    offsets=((2, 4), (6, 8)),
    feature=np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3),
    grid_thw=(2, 2, 2),
    hash="0123456789abcdef" * 4,
    size=(640, 480),
)
MEDIA = MultimodalInputs((ITEM,), np.arange(27, dtype=np.int64).reshape(3, 9), -4, b"\x00\xff")
JOB = messages.Job("réq-1", (1, 2, 3), (4,), PARAMS, 2**63 - 1, -5, "salt", True, MEDIA)
ROW = LogprobRow((5, 0), (-0.5, float("-inf")), (1, 2))
FAULT = messages.Fault("PromptTooLongError", "too long")
TICKET = messages.Ticket(3, "segment", 8, 5, (2**32 - 1, 0, 7))
MEMORY = messages.DeviceSegment("GPU-8f6b", 2**40, b"\x00handle", 512, "/torch_71_9_0", 9_999)
TOLD = messages.ReportedEvent("admit", ("a", "b"), "said", (("room", 1 - 2**62), ("side", "decode")))

EXAMPLES: list[messages.Message] = [
    messages.Prefill(2**62 - 1, JOB, "decode-0"),
    messages.Decode(0, JOB, "prefill-0"),
    messages.Generate(1, JOB),
    messages.Cancel(5),
    messages.PeerLost("prefill-1"),
    messages.Probe(),
    messages.Refused("its page_size is 8"),
    messages.LengthFixed(4096),
    messages.Call(2**31 - 1, "update_weights", "/a/directory"),
    messages.LengthFitted("decode", 4096, False),
    messages.Joined("decode", 16, 4096, 512, "float32[2, 16]", "tiny", "0" * 64),
    messages.Failed(FAULT),
    messages.Heartbeat(),
    messages.StepEvents(7, (TOLD,)),
    messages.Tokens(5, 1, (3, 4), (ROW, None), (ROW,), 8, 4, 2),
    messages.Ended(5, FAULT, True),
    messages.Answer(1, msgspec.Raw(msgspec.msgpack.encode({"a": [1, None]})), FAULT),
    messages.Relay("decode-0", messages.Received(5)),
    messages.Preallocated(5, 32, ("GPU-8f6b",)),
    messages.Offer(TICKET, MEMORY),
    messages.Chunk(5, 0, 2, 3, TICKET),
    messages.Taken(3, False, "no memory"),
    messages.FirstToken(5, 2, 7, ROW, (ROW, ROW), 16),
    messages.Received(5),
    messages.RoomFailed(5, "why"),
]
BY_NAME = {type(example).__name__: example for example in EXAMPLES}
NOTHING_OPTIONAL = [
    messages.Prefill(1, messages.Job("r", (1,), (), SamplingParams(), 0, 0, None, False, None), "d"),
    messages.Call(1, "stats"),
    messages.Tokens(5, 0, (), (), None, 0, 0, 0),
    messages.Ended(5, None, False),
    messages.Answer(1, msgspec.Raw(msgspec.msgpack.encode(None)), None),
    messages.FirstToken(5, 0, 7, None, None, 0),
    messages.Chunk(5, 0, 0, 1, messages.Ticket(0, "s", 1, 0)),
]
EXAMPLE = pytest.mark.parametrize("name", sorted(BY_NAME))


def codec_of(message: Any) -> Codec[Any]:
    """The first union that has this type."""
    return next(codec for name, codec in UNIONS.items() if type(message) in get_args(getattr(messages, name)))


def plain(value: Any) -> Any:
    """A message as nested tuples and lists, so that arrays can be compared, too."""
    if isinstance(value, msgspec.Struct):
        return type(value), [plain(getattr(value, name)) for name in value.__struct_fields__]
    if is_dataclass(value):
        return type(value), [plain(getattr(value, own.name)) for own in fields(value)]
    if isinstance(value, np.ndarray):
        return value.dtype.name, value.shape, value.tobytes()
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    return bytes(value) if isinstance(value, msgspec.Raw) else value


# --- what goes comes back ---------------------------------------------------------------------------------------------


def test_every_message_is_in_a_union_and_has_an_example() -> None:
    defined = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, messages.Message) and value is not messages.Message
    }
    in_unions = Counter(kind for name in UNIONS for kind in get_args(getattr(messages, name)))
    assert {kind for kind, number in in_unions.items() if number > 1} == {messages.Relay}, "each other one goes one way"
    assert defined == set(in_unions) == {type(example) for example in EXAMPLES}


def test_the_parts_of_messages_are_in_an_example() -> None:
    defined = {
        value
        for value in vars(messages).values()
        if isinstance(value, type) and issubclass(value, messages.Value) and not issubclass(value, messages.Message)
    }
    parts = {type(part) for example in EXAMPLES for _, part in structs(example)}
    assert defined - {messages.Value, messages.Order} <= parts
    assert all(getattr(PARAMS, name) != value for name, value in asdict(SamplingParams()).items())


@pytest.mark.parametrize("message", [*EXAMPLES, *NOTHING_OPTIONAL], ids=lambda message: type(message).__name__)
def test_a_message_comes_back_the_same(message: Any) -> None:
    codec = codec_of(message)
    assert plain(codec.decode(codec.encode(message))) == plain(message)


def test_an_order_comes_back_the_same() -> None:
    order = messages.Order("p-0", "prefill", "tcp://x", GroupKeys.generate().engines, "owner", True, 2, '{"a": "\\n"}')
    line = msgspec.json.encode(order)
    assert b"\n" not in line and msgspec.json.decode(line, type=messages.Order) == order


# --- what is wrong is refused -----------------------------------------------------------------------------------------

Path = tuple[str | int, ...]


def structs(value: Any, path: Path = ()) -> Iterator[tuple[Path, msgspec.Struct]]:
    """All structs in a message, and where they stand in its head."""
    if isinstance(value, msgspec.Struct):
        yield path, value
        for name in value.__struct_fields__:
            yield from structs(getattr(value, name), (*path, name))
    elif isinstance(value, tuple):
        for index, one in enumerate(value):
            yield from structs(one, (*path, index))


class Changed:
    """The frames of a message, with a part of the head changed."""

    def __init__(self, message: Any) -> None:
        self.codec = codec_of(message)
        first, *self.arrays = self.codec.encode(message)
        self.head = msgspec.msgpack.decode(first, strict=False)

    def at(self, path: Path) -> Any:
        found = self.head
        for step in path:
            found = found[step]
        return found

    def read(self) -> Any:
        return self.codec.decode([msgspec.msgpack.encode(self.head), *self.arrays])

    def is_refused(self) -> bool:
        try:
            self.read()
        except WireError:
            return True
        return False


@EXAMPLE
def test_a_message_with_a_field_too_many_is_refused_wherever_it_is(name: str) -> None:
    for path, _ in structs(BY_NAME[name]):
        changed = Changed(BY_NAME[name])
        changed.at(path)["and_more"] = 1
        assert changed.is_refused(), path


@EXAMPLE
def test_a_message_without_one_of_its_fields_is_refused(name: str) -> None:
    for path, part in structs(BY_NAME[name]):
        for own in msgspec.structs.fields(part):
            changed = Changed(BY_NAME[name])
            del changed.at(path)[own.name]
            assert changed.is_refused() == own.required, (path, own.name)


@EXAMPLE
@pytest.mark.parametrize("value", [{"x": 1}, [[[]]], 1.5, None], ids=["map", "list", "float", "nothing"])
def test_a_field_with_a_value_of_another_type_is_refused(name: str, value: Any) -> None:
    for path, part in structs(BY_NAME[name]):
        hints = get_type_hints(type(part), include_extras=True)
        for own in part.__struct_fields__:
            allows_none = type(None) in get_args(hints[own])
            if hints[own] is msgspec.Raw or (value is None and allows_none) or hints[own] is SamplingParams:
                continue
            changed = Changed(BY_NAME[name])
            changed.at(path)[own] = value
            assert changed.is_refused(), (path, own)


OF_A_TICKET = get_type_hints(messages.Ticket, include_extras=True)
OF_A_GPU = get_type_hints(messages.DeviceSegment, include_extras=True)


@pytest.mark.parametrize(
    ("kind", "wrong", "right"),
    [
        (OF_A_TICKET["num_frames"], [0, 2**31], [1, 2**31 - 1]),
        (OF_A_TICKET["segment"], ["x" * 129], ["", "x" * 128]),
        (OF_A_GPU["num_bytes"], [0, 2**62], [1, 2**62 - 1]),
        (OF_A_GPU["handle"], [b"", bytes(513)], [b"x", bytes(512)]),
        (OF_A_GPU["counter"], ["/torch_1_2", "/other_1_2_3", "../torch_1_2_3", "/torch_1_2_3\n"], ["/torch_1_22_3"]),
        (messages.Count, [-1, 2**31], [0, 2**31 - 1]),
        (messages.Token, [-1, 2**31], [0, 2**31 - 1]),
        (messages.Count32, [-1, 2**32], [0, 2**32 - 1]),
        (messages.Room, [-1, 2**62, 2**63], [0, 2**62 - 1]),
        (messages.Number, [-(2**62), 2**62], [1 - 2**62, 2**62 - 1]),
        (messages.Name, ["", "x" * 65], ["x", "x" * 64]),
        (messages.Text, ["x" * 4097], ["", "x" * 4096]),
        (messages.Digest, ["0" * 63, "0" * 65, "A" * 64, "0" * 64 + "\n"], ["0" * 64, "f" * 64]),
    ],
)
def test_numbers_and_texts_have_a_range(kind: Any, wrong: list[Any], right: list[Any]) -> None:
    for value in right:
        assert msgspec.convert(value, kind) == value
    for value in wrong:
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(value, kind)


def types_in(hint: Any) -> Iterator[Any]:
    """A type and those in it, but none that has a range."""
    if get_origin(hint) not in (Annotated, Literal):
        yield hint
        for inner in get_args(hint):
            yield from types_in(inner)


def test_every_number_and_text_of_ours_has_a_range() -> None:
    """A count without one could be anything up to 64 bits. What a user gives an engine is limited at intake."""
    without = {
        f"{kind.__name__}.{own}"
        for kind in {type(part) for example in EXAMPLES for _, part in structs(example)}
        for own, hint in get_type_hints(kind, include_extras=True).items()
        if {int, str} & set(types_in(hint))
    }
    assert without == {"Job.seed", "Job.priority", "Job.cache_salt", "ReportedEvent.rids", "ReportedEvent.text"}


PARAMS_PATH, ITEM_PATH = ("job", "params"), ("job", "media", "mm_items", 0)
OF_A_JOB: list[tuple[Path, Any]] = [
    (PARAMS_PATH, "greedy"),
    # sampling parameters are checked by their own class: all values are in m1's tests
    ((*PARAMS_PATH, "temperature"), -1.0),
    ((*PARAMS_PATH, "seed"), 2**63),
    ((*ITEM_PATH, "modality"), "sound"),
    ((*ITEM_PATH, "offsets"), [[1, 2, 3]]),
    ((*ITEM_PATH, "hash"), 5),
    *(((*ITEM_PATH, "feature"), value) for value in (None, b"bytes", [1.0, 2.0])),
]


@pytest.mark.parametrize(("path", "value"), OF_A_JOB, ids=str)
def test_the_parameters_and_the_items_of_a_job_are_checked(path: Path, value: Any) -> None:
    changed = Changed(BY_NAME["Prefill"])
    changed.at(path[:-1])[path[-1]] = value
    assert changed.is_refused()


def refused_media(item: Any, **changes: Any) -> str:
    """The words of a refusal of a job with such arrays. They are put in as a stranger would: without their checks."""
    head: dict[str, Any] = {"mm_items": [ITEM], "mrope_positions": MEDIA.mrope_positions} | changes
    if item is not None:
        head["mm_items"] = [{own.name: getattr(ITEM, own.name) for own in fields(ITEM)} | {"feature": item}]
    media = {"mrope_position_delta": 0, "options_key": b""} | head
    job = {name: getattr(JOB, name) for name in JOB.__struct_fields__} | {"media": media}
    frames = UNIONS["ToEngine"].encode({"type": "Prefill", "room": 1, "job": job, "decode": "d"})
    with pytest.raises(WireError) as caught:
        UNIONS["ToEngine"].decode(frames)
    return str(caught.value)


@pytest.mark.parametrize("feature", [np.zeros((8, 3), np.float16), np.zeros(24, np.float32)])
def test_a_feature_is_a_matrix_of_floats(feature: np.ndarray) -> None:
    assert "a feature is float32 [patches, patch_dim]" in refused_media(feature)


@pytest.mark.parametrize("positions", [np.zeros((3, 9), np.int32), np.zeros((9, 3), np.int64), np.zeros((), np.int64)])
def test_positions_are_three_rows_of_whole_numbers(positions: np.ndarray) -> None:
    assert "M-RoPE positions are int64 [3, tokens]" in refused_media(None, mrope_positions=positions)
