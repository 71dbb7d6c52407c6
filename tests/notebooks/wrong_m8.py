"""Wrong answers to the exercises about ranks, each with the words that its refusal must hold, and right variants.

Most are the solution with a piece of its text changed.
"""

import torch

from tests.notebooks.exercises import M8
from tests.notebooks.lessons import RightAnswers, WrongAnswers

LESSON = M8.lesson
WRONG: WrongAnswers = {}

changed = LESSON.solution("first_of_each")
WRONG["m8.order"] = [
    (LESSON.defined("first_of_each", {}), "tokens of different requests"),
    (lambda waiting: sorted({each.rid for each in waiting}), "the same choice, a wrong one"),
    (changed("    return ids", "    return sorted(ids)"), "the same order, a wrong one"),
    (changed("    return ids", "    return ids[::-1]"), "the same order, a wrong one"),
    (lambda waiting: [each.rid for each in waiting], "the same choice, a wrong one"),
    (lambda waiting: list({each.prompt: each.rid for each in waiting}.values()), "the same choice, a wrong one"),
    (lambda waiting: list({each.rid for each in waiting}), "tokens of different requests"),
]
RIGHT: RightAnswers = [
    (
        "m8.order",
        lambda waiting: [r.rid for n, r in enumerate(waiting) if r.prompt not in [e.prompt for e in waiting[:n]]],
    )
]

changed = LESSON.solution("RowParallel")
WRONG["m8.bias"] = [
    (LESSON.defined("RowParallel", {"torch": torch}), "in the sum 2 times"),
    (changed("bias if rank == 0 else None", "None"), "is not in the sum"),
    (changed("bias if rank == 0 else None", "bias if rank else None"), "is not in the sum"),
    (changed("self.weight, self.bias)", "self.weight, self.bias) * 2"), "do not add up"),
]
RIGHT.append(("m8.bias", changed("bias if rank == 0 else None", "bias * (rank == 0)")))

changed = LESSON.solution("encode")
WRONG["m8.images"] = [
    (LESSON.defined("encode", {}), "waits in all_gather for ever"),
    (changed("meeting.all_gather(rank, own)", "[own]"), "raised KeyError"),
    (lambda images, rank, meeting, tower: [tower(image) for image in sorted(images)], "in their order"),
    (changed("for number in range(len(images))]", "for number in found]"), "in their order"),
]
WRONG["m8.images"].append(
    (lambda images, rank, meeting, tower: [tower(image) for image in images], "the towers of all ranks have encoded")
)

changed = LESSON.solution("kept")
WRONG["m8.slices"] = [
    (changed("return 1, slice", "return 0, slice"), "o_proj is cut in dimension 1"),
    (changed("return 0, slice", "return 1, slice"), "q_proj is cut in dimension 0"),
    (changed("num_parts = min(number, size)", "num_parts = size"), "neighbours have the same one"),
    (changed("rank * num_parts // size", "rank % num_parts"), "neighbours have the same one"),
    (changed("heads.num_kv_heads\n", "heads.num_heads\n"), "k_proj"),
    (changed("rank * width", "0"), "yours: 0 to"),
]

changed = LESSON.solution("shares")
WRONG["m8.shares"] = [
    (lambda sizes, num_ranks: [list(range(rank, len(sizes), num_ranks)) for rank in range(num_ranks)], "patches"),
    (changed("-sizes[number]", "sizes[number]"), "patches"),
    (changed("-sizes[number]", "(-sizes[number], -number)"), "in another order than it got them"),
    (changed("loads.index(min(loads))", "len(loads) - 1 - loads[::-1].index(min(loads))"), "ties"),
    (changed("loads[rank] += sizes[number]", "loads[rank] += 1"), "patches"),
    (changed("    return found", "    return [each for each in found if each]"), "a list for each rank"),
    (changed("found[rank].append(number)", "found[rank].append(sizes[number])"), "every image once"),
    (changed("    return found", "    return [sorted(each) for each in found]"), "in another order than it got them"),
]
