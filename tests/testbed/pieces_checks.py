"""What a scheduler of pieces, decodes and guesses must decide and keep, judged by a record of one's own.

As `RadixChecks`, with the rules that are new: one budget for a step, one prompt in pieces at most, prompts in front and
decodes behind, no request left out by `decode_first`, and slots for guesses that are there in flight only.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from m1_single_request.sampler import SampledTokens
from m4_radix_cache.mem_cache.radix_cache import RadixCache
from m4_radix_cache.mem_cache.radix_key import TOKEN_BYTES
from m4_radix_cache.request import Req
from m5_chunked_prefill_spec.schedule_batch import ScheduleBatch
from m5_chunked_prefill_spec.wiring import chunk_alignment
from tests.testbed.radix_checks import RadixChecks


class PiecesChecks(RadixChecks):
    """Raises AssertionError at the first decision that breaks a rule."""

    def __init__(self, scheduler: Any, runner: Any, **settings: Any) -> None:
        super().__init__(scheduler, runner, **settings)
        self.chunk_alignment = chunk_alignment(self.config, scheduler.tree_cache.page_size)
        self.pieces: dict[str, int] = {}
        """The request in pieces, and the number of its tokens with KV; at most one."""
        self.in_flight: dict[str, int] = {}
        """Tokens with KV after this step, of the request whose prompt does not end in it."""
        self.keys: dict[str | None, list[bytes]] = {}
        """The keys of all ended requests, by namespace."""

    def in_pieces(self) -> list[str]:
        return list(self.pieces)

    def num_kv_tokens(self, rid: str) -> int:
        return self.pieces.get(rid, super().num_kv_tokens(rid))

    # --- a decision ---------------------------------------------------------------------------------------------------

    def scheduled(self, batch: ScheduleBatch | None) -> None:  # type: ignore[override]
        """A decision was made."""
        super().scheduled(batch)
        prompts = [] if batch is None else list(zip(batch.reqs, batch.seq_lens.tolist(), strict=True))
        cut = {req.rid: seq_len for req, seq_len in prompts if seq_len < req.seqlen}
        assert len(cut) <= 1, f"{' and '.join(cut)} are in pieces"
        assert list(cut) == ([] if batch is None or batch.chunked_req is None else [batch.chunked_req.rid])
        holding = {req.rid for req in self.scheduler.requests.values() if req.req_pool_idx is not None}
        done = {req.rid for req, seq_len in prompts if req.rid not in cut}
        self.pieces = {rid: num for rid, num in self.pieces.items() if rid in holding - done}
        self.in_flight = cut

    def _composed_by_the_rules(self, batch: Any, in_batch: list[str], joined: list[str], unmarked: list[str]) -> None:
        """Each request that may go on goes on; prompts fill the rest."""
        decoding = [rid for rid in unmarked if rid not in self.pieces]
        is_marked = {rid for rid in self.running if self.lives[rid].marked}
        if batch is None:
            assert not unmarked or is_marked, "a request could run"
            return
        assert not is_marked & set(in_batch)
        prompts, decodes = in_batch[: batch.num_prompts], in_batch[batch.num_prompts :]
        goes_on = [rid for rid in self.pieces if rid in prompts]
        assert sorted(prompts) == sorted([*goes_on, *joined])
        if joined and self.pieces:
            assert goes_on, "the request in pieces goes on before any is admitted"
        may_wait = bool(is_marked)  # a request frees its memory at the update
        if self.config.schedule == "decode_first":
            assert decodes == decoding or (may_wait and not decodes), "each running request gets a token"
        else:
            assert not (prompts and decodes)
            assert prompts or decodes == decoding
        self._came_back_first(joined)
        self._budget_is_kept(batch)

    def _budget_is_kept(self, batch: Any) -> None:
        new_lens, budget = batch.new_lens.tolist(), self.config.max_num_batched_tokens
        of_prompts = sum(new_lens[: batch.num_prompts])
        if not self.config.enable_chunked_prefill:
            assert batch.chunked_req is None
            has_grown = [bool(req.num_retractions or req.output_ids) for req in batch.reqs[: batch.num_prompts]]
            assert sum(new_lens) <= budget or (len(batch.reqs) == 1 and has_grown == [True]), "too much"
            return
        assert sum(new_lens) <= budget
        assert of_prompts <= (self.config.chunked_prefill_size or budget)
        if batch.chunked_req is not None:
            end = int(batch.seq_lens[batch.reqs.index(batch.chunked_req)])
            assert end % self.chunk_alignment == 0, f"{batch.chunked_req.rid} is cut after {end} tokens"

    def _row_lens(self, batch: Any) -> None:
        """Ruling 1, in flight: what is computed now has slots, guesses included, and does not count as computed yet."""
        places = {} if batch is None else {request.rid: place for place, request in enumerate(batch.reqs)}
        for rid, request in self.scheduler.requests.items():
            committed, allocated = request.kv_committed_len, request.kv_allocated_len
            if request.req_pool_idx is None:
                assert committed == allocated == 0, rid
            elif rid not in places:
                assert committed == allocated == (self.pieces.get(rid, request.seqlen - 1)), rid
            else:
                seq_len, new = int(batch.seq_lens[places[rid]]), int(batch.new_lens[places[rid]])
                assert (committed, allocated) == (seq_len - new, seq_len), rid
                if places[rid] >= batch.num_prompts:
                    assert committed == request.seqlen - 1, rid

    # --- a result -----------------------------------------------------------------------------------------------------

    def updated(self, sampled: Mapping[str, SampledTokens], changed: Sequence[Req]) -> dict[str, str]:
        """A step was committed."""
        ended = {rid for rid, life in self.lives.items() if life.marked}
        for rid, num_tokens in self.in_flight.items():
            if rid not in ended and self.lives[rid].request.req_pool_idx is not None:
                self.pieces = {rid: num_tokens}
        self.pieces = {rid: num for rid, num in self.pieces.items() if rid not in ended}
        self.in_flight = {}
        reasons = super().updated(sampled, changed)
        for request in changed:
            data = request.key.data
            if request.is_finished:
                self.keys.setdefault(request.extra_key, []).append(data)
        self._no_guess_is_in_a_key()
        return reasons

    def _no_guess_is_in_a_key(self) -> None:
        """Whatever is cached was a prompt, or was said; never only guessed."""
        tree = self.scheduler.tree_cache
        if not isinstance(tree, RadixCache):
            return
        paths: dict[int, tuple[str | None, bytes]] = {tree.root.id: (None, b"")}
        alive: dict[str | None, list[bytes]] = {}
        for life in self.lives.values():
            alive.setdefault(life.request.extra_key, []).append(life.request.key.data)
        for node in tree.nodes():
            assert node.parent is not None
            extra_key, before = paths[node.parent.id]
            extra_key = node.edge[0] if isinstance(node.edge, tuple) else extra_key
            path = before + node.key
            paths[node.id] = extra_key, path
            known: Collection[bytes] = [*self.keys.get(extra_key, ()), *alive.get(extra_key, ())]
            assert any(data.startswith(path) for data in known), (
                f"{len(path) // TOKEN_BYTES} tokens that no request had"
            )
