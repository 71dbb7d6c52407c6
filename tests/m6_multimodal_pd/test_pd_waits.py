"""How long a user waits for engines that are gone, stopped, or in a step that takes long.

The engines are sockets that join and never answer (`silent_engine.py`): closed, stopped, or merely busy. Bounds leave
room for a slow machine; where a wait is bounded by `heartbeat_timeout_s` that is a second.
"""

import secrets
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from transformers import AutoTokenizer

from m6_multimodal_pd import DEFAULT_MODEL, DisaggregationConfig, EngineLostError, LLMEngine, SamplingParams
from m6_multimodal_pd.disaggregation.members import vocabulary_of
from m6_multimodal_pd.disaggregation.runtime import messages
from m6_multimodal_pd.disaggregation.runtime.credentials import read_keys
from m6_multimodal_pd.disaggregation.runtime.sockets import HELLO, WELCOME
from m6_multimodal_pd.wire import Codec
from tests.m6_multimodal_pd.processes import free_address, process_of
from tests.m6_multimodal_pd.silent_engine import SilentEngine

ROLES: tuple[messages.Role, ...] = ("prefill", "decode")
SILENT_S = 1.0
"""`heartbeat_timeout_s` where that is what is waited for."""
AT_ONCE_S = 5.0
"""A second, and what a slow machine takes. Nothing else ends a wait as soon."""
MINUTE_S = 60.0
TOKENS = 1024
"""Each engine's memory."""
MAX_BYTES = 2**20


def order_of(role: messages.Role, address: str, key_file: Path, vocabulary: str) -> dict[str, Any]:
    """What an engine of this role says, and with which keys."""
    keys = read_keys(key_file)
    identity = f"{role}-0.{secrets.token_hex(16)}"
    joined = messages.Joined(role, 16, TOKENS, 512, "float32[2, 16]", "tiny", vocabulary)
    told = [messages.LengthFitted(role, max_model_len=512, is_named=False), joined]
    sent = [[HELLO], *(Codec(messages.ToRouter, MAX_BYTES).encode(message) for message in told)]
    return {
        "identity": identity,
        "public": keys.engines.public,
        "secret": keys.engines.secret,
        "trusted": keys.engines.trusted,
        "address": address,
        "messages": [[bytes(frame).hex() for frame in frames] for frames in sent],
    }


@pytest.fixture(scope="module")
def vocabulary() -> str:
    """Of the model that ships."""
    return vocabulary_of(AutoTokenizer.from_pretrained(DEFAULT_MODEL))


MakeGroup = Callable[..., tuple[Any, dict[str, Any]]]


@pytest.fixture
def made(keys: Path, vocabulary: str) -> Iterator[MakeGroup]:
    """`made(heartbeat_timeout_s, SilentEngine or process_of)`: a router, and its two silent engines by role."""
    with ExitStack() as stack:

        def make(heartbeat_timeout_s: float, engine: Callable[[dict[str, Any]], Any]) -> tuple[Any, dict[str, Any]]:
            address, engines = free_address(), {}
            for role in ROLES:
                own = engine(order_of(role, address, keys, vocabulary))
                engines[role] = stack.enter_context(closing(own) if isinstance(own, SilentEngine) else own)
            group = DisaggregationConfig(
                address=address,
                key_file=keys,
                start_timeout_s=20,
                heartbeat_timeout_s=heartbeat_timeout_s,
                max_retries=0,
            )
            return stack.enter_context(LLMEngine(disaggregation_config=group)), engines

        yield make


def seconds_until_it_ends(engine: Any, limit_s: float) -> tuple[float, Any]:
    """Step until the one request has ended: how long that took, and its error. So long at most: then there is none."""
    began = time.monotonic()
    while time.monotonic() - began < limit_s:
        for output in engine.step().values():
            if output.finished:
                return time.monotonic() - began, output.error
    return limit_s, None


def within(limit_s: float, call: Callable[[], Any]) -> Any:
    """What a call returns that takes no longer, or raises."""
    began = time.monotonic()
    try:
        return call()
    finally:
        assert time.monotonic() - began < limit_s


# --- a connection that is closed --------------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize("role", ROLES)
def test_an_engine_whose_connection_is_closed_is_lost_at_once(made: MakeGroup, role: messages.Role) -> None:
    engine, engines = made(MINUTE_S, SilentEngine)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=3))
    engine.step()
    engines[role].close()
    waited, error = seconds_until_it_ends(engine, AT_ONCE_S)
    assert isinstance(error, EngineLostError) and waited < AT_ONCE_S


def test_nothing_waits_for_engines_whose_connections_are_closed(made: MakeGroup, tmp_path: Path) -> None:
    engine, engines = made(MINUTE_S, SilentEngine)
    for role in ROLES:
        engines[role].close()
    within(AT_ONCE_S, engine.flush_cache)
    for call in (engine.stats, engine.flush_cache, lambda: engine.generate([5, 6, 7])):
        within(AT_ONCE_S, call)
    for call in (
        lambda: engine.start_profile(tmp_path / "profile"),
        engine.stop_profile,
        lambda: engine.update_weights(DEFAULT_MODEL),
    ):
        with pytest.raises(EngineLostError, match="no engine left"):
            within(AT_ONCE_S, call)
    within(AT_ONCE_S, engine.close)


# --- a process that is stopped ----------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_stopped_engine_without_requests_is_lost_after_the_silence_that_is_allowed(made: MakeGroup) -> None:
    engine, engines = made(SILENT_S, process_of)
    for role in ROLES:
        engines[role].send_signal(signal.SIGSTOP)
    within(SILENT_S + AT_ONCE_S, engine.flush_cache)  # nobody is left who could have a cache
    assert engine.stats().max_total_tokens == 0
    assert isinstance(engine.generate([5, 6, 7]).error, EngineLostError)


@pytest.mark.exhaustive
def test_one_that_was_stopped_for_a_shorter_time_is_still_there(made: MakeGroup) -> None:
    engine, engines = made(4.0, process_of)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=3))
    engine.step()
    engines["decode"].send_signal(signal.SIGSTOP)
    assert seconds_until_it_ends(engine, 1.0)[1] is None
    engines["decode"].send_signal(signal.SIGCONT)
    assert seconds_until_it_ends(engine, 8.0)[1] is None


@pytest.mark.exhaustive
@pytest.mark.parametrize("verb", ["start_profile", "update_weights"])
def test_operations_beside_stopped_engines_wait_for_the_silence_only(
    made: MakeGroup, tmp_path: Path, verb: str
) -> None:
    engine, engines = made(SILENT_S, process_of)
    for role in ROLES:
        engines[role].send_signal(signal.SIGSTOP)
    began = time.monotonic()
    if verb == "update_weights":
        with pytest.raises(EngineLostError, match="was lost while it loaded"):
            engine.update_weights(DEFAULT_MODEL)
    else:
        with pytest.raises(EngineLostError, match="start_profile: all engines were lost before they answered"):
            engine.start_profile(tmp_path / "profile")
        with pytest.raises(EngineLostError, match="no engine left"):
            engine.stop_profile()
    assert time.monotonic() - began < SILENT_S + AT_ONCE_S


# --- a step that takes long -------------------------------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_long_step_is_not_silence(made: MakeGroup) -> None:
    engine, _ = made(SILENT_S, SilentEngine)
    engine.add_request([5, 6, 7], SamplingParams(max_tokens=3))
    assert seconds_until_it_ends(engine, 1.8 * SILENT_S) == (1.8 * SILENT_S, None)


def answer_calls(engine: SilentEngine, stats: dict[str, int]) -> int:
    """Its step is over: it answers all calls that have come. Returns how many."""
    count = 0
    while engine.socket.poll(200, zmq.POLLIN):
        frames = engine.socket.recv_multipart()
        if frames != [WELCOME]:
            message = Codec(messages.ToEngine, MAX_BYTES).decode(frames)
            if isinstance(message, messages.Call):
                count += 1
                answer = messages.Answer(message.number, msgspec.Raw(msgspec.msgpack.encode(stats)), None)
                engine.socket.send_multipart(Codec(messages.ToRouter, MAX_BYTES).encode(answer))
    return count


@pytest.mark.exhaustive
def test_stats_while_steps_run_are_the_last_known_ones(made: MakeGroup) -> None:
    """And an answer that comes when nobody waits for it any more is known then."""
    engine, engines = made(MINUTE_S, SilentEngine)
    stats = within(AT_ONCE_S, engine.stats)
    assert (stats.max_total_tokens, stats.available_size, stats.num_prompt_tokens) == (2 * TOKENS, 2 * TOKENS, 0)
    told = {"max_total_tokens": TOKENS, "available_size": 1000, "num_prompt_tokens": 7}
    assert answer_calls(engines["decode"], told) == 1
    stats = within(AT_ONCE_S, engine.stats)
    assert (stats.max_total_tokens, stats.available_size, stats.num_prompt_tokens) == (2 * TOKENS, TOKENS + 1000, 7)
