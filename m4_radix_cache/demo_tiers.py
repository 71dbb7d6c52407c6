"""Tour of the tiers: a conversation whose KV leaves the device and comes back, from host memory and from a disk.

Part of `python -m m4_radix_cache.demo --host-memory 64MiB --disk DIR`; no part of the engine depends on it. The remark
that opens a part is the text of its function's docstring.
"""

import secrets
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.text import Text

from m1_single_request.demo_tour import bullets, prompt_of
from m1_single_request.input_processor import Message
from m1_single_request.trace_event import Event, size, some
from m2_continuous_batching.demo_tour import open_part
from m3_paged_attention.demo_tour import with_room
from m4_radix_cache import RequestOutput
from m4_radix_cache.demo_tour import CHAT, NOUNS, SYSTEM, TERMS, Stage, codes
from m4_radix_cache.mem_cache.disk_events import Prefetched, PrefetchStarted
from m4_radix_cache.mem_cache.events import Evicted
from m4_radix_cache.mem_cache.host_events import Acknowledged, Demoted, HostEvicted, LoadBack
from m4_radix_cache.views.radix_tree import RadixTreeView

DEVICE = 1024  # tokens: less than the prompts of two users
OTHERS = 3  # users


class TierTour(Stage):
    """The parts of the tour."""

    def run(self) -> None:
        """Run all parts with one engine, whose device has little memory."""
        self.view, self.past = RadixTreeView(), [SYSTEM]
        self.params = replace(self.params, n=1)  # a conversation goes on with one answer
        self.readers.append(self.view)
        with self.stack:
            engine = self.engine(cache_config=with_room(self.configs["cache_config"], max_total_tokens=DEVICE))
            self.show_conversation(engine)
            self.show_others(engine)
            self.show_return(engine)
            self.show_tiers(engine)

    def show_conversation(self, engine: Any) -> None:
        """Print two turns, and the tiers in which the KV of each prompt was.

        The device has room for {stats.max_total_tokens:,} tokens, host memory for {host} of KV. {disk}
        """
        cache = engine.config.cache
        disk = f"KV in host memory is also written to {str(cache.disk_path)!r}, where it outlives the process."
        numbers = {
            "stats": engine.stats(),
            "host": size(cache.host_memory_bytes),
            "disk": disk if cache.disk_path else "",
        }
        open_part(self.console, "1. A conversation", self.show_conversation, **numbers)
        for question in CHAT[:2]:
            self.ask(engine, question)

    def show_others(self, engine: Any) -> None:
        """Print the requests of other users, the tokens that the device evicts for them, and the tree.

        {users} ask, one after the other. Each has a long prompt that begins with other facts, so almost no KV is
        shared.
        """
        open_part(self.console, "2. Other users", self.show_others, users=some(OTHERS, "user"))
        first, lines = len(self.records), list[str]()
        for number in range(OTHERS):
            facts = codes([*range(number + 1, len(NOUNS)), *range(number + 1)])
            system: Message = {"role": "system", "content": f"You answer questions. {facts}"}
            (output,) = self.answer(engine, prompt_of(engine, f"What is {TERMS[number]}?", [system]))
            lines.append(f"{output.request_id}: {self.source(output)}")
        events = [record.event for record in self.records[first:]]
        kept, lost = freed(events, Demoted), freed(events, Evicted) + freed(events, HostEvicted)
        lines.append(f"The device evicts {some(kept, 'token')} that stay in host memory; {lost:,} more are discarded.")
        bullets(self.console, lines)
        self.console.print(
            "\n[bold]The cache now", self.view.draw(engine.engine_core.input_processor.tokenizer), sep="\n"
        )

    def show_return(self, engine: Any) -> None:
        """Print the next turn of the conversation, and the same request without cached KV.

        The conversation goes on. After it, the same prompt comes under a new cache_salt, so its KV is not cached.
        """
        open_part(self.console, "3. The conversation comes back", self.show_return)
        prompt = prompt_of(engine, CHAT[2], self.past)
        output = self.ask(engine, CHAT[2])
        (other,) = self.answer(engine, prompt, salts=[secrets.token_hex()])
        is_same = "The answers are the same." if other.text == output.text else "The answers differ."
        bullets(self.console, [f"{other.request_id}, without cached KV: {self.source(other)} {is_same}"])

    def show_tiers(self, engine: Any) -> None:
        """Print the number of bytes in each tier.

        At the end of the process the device and host memory lose what they have.
        """
        open_part(self.console, "4. The tiers", self.show_tiers)
        stats, path = engine.stats(), engine.config.cache.disk_path
        on_device = some(stats.evictable_size + stats.protected_size, "token")
        lines = [f"The device has {on_device}, host memory {size(stats.host_bytes)} of KV."]
        if path is not None:
            engine.close()
            lines.append(
                f"The directory {str(path)!r} has {size(engine.stats().disk_bytes)} of KV. Run the same command again: "
                f"the first turn finds its prompt there."
            )
        bullets(self.console, lines)

    def ask(self, engine: Any, question: str) -> RequestOutput:
        """Run the next turn of the conversation; print its answer, the tiers of its KV and the events of its copies."""
        (output,) = self.answer(engine, prompt_of(engine, question, self.past))
        self.console.print(Text.assemble((question, "bold"), f"\n{output.text}\n", (self.source(output), "dim")))
        bullets(self.console, [event.explain() for event in self.events_of(output) if is_move(event)])
        self.past += [{"role": "user", "content": question}, {"role": "assistant", "content": output.text}]
        return output

    def events_of(self, output: RequestOutput) -> list[Event]:
        """Return all events of a request."""
        return [each.event for each in self.records if output.request_id in each.event.request_ids()]

    def source(self, output: RequestOutput) -> str:
        """Return how many prompt tokens of a request had KV in which tier, and its time to first token."""
        events = self.events_of(output)
        loaded = sum(event.num_tokens for event in events if isinstance(event, LoadBack))
        read = sum(event.found for event in events if isinstance(event, Prefetched))
        total, reused = output.metrics.num_prompt_tokens, output.metrics.cached_tokens
        disk = f" ({read:,} of them read from the disk)" if read else ""
        seconds = output.metrics.time_to_first_token or 0.0
        return (
            f"{some(total, 'prompt token')}: {reused - loaded:,} on the device, {loaded:,} in host memory{disk}, "
            f"{total - reused:,} computed. First token after {seconds * 1e3:.1f} ms."
        )


def is_move(event: Event) -> bool:
    """Return whether KV moves to the device, or to host memory from the disk."""
    is_load = isinstance(event, Acknowledged) and event.direction == "load"
    return is_load or isinstance(event, PrefetchStarted | Prefetched | LoadBack)


def freed(events: Sequence[Any], kind: type[Any]) -> int:
    """Return the number of tokens that events of a kind free."""
    return sum(event.freed for event in events if isinstance(event, kind))
