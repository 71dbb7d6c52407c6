"""Typical mistakes in a composer, each with the hint that it must get."""

from typing import Any

import numpy as np

from m5_chunked_prefill_spec.batch_composer import DecodeFirst, PrefillFirst


class LetsStreamsWait(DecodeFirst):
    """Prompts alone, as long as there are any."""

    def compose(self, work: Any) -> Any:
        return PrefillFirst().compose(work)


class FillsTheStepTwice(DecodeFirst):
    """Prompts get the whole budget beside decodes."""

    def _limit(self, work: Any, most: int, new_lens: np.ndarray, seq_lens: np.ndarray) -> tuple[int, str]:
        return super()._limit(work, work.max_num_batched_tokens, new_lens, seq_lens)


class InOrder(DecodeFirst):
    """Decodes, then prompts: the mistakes below change one of these numbers."""

    def compose(self, work: Any) -> Any:
        if work.wants_prefill and work.may_preempt:
            return super().compose(work)
        left = work.max_num_batched_tokens - work.num_running
        decodes = work.update_running_batch(self.most_drafts(work, left))
        if decodes is None:
            return self.prompts_alone(work)
        if not work.wants_prefill:
            return decodes
        prompts = work.get_new_batch_prefill(
            *self._limit(work, self.rest(work, left, decodes), decodes.new_lens, decodes.seq_lens)
        )
        return self.together(work, prompts, decodes)

    def most_drafts(self, work: Any, left: int) -> int:
        return left // 2 if work.wants_prefill else left

    def rest(self, work: Any, left: int, decodes: Any) -> int:
        return work.max_num_batched_tokens - int(decodes.new_lens.sum())

    def prompts_alone(self, work: Any) -> Any:
        return work.get_new_batch_prefill(work.max_num_batched_tokens)

    def together(self, work: Any, prompts: Any, decodes: Any) -> Any:
        return decodes if prompts is None else work.mix(prompts, decodes)


class ForgetsDrafts(InOrder):
    """Drafts are not counted against the budget of prompts."""

    def rest(self, work: Any, left: int, decodes: Any) -> int:
        return left


class KeepsHalf(InOrder):
    """Half of the rest is kept for drafts, whether there are any or not."""

    def rest(self, work: Any, left: int, decodes: Any) -> int:
        return left - left // 2


class LetsDraftsTakeAll(InOrder):
    """Drafts may take the whole rest while a prompt waits."""

    def most_drafts(self, work: Any, left: int) -> int:
        return left


class HalvesAlways(InOrder):
    """Drafts take half of the rest even if no prompt waits."""

    def most_drafts(self, work: Any, left: int) -> int:
        return left // 2


class MixesNothing(InOrder):
    """The batches are mixed, whether there are two or not."""

    def together(self, work: Any, prompts: Any, decodes: Any) -> Any:
        return work.mix(prompts, decodes)


class LosesDecodes(InOrder):
    """The batch of the prompts is returned, and that of the decodes forgotten."""

    def together(self, work: Any, prompts: Any, decodes: Any) -> Any:
        return prompts or decodes


class LimitsPromptsAlone(InOrder):
    """The target limits a step in which no request decodes."""

    def prompts_alone(self, work: Any) -> Any:
        nothing = np.zeros(0, dtype=np.int64)
        return work.get_new_batch_prefill(*self._limit(work, work.max_num_batched_tokens, nothing, nothing))


class AsksAgain(InOrder):
    """Asks for the decodes once more if no prompt has room."""

    def together(self, work: Any, prompts: Any, decodes: Any) -> Any:
        return work.update_running_batch(0) if prompts is None else work.mix(prompts, decodes)


class NeverPreempts(DecodeFirst):
    """The decodes are first in every step."""

    def compose(self, work: Any) -> Any:
        work.may_preempt = False
        return super().compose(work)


class KeepsTokensOfThePreempted(DecodeFirst):
    """Preempted requests still have their tokens in the budget."""

    def _prompts_before_decodes(self, work: Any, left: int) -> Any:
        lens = work.running_lens
        prompts = work.get_new_batch_prefill(*self._limit(work, left, np.ones_like(lens), lens))
        decodes = work.update_running_batch(left - (0 if prompts is None else int(prompts.new_lens.sum())))
        return prompts or decodes if prompts is None or decodes is None else work.mix(prompts, decodes)


WRONG = [
    (LetsStreamsWait, "Decodes come before prompts"),
    (FillsTheStepTwice, "5 of 32 tokens are taken"),
    (ForgetsDrafts, "less all new_lens of the decodes"),
    (KeepsHalf, "less all new_lens of the decodes"),
    (LetsDraftsTakeAll, "Half of 27, rounded down, is for drafts"),
    (HalvesAlways, "32 less a token for each of 5 requests"),
    (MixesNothing, "mix() needs two batches"),
    (LosesDecodes, "What was asked for has its slots"),
    (LimitsPromptsAlone, "The whole budget, without `_limit`"),
    (AsksAgain, "the second time they get others"),
    (NeverPreempts, "ask for the prompts before the decodes"),
    (KeepsTokensOfThePreempted, "less a token for each that still runs"),
]
