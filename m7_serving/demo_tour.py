"""Clients of the demo: a tour of what they get and of what the engine does for them, and a chat.

Part of `python -m m7_serving.demo`; no part of the server depends on it. The remark that opens a part of the tour is
the text of its method's docstring.
"""

import asyncio
import base64
import os
import signal
import time
from typing import Any

from openai import APIError
from rich.console import Console
from rich.table import Table
from rich.text import Text

from m1_single_request.demo import FLAGS, read_line
from m1_single_request.demo_tour import QUESTION, bullets
from m1_single_request.errors import EngineError
from m1_single_request.events import Abort
from m1_single_request.output_events import Finish
from m1_single_request.sampling_params import SamplingParams
from m1_single_request.trace_readers import Records
from m2_continuous_batching.demo_tour import FACTS, NOUNS, open_part
from m6_multimodal_pd.demo_tour import PICTURES
from m6_multimodal_pd.disaggregation.events import RequestRouted

NUM_CLIENTS = 12
SYSTEM = "".join(FACTS)
PICTURE = PICTURES / "a_blue_square_and_a_yellow_star.png"


class Client:
    """One client and the fields of its requests, for the tour and the chat."""

    def __init__(self, client: Any, model: str, params: SamplingParams, console: Console) -> None:
        """`client`: openai's `AsyncOpenAI`; `model`: the name of the server's."""
        self.client, self.model, self.params, self.console = client, model, params, console

    async def send(self, messages: list[dict[str, Any]], *, stream: bool = False, **changes: Any) -> Any:
        """Send a conversation to `/v1/chat/completions`, with the sampling parameters of the flags, and other fields.

        `extra_body` is how this client sends fields that OpenAI's API does not have, such as `top_k`.
        """
        sampling = {name: getattr(self.params, name) for name in FLAGS["sampling"][1].split()}
        options = {"stream_options": {"include_usage": True}} if stream else {}
        return await self.client.chat.completions.create(
            model=self.model, messages=messages, stream=stream, extra_body={**sampling, **options, **changes}
        )


class Tour(Client):
    """The parts of m7's tour."""

    def __init__(self, client: Any, model: str, params: SamplingParams, console: Console, records: Records) -> None:
        """`records`: of the server's trace."""
        super().__init__(client, model, params, console)
        self.records = records

    async def run(self) -> None:
        """Run all parts."""
        await self.show_stream()
        await self.show_clients()
        await self.show_disconnect()
        await self.show_picture()
        await self.show_errors()
        await self.show_end()

    async def ask(self, content: Any, *, system: str | None = None, **changes: Any) -> Any:
        """Send a conversation of one question."""
        messages = [{"role": "system", "content": system}] if system else []
        return await self.send([*messages, {"role": "user", "content": content}], **changes)

    async def show_stream(self) -> None:
        """Run one client, and print its chunks and the trace of its request.

        Each chunk of a stream has the text since the one before, and the time since the request was sent. The router's
        trace has the id of the chunks: the router sends the request to the engine's process, which answers with token
        ids after each of its steps. The steps below are the router's.
        """
        open_part(self.console, "1. A client and its stream", self.show_stream)
        began, table = time.perf_counter(), Table("ms", "chunk", "content")
        async for chunk in await self.ask(QUESTION, stream=True):
            milliseconds = f"{(time.perf_counter() - began) * 1000:.0f}"
            choice = next(iter(chunk.choices), None)
            if choice is None:
                table.add_row(
                    milliseconds, "usage", f"{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens"
                )
            elif choice.finish_reason is not None:
                table.add_row(milliseconds, "finish", choice.finish_reason)
            else:
                table.add_row(milliseconds, "role" if choice.delta.role else "delta", Text(repr(choice.delta.content)))
        self.console.print(table)
        self.explain(chunk.id)

    async def show_clients(self) -> None:
        """Run many clients at once, and print their times.

        All clients come at once and have one system prompt. The engine runs them in one batch, and computes the
        system prompt once: the cached tokens stand in every answer's usage.
        """
        open_part(self.console, f"2. {NUM_CLIENTS} clients at once", self.show_clients)
        questions = [f"What is the code of {NOUNS[number % len(NOUNS)]}?" for number in range(NUM_CLIENTS)]
        began = time.perf_counter()
        answers = await asyncio.gather(*(self.timed(question, began) for question in questions))
        table = Table("client", "question", "answer", "first token, ms", "end, ms", "prompt", "cached")
        for number, (question, (text, first, end, usage)) in enumerate(zip(questions, answers, strict=True)):
            cached = usage.prompt_tokens_details.cached_tokens
            cells = [str(number), question, text, f"{first:.0f}", f"{end:.0f}", str(usage.prompt_tokens), str(cached)]
            table.add_row(*map(Text, cells))
        self.console.print(table)

    async def timed(self, question: str, began: float) -> tuple[str, float, float, Any]:
        """Return an answer, the milliseconds to its first token and to its end, and its usage."""
        text, first = "", 0.0
        async for chunk in await self.ask(question, stream=True, system=SYSTEM, max_tokens=16):
            for choice in chunk.choices:
                first = first or (choice.delta.content and (time.perf_counter() - began) * 1000) or 0.0
                text += choice.delta.content or ""
        return text, first, (time.perf_counter() - began) * 1000, chunk.usage

    async def show_disconnect(self) -> None:
        """Close the connection of a client, and print the trace of its request.

        A client closes its connection in the middle of a long answer. The server detects that and aborts the request,
        and the engine frees its memory at the end of its next step.
        """
        open_part(self.console, "3. A client that goes away", self.show_disconnect)
        stream = await self.ask(QUESTION, stream=True, max_tokens=800, ignore_eos=True, stop=[])
        chunks = aiter(stream)
        for _ in range(num_chunks := 10):
            chunk = await anext(chunks)
        await stream.close()
        for _ in range(100):
            if any(event.rid == chunk.id for _, event in self.records.of(Finish)):
                break
            await asyncio.sleep(0.01)
        bullets(self.console, [f"the client read {num_chunks} chunks of an answer of 800 tokens"])
        self.explain(chunk.id)

    async def show_picture(self) -> None:
        """Ask about a picture.

        A picture comes as a data URL in the request. The server opens no other URL unless its host is allowed.
        """
        open_part(self.console, "4. A picture over HTTP", self.show_picture)
        url = f"data:image/png;base64,{base64.b64encode(PICTURE.read_bytes()).decode()}"
        parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is at the left?"}]
        try:
            answer = await self.ask(parts)
            lines = [f"{PICTURE.stem.replace('_', ' ')}: {answer.choices[0].message.content}"]
        except APIError as error:  # a model of the user that takes texts only
            lines = [str(error)]
        bullets(self.console, lines)

    async def show_errors(self) -> None:
        """Send requests that the server rejects.

        Fields, values and models that the server does not support are rejected before anything is queued.
        """
        open_part(self.console, "5. Requests that are rejected", self.show_errors)
        lines = []
        # the third one is misspelt on purpose
        for wrong in ({"temperature": 7}, {"tool_choice": "required"}, {"temprature": 1}, {"model": "gpt-4"}):
            try:
                await self.ask(QUESTION, **wrong)
            except APIError as error:
                lines.append(str(error))
        bullets(self.console, lines)

    async def show_end(self) -> None:
        """Stop the server while a client reads.

        SIGTERM comes while a client reads. New requests are rejected, this one may finish, and then the processes
        end.
        """
        open_part(self.console, "6. The end", self.show_end)
        stream = await self.ask(QUESTION, stream=True, max_tokens=64, ignore_eos=True, stop=[])
        os.kill(os.getpid(), signal.SIGTERM)
        *_, last = [chunk async for chunk in stream]
        bullets(self.console, [f"the last client has read {last.usage.completion_tokens} of 64 tokens"])

    def explain(self, rid: str) -> None:
        """Print the life of a request: when it was routed, aborted and finished, in the words of the trace."""
        events: list[tuple[int, Any]] = [
            *self.records.of(RequestRouted),
            *self.records.of(Abort),
            *self.records.of(Finish),
        ]
        bullets(self.console, [f"step {step}: {event.explain()}" for step, event in events if event.rid == rid])


class Chat(Client):
    """Prints the answer to one prompt, or to the lines of a chat, whose history it keeps."""

    async def run(self, prompt: str | None) -> None:
        """Answer the prompt, or line after line until /quit or the end of the input. Raises `EngineError` for a prompt
        that the server rejects."""
        if prompt is not None:
            try:
                await self.answer([{"role": "user", "content": prompt}])
            except APIError as error:
                raise EngineError(str(error)) from error
            return
        history: list[dict[str, Any]] = []
        while (line := await asyncio.to_thread(read_line)) != "/quit":
            question = {"role": "user", "content": line}
            if line == "/reset":
                history.clear()
            elif line:
                try:
                    history += [question, await self.answer([*history, question])]
                except APIError as error:
                    self.console.print(str(error), style="red", markup=False)

    async def answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """Print an answer as it comes; return its message."""
        text = ""
        async for chunk in await self.send(messages, stream=True):
            for choice in chunk.choices:
                self.console.print(choice.delta.content or "", end="", markup=False, soft_wrap=True)
                text += choice.delta.content or ""
        self.console.print()
        return {"role": "assistant", "content": text}
