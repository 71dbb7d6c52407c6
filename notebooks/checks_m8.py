"""Graders of the labs and exercises in m8's notebook, and the ranks that its cells run: threads of one process."""

import threading
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m8_parallel.models.shared_tower import shared_out

try:  # in the checkout, for the tests
    from notebooks.checks import Mismatch, check, grader, short, show_source
except ModuleNotFoundError:  # beside the notebook
    from checks import Mismatch, check, grader, short, show_source  # type: ignore[no-redef]

__all__ = ["Meeting", "Waiting", "check", "in_ranks", "on_rank", "show_source"]

PATIENCE_S = 2.0


# --- ranks as threads -------------------------------------------------------------------------------------------------


class Alone(Exception):
    """A collective in which not all ranks came."""


class Meeting:
    """The collectives of some ranks, which are threads."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size)
        self.brought: list[Any] = [None] * size

    def all_gather(self, rank: int, value: Any) -> list[Any]:
        """Return what all ranks have brought; wait for them."""
        self.brought[rank] = value
        try:
            self.barrier.wait(PATIENCE_S)
            found = list(self.brought)
            self.barrier.wait(PATIENCE_S)
        except threading.BrokenBarrierError:
            raise Alone(f"rank {rank} waits in all_gather, and not all others have come") from None
        return found


def in_ranks(size: int, call: Callable[[int, Meeting], Any]) -> list[Any]:
    """Return the results of `call(rank, meeting)` of all ranks, at the same time; an exception in place of a result."""
    meeting, results = Meeting(size), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = call(rank, meeting)
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


# --- the first lab: a set that iterates differently -------------------------------------------------------------------


class Name(str):
    """A `str` whose hash differs between ranks, as the hash of a `str` does between processes of Python."""

    rank = 0

    def __hash__(self) -> int:
        return zlib.crc32(f"{self.rank} {self!s}".encode())


def on_rank(rank: int, text: str) -> Name:
    """Return a text as it is on this rank."""
    name = Name(text)
    name.rank = rank
    return name


class Waiting(NamedTuple):
    """A request that waits."""

    rid: str
    prompt: str


def waiting_on(rank: int, requests: Sequence[tuple[str, str]]) -> list[Waiting]:
    """Return the same queue as it is on a rank."""
    return [Waiting(on_rank(rank, rid), on_rank(rank, prompt)) for rid, prompt in requests]


QUEUES: tuple[tuple[tuple[str, str], ...], ...] = (
    (("ann", "A"), ("bob", "B"), ("cid", "A"), ("dan", "C"), ("eve", "D"), ("fay", "B")),
    (("ann", "A"), ("bob", "A"), ("cid", "A")),
    (("zoe", "Z"), ("yan", "Y"), ("xia", "X"), ("wim", "W"), ("vic", "V"), ("uma", "Z"), ("tom", "T")),
    (),
)


@grader("m8.order")
def grade_order(first_of_each: Callable[[list[Waiting]], list[str]]) -> str:
    """The lab's function, repaired: one request of each prompt, the first, in the order of arrival."""
    rng = Random(0)
    queues = [*QUEUES, *(tuple((f"r{n}", f"p{rng.randrange(6)}") for n in range(12)) for _ in range(20))]
    for queue in queues:
        found = [list(map(str, first_of_each(waiting_on(rank, queue)))) for rank in range(4)]
        shown = ", ".join(f"{rid}: {prompt}" for rid, prompt in queue) or "nothing"
        if any(each != found[0] for each in found):
            rank = next(rank for rank, each in enumerate(found) if each != found[0])
            raise Mismatch(
                f"Waiting: {shown}. Rank 0 begins with {short(found[0])}, rank {rank} with {short(found[rank])}: "
                "the next all-reduce adds up tokens of different requests."
            )
        first: dict[str, str] = {}
        for rid, prompt in queue:
            first.setdefault(prompt, rid)
        if found[0] != list(first.values()):
            kind = "order" if sorted(found[0]) == sorted(first.values()) else "choice"
            raise Mismatch(
                f"Waiting: {shown}. All ranks have the same {kind}, a wrong one: {short(list(first.values()))} are the "
                f"first of each prompt, in the order of arrival; yours: {short(found[0])}."
            )
    return f"All ranks choose alike in {len(queues)} queues, by nothing but the order of arrival."


# --- the second lab: a bias that is added several times ---------------------------------------------------------------


@grader("m8.bias")
def grade_bias(layer_class: Callable[..., Callable[[Tensor], Tensor]]) -> str:
    """The lab's class, repaired: the parts of all ranks add up to the layer."""
    generator = torch.Generator().manual_seed(0)
    for size in (1, 2, 4):
        weight, bias, x = (torch.randn(*shape, generator=generator) for shape in ((6, 8), (6,), (3, 8)))
        expected = torch.nn.functional.linear(x, weight, bias)
        width = 8 // size
        outputs = [
            layer_class(weight[:, rank * width : (rank + 1) * width].clone(), bias.clone(), rank)(
                x[:, rank * width : (rank + 1) * width]
            )
            for rank in range(size)
        ]
        found = torch.stack(list(outputs)).sum(0)
        off = found - expected
        if off.abs().max() < 1e-4:
            continue
        times = float((off / bias).mean())
        if (off - times * bias).abs().max() < 1e-3:
            count = round(times) + 1
            said = f"The bias is in the sum {count} times" if count else "The bias is not in the sum"
            raise Mismatch(f"{size} ranks: {said}, and it must be there once.")
        raise Mismatch(
            f"{size} ranks: the parts do not add up to the layer; the largest difference is {off.abs().max():.3f}."
        )
    return "The parts of 1, 2 and 4 ranks add up to the layer."


# --- the third lab: a rank without images -----------------------------------------------------------------------------


def encoded(image: int) -> list[float]:
    """Stand for the tower: the embeddings of an image of so many patches."""
    return [image + place / 100 for place in range(image)]


@grader("m8.images")
def grade_images(encode: Callable[..., list[Any]]) -> str:
    """The lab's function, repaired: all ranks have the embeddings of all images, in their order, each encoded once."""
    for size, images in ((1, [3, 2]), (2, [3, 2]), (4, [3, 2]), (4, [1, 5, 2, 2, 4, 3]), (3, []), (2, [4])):
        calls: list[int] = []

        def tower(image: int, calls: list[int] = calls) -> list[float]:
            calls.append(image)
            return encoded(image)

        found = in_ranks(size, lambda rank, meeting, images=images: encode(images, rank, meeting, tower))  # type: ignore[misc]
        case = f"{size} rank{'s' * (size > 1)}, images of {short(images)} patches"
        for rank, result in enumerate(found):
            if isinstance(result, Exception) and not isinstance(result, Alone):
                raise Mismatch(f"{case}: rank {rank} raised {type(result).__name__}: {result}")
        for rank, result in enumerate(found):
            if isinstance(result, Alone):
                gone = [str(other) for other, each in enumerate(found) if not isinstance(each, Alone)]
                left = f"rank {gone[0]} has" if len(gone) == 1 else f"ranks {' and '.join(gone)} have"
                raise Mismatch(
                    f"{case}: rank {rank} waits in all_gather for ever, because {left} returned without it. Every rank "
                    "must call it, also one without images."
                )
            if not isinstance(result, list) or result != [encoded(image) for image in images]:
                raise Mismatch(
                    f"{case}: rank {rank} returns {short(result)}, not the embeddings of each image, in their order."
                )
        if sorted(calls) != sorted(images):
            raise Mismatch(f"{case}: the towers of all ranks have encoded images of {short(sorted(calls))} patches.")
    return "All ranks have all embeddings, in the order of the images, and each image was encoded once."


# --- exercises --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Heads:
    """Sizes of an attention layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int = field(default=32)


def expected_slice(name: str, heads: Heads, rank: int, size: int) -> tuple[int, slice]:
    """Return the dimension and the slice of a stored weight that a rank keeps."""
    if name == "o_proj":
        width = heads.num_heads * heads.head_dim // size
        return 1, slice(rank * width, (rank + 1) * width)
    number = heads.num_heads if name == "q_proj" else heads.num_kv_heads
    parts = min(number, size)
    part, width = rank * parts // size, number * heads.head_dim // parts
    return 0, slice(part * width, (part + 1) * width)


@grader("m8.slices")
def grade_slices(kept: Callable[[str, Any, int, int], tuple[int, slice]]) -> str:
    """`kept(name, heads, rank, size)`: dimension and slice that a rank keeps of q_proj, k_proj, v_proj or o_proj."""
    cases = [(Heads(4, 2, 4), 1), (Heads(8, 8, 4), 2), (Heads(8, 2, 4), 2), (Heads(8, 2, 16), 4), (Heads(8, 2, 4), 8)]
    cases.append((Heads(4, 1, 8), 4))
    for heads, size in cases:
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            number = heads.num_heads if name in ("q_proj", "o_proj") else heads.num_kv_heads
            length = number * heads.head_dim
            for rank in range(size):
                found, expected = kept(name, heads, rank, size), expected_slice(name, heads, rank, size)
                if not isinstance(found, tuple) or len(found) != 2 or not isinstance(found[1], slice):
                    raise Mismatch(
                        f"The result is a dimension and a slice, such as (0, slice(0, 8)); yours: {short(found)}."
                    )
                dimension, each = found
                if dimension != expected[0]:
                    raise Mismatch(
                        f"{name} is cut in dimension {expected[0]} of the stored weight; yours: {dimension}. A stored "
                        "weight is [outputs, inputs]: heads are outputs of q, k and v, and inputs of o."
                    )
                if each.indices(length) != expected[1].indices(length):
                    shared = heads.num_kv_heads < size and name in ("k_proj", "v_proj")
                    hint = " With fewer KV heads than ranks, neighbours have the same one." if shared else ""
                    raise Mismatch(
                        f"{name}, {heads.num_heads} heads of {heads.head_dim} and {heads.num_kv_heads} KV heads, rank "
                        f"{rank} of {size}: {expected[1].start} to {expected[1].stop}; yours: {each.start} to "
                        f"{each.stop}.{hint}"
                    )
    return f"The slices of {len(cases)} layers are right on every rank, also where ranks share a KV head."


@grader("m8.shares")
def grade_shares(shares: Callable[[list[int], int], list[list[int]]]) -> str:
    """`shares(sizes, num_ranks)`: the images of each rank, by the rule of the engine."""
    rng = Random(0)
    cases = [([5, 3, 3], 2), ([4, 4], 2), ([7], 3), ([], 2), ([1, 9, 1, 1, 1, 1, 1, 1, 1], 2)]
    cases += [([rng.randrange(1, 40) for _ in range(rng.randrange(12))], rng.randrange(1, 5)) for _ in range(40)]
    for sizes, num_ranks in cases:
        found, expected = [list(each) for each in shares(list(sizes), num_ranks)], shared_out(sizes, num_ranks)
        case = f"images of {short(sizes)} patches, {num_ranks} ranks"
        if len(found) != num_ranks:
            raise Mismatch(f"{case}: a list for each rank, also for one without images; yours: {short(found)}.")
        if sorted(index for each in found for index in each) != list(range(len(sizes))):
            raise Mismatch(f"{case}: every image once; yours: {short(found)}.")
        if found != expected:
            if [sorted(each) for each in found] == [sorted(each) for each in expected]:
                raise Mismatch(f"{case}: each rank has the right images, and in another order than it got them.")
            loads = [[sum(sizes[index] for index in each) for each in parts] for parts in (expected, found)]
            raise Mismatch(
                f"{case}: {short(expected)}, with {short(loads[0])} patches; yours: {short(found)}, with "
                f"{short(loads[1])}. All ranks must find the same shares, so the rule decides ties, too."
            )
    return f"The shares of {len(cases)} batches are those of the engine, ties included."
