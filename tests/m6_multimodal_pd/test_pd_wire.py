"""What goes over the wire comes back the same, and what is wrong with it is one kind of error, whatever it is."""

import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra import numpy as arrays_of

from m6_multimodal_pd.errors import WireError
from m6_multimodal_pd.wire import DTYPES, MAX_FRAMES, MAX_HEAD_BYTES, Codec

MAX_BYTES = 2**20


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """What messages have in common."""


class Picture(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Carries two arrays."""

    name: str
    features: np.ndarray
    positions: np.ndarray


class Tokens(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Carries numbers, and checks them itself."""

    ids: list[int]
    weight: float = 0.0

    def __post_init__(self) -> None:
        if self.ids[:1] == [13]:
            raise ValueError("thirteen comes first")
        if self.ids[:1] == [14]:
            raise KeyError("a bug")


class Tree(Message, frozen=True, tag=True, forbid_unknown_fields=True):
    """Is as deep as its sender likes."""

    branches: list["Tree"] = []
    pictures: list[np.ndarray] = []


CODEC: Codec[Message] = Codec(Picture | Tokens | Tree, MAX_BYTES)

PICTURE = Picture("cat", np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4), np.arange(6, dtype=np.int64))


def there_and_back(*arrays: np.ndarray) -> list[np.ndarray]:
    message = CODEC.decode(CODEC.encode(Tree(pictures=list(arrays))))
    assert isinstance(message, Tree)
    return message.pictures


def refused(frames: list[Any], codec: Codec[Message] = CODEC) -> str:
    with pytest.raises(WireError) as caught:
        codec.decode(frames)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 250
    return text


def head(*pictures: Any) -> bytes:
    """The head of a tree with these as its arrays."""
    return msgspec.msgpack.encode({"type": "Tree", "pictures": pictures})


ANY_ARRAY = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5))
)


@given(st.lists(ANY_ARRAY, max_size=4))
def test_arrays_of_all_kinds_come_back_the_same(arrays: list[np.ndarray]) -> None:
    for sent, received in zip(arrays, there_and_back(*arrays), strict=True):
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape)
        assert received.tobytes() == sent.tobytes()


@pytest.mark.parametrize(
    "array",
    [
        np.arange(24, dtype=np.int32).reshape(4, 6).T,
        np.arange(24, dtype=np.int64)[::-3],
        np.broadcast_to(np.float32(7), (3, 5)),
        np.arange(5, dtype=">i8"),
    ],
    ids="transposed strided broadcast big-endian".split(),
)
def test_arrays_of_any_layout_come_back_the_same(array: np.ndarray) -> None:
    (received,) = there_and_back(array)
    assert received.shape == array.shape
    assert received.dtype == array.dtype.newbyteorder("=")
    assert (received == array).all()


@pytest.mark.parametrize("shape", [(2, 3), (6,), (1, 1)])
def test_an_array_is_not_copied_where_its_bytes_are_those_of_its_frame(shape: tuple[int, ...]) -> None:
    array = np.ones(shape, np.float32)
    _, frame = CODEC.encode(Tree(pictures=[array]))
    assert np.shares_memory(np.frombuffer(frame, np.uint8), array)


@pytest.mark.parametrize("start", range(4))
def test_received_arrays_may_be_written_to_wherever_the_frame_begins(start: int) -> None:
    first, *others = CODEC.encode(PICTURE)
    moved = [memoryview(b"x" * start + other)[start:] for other in others]
    message = CODEC.decode([first, *moved])
    assert isinstance(message, Picture)
    assert message.features.flags.aligned
    message.features[:] = 0


@pytest.mark.parametrize(
    "message",
    [
        Tokens([2**64]),
        Tree(pictures=[np.zeros(3, object)]),
        Tree(pictures=[np.zeros(3, np.float64)]),
        Tree(pictures=[np.zeros(3, "U5")]),
        Tree(branches=[{1, 2j}]),  # type: ignore[list-item]
        Tokens(["\ud800"]),  # type: ignore[list-item]
    ],
    ids="large-int objects float64 texts complex surrogate".split(),
)
def test_what_cannot_be_sent_is_refused(message: Message) -> None:
    with pytest.raises(WireError, match="cannot be sent"):
        CODEC.encode(message)


def test_a_message_over_the_limit_is_refused_where_it_is_sent() -> None:
    half = np.zeros(MAX_BYTES // 2, np.uint8)
    with pytest.raises(WireError, match="too large"):
        CODEC.encode(Tree(pictures=[half, half, half]))
    with pytest.raises(WireError, match="are the limit"):  # the head is what is too much
        CODEC.encode(Tree(pictures=[half, half]))
    with pytest.raises(WireError, match="are the limit"):
        CODEC.encode(Tokens([1] * MAX_BYTES))
    with pytest.raises(WireError, match="frames"):
        CODEC.encode(Tree(pictures=[half[:1]] * MAX_FRAMES))
    with pytest.raises(WireError, match="head"):
        Codec[Message](Tokens, 4 * MAX_HEAD_BYTES).encode(Tokens([1] * MAX_HEAD_BYTES))


def test_a_large_array_is_refused_before_it_is_copied() -> None:
    array = np.broadcast_to(np.uint8(0), 2**33)
    with pytest.raises(WireError, match="too large"):
        CODEC.encode(Tree(pictures=[array]))


def test_a_message_over_the_limit_is_refused_where_it_is_read() -> None:
    large: Codec[Message] = Codec(Tree, 8 * MAX_BYTES)
    assert "are the limit" in refused(large.encode(Tree(pictures=[np.zeros(MAX_BYTES, np.uint8)])))
    assert "are the limit" in refused([b"\x90" * (MAX_BYTES + 1)])
    assert "0 frames" in refused([])
    assert "frames" in refused([head(), *[b""] * MAX_FRAMES])
    assert "head" in refused([bytes(MAX_HEAD_BYTES + 1)], Codec(Tree, 4 * MAX_HEAD_BYTES))


EIGHT = bytes(8)


@pytest.mark.parametrize(
    "frames",
    [
        [head(["float32", [3], 1]), EIGHT],
        [head(["float32", [2.0], 1]), EIGHT],
        [head(["float32", [-1, -2], 1]), EIGHT],
        [head(["float32", [True, 2], 1]), EIGHT],
        [head(["float32", [0, *[2**40] * 7], 1]), b""],
        [head(["uint8", [8, *[1] * 99], 1]), EIGHT],
        [head(["object", [1], 1]), EIGHT],
        [head([["x"], [1], 1]), EIGHT],
        [head(["int64", [1], 0]), EIGHT],
        [head(["int64", [1], 1], ["int64", [1], 1]), EIGHT],
        [head(["int64", [1], 1]), EIGHT, EIGHT],
        [head(["int64", [1], 1])],
        [head(), b""],
    ],
)
def test_an_array_that_is_not_what_its_head_says_is_refused(frames: list[bytes]) -> None:
    refused(frames)


def packed(**fields: Any) -> list[bytes]:
    return [msgspec.msgpack.encode(fields)]


@pytest.mark.parametrize(
    "frames",
    [
        [b""],
        [b"\x82\xa4type\xa4Tree\xa8branches\x91" * 5000],
        packed(type="Nobody"),
        packed(type="Tokens", ids=[], more=1),
        packed(type="Tokens", ids=[13]),
        packed(type="Tokens", ids=[14]),
        [*packed(type="Tokens", ids=[])[0:1], b""],
        [packed(type="Tokens", ids=[])[0] + b"\x00"],
        [packed(type="Picture", name="abcd")[0].replace(b"abcd", b"\xff\xfe\xfd\xfc")],
        packed(type="Tree", **{"x" * 5000 + "\n": 1}),
        [b"\x81\xa4type\xc7\x0c\xff" + b"\xff" * 12],
    ],
)
def test_a_head_that_is_no_message_is_refused(frames: list[bytes]) -> None:
    refused(frames)


def mutated(frames: list[bytes], random: np.random.Generator) -> list[bytes]:
    """The frames with some bytes changed, cut out or put in, or with frames lost, doubled or in another order."""
    changed = [bytearray(frame) for frame in frames]
    for _ in range(random.integers(1, 4)):
        frame = changed[int(random.integers(len(changed))) if random.random() < 0.3 else 0]
        place = int(random.integers(len(frame) + 1))
        kind = random.integers(5)
        if kind == 0 and place < len(frame):
            frame[place] = int(random.integers(256))
        elif kind == 1:
            del frame[place : place + int(random.integers(4))]
        elif kind == 2:
            frame[place:place] = random.bytes(int(random.integers(6)))
        elif kind == 3:
            frame[place : place + 5] = bytes([random.choice([0xC6, 0xDB, 0xDD, 0xDF])]) + b"\x7f\xff\xff\xff"
        else:
            changed.insert(int(random.integers(1, len(changed) + 1)), bytearray(frame[:place]))
            changed.pop(int(random.integers(1, len(changed))))
    return [bytes(frame) for frame in changed]


def test_no_bytes_raise_anything_else_or_cost_more_than_they_are() -> None:
    random = np.random.default_rng(8)
    sound = [
        CODEC.encode(message) for message in (PICTURE, Tokens(list(range(300))), Tree([Tree()], [np.ones(3, "i4")]))
    ]
    outcomes = []
    tracemalloc.start()
    try:
        for number in range(3000):
            if number % 4:
                frames = mutated(sound[number % 3], random)
            else:
                frames = [random.bytes(int(random.integers(64))) for _ in range(random.integers(4))]
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            try:
                CODEC.decode(frames)
                outcomes.append("read")
            except WireError:
                outcomes.append("refused")
            _, peak = tracemalloc.get_traced_memory()
            assert peak - before < 256 * 1024
    finally:
        tracemalloc.stop()
    assert outcomes.count("refused") > 1500
    assert outcomes.count("read") > 50  # the changes are small enough to get past the first checks
