"""The number of CPU threads of a step: fewer beside other programs, never more than the caller has; equal results."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from m1_single_request.tracer import Tracer
from m3_paged_attention import CacheConfig, LLMEngine, ModelConfig, SamplingParams
from m3_paged_attention.attention import native_library
from m3_paged_attention.events import ThreadsChanged
from m3_paged_attention.model_runner import ModelRunner
from m3_paged_attention.step_threads import CPUTimes, StepThreads, read_cpu_times, step_threads
from m3_paged_attention.worker import GPUWorker
from m6_multimodal_pd.model_runner import all_threads
from tests.support.engines import Recorder

needs_native = pytest.mark.skipif(native_library.obstacle() is not None, reason="the native kernels cannot run here")
PROMPTS = ["What is a KV cache?", "Explain paged attention.", "Why is decode bound by memory?"]


class Machine:
    """A clock and an account of CPU time that a test moves."""

    def __init__(self, *, has_account: bool = True) -> None:
        self.now = self.busy = self.own = 0.0
        self.has_account, self.num_looks = has_account, 0

    def clock(self) -> float:
        return self.now

    def cpu_times(self) -> CPUTimes | None:
        self.num_looks += 1
        return CPUTimes(self.busy, self.own) if self.has_account else None

    def run(self, seconds: float, *, own: float, others: float) -> None:
        """Let time pass, in which this process uses `own` cores and others use `others`."""
        self.now += seconds
        self.own += own * seconds
        self.busy += (own + others) * seconds

    def threads(self, num_cores: int = 2, tracer: Tracer | None = None) -> StepThreads:
        return StepThreads(tracer=tracer or Tracer(), num_cores=num_cores, clock=self.clock, cpu_times=self.cpu_times)


@pytest.fixture(autouse=True)
def one_thread_afterwards() -> Iterator[None]:
    yield
    torch.set_num_threads(1)


def chosen(others: Sequence[float], *, num_cores: int = 2, limit: int = 2, own: float = 1.0) -> list[int]:
    """Threads of a step after each of these seconds."""
    machine = Machine()
    threads, numbers = machine.threads(num_cores), []
    for cores in others:
        machine.run(1.0, own=own, others=cores)
        torch.set_num_threads(limit)
        with threads:
            numbers.append(torch.get_num_threads())
    return numbers


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([0.0, 0.1, 0.4], [2, 2, 2]),
        ([1.0, 1.0, 0.0, 0.0], [1, 1, 2, 2]),
        ([0.67, 0.4, 0.3, 0.2], [1, 1, 1, 2]),  # between the two bounds the number stays
        ([0.4, 0.6, 0.4], [2, 1, 1]),
        ([2.0, 5.0], [1, 1]),
        ([-0.3], [2]),  # the account counts in ticks
    ],
)
def test_a_core_that_others_use_is_left_to_them_until_it_is_free(others: list[float], expected: list[int]) -> None:
    assert chosen(others) == expected


def test_after_a_pause_a_step_has_all_cores_until_the_next_read() -> None:
    """What others used meanwhile does not count, and requests that take a tenth of a second have a read, too."""
    machine = Machine()
    threads, numbers = machine.threads(), []
    torch.set_num_threads(2)
    for seconds, others in ((60.0, 1.5), (0.1, 1.0), (0.1, 1.0), (60.0, 1.5), (0.04, 1.0), (0.1, 0.0), (60.0, 2.0)):
        machine.run(seconds, own=0.0, others=others)
        with threads:
            numbers.append(torch.get_num_threads())
    assert numbers == [2, 1, 1, 2, 2, 2, 2]


def test_on_many_cores_each_core_in_use_is_one_thread_less() -> None:
    assert chosen([0.0, 1.0, 3.2, 7.9, 0.1], num_cores=8, limit=8) == [8, 7, 5, 1, 8]
    assert chosen([3.0, 6.0], num_cores=16, limit=8) == [8, 8], "free cores are enough for all threads"
    assert chosen([10.0], num_cores=16, limit=8) == [6]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_a_step_never_has_more_threads_than_its_caller(limit: int) -> None:
    assert chosen([0.0, 0.0], num_cores=8, limit=limit) == [limit, limit]


def test_a_caller_with_one_thread_costs_no_look_at_the_account() -> None:
    machine = Machine()
    threads = machine.threads()
    before = machine.num_looks
    for _ in range(5):
        machine.run(1.0, own=1.0, others=1.0)
        assert threads.choose(1) == 1
    assert machine.num_looks == before


def test_the_account_is_read_a_few_times_per_second_however_short_the_steps_are() -> None:
    machine = Machine()
    threads = machine.threads()
    for _ in range(1000):
        machine.run(0.001, own=1.0, others=1.0)
        threads.choose(2)
    assert machine.num_looks <= 6


def test_a_system_that_tells_neither_its_cores_nor_their_use_leaves_each_step_all_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As macOS."""
    monkeypatch.delattr("os.sched_getaffinity", raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    monkeypatch.setattr("m3_paged_attention.step_threads.read_cpu_times", lambda: None)
    threads = step_threads(Tracer())
    assert threads is not None
    assert [threads.choose(limit) for limit in (1, 2, 4, 6)] == [1, 2, 4, 6]


def test_the_system_s_account_moves_on_with_the_process_s_own_time() -> None:
    before = read_cpu_times()
    if before is None:
        pytest.skip("this system keeps no /proc/stat")
    assert before.busy >= 0 and before.own > 0
    after = read_cpu_times()
    assert after is not None and after.busy >= before.busy and after.own > before.own


# --- torch's setting --------------------------------------------------------------------------------------------------


def test_the_caller_s_setting_is_back_after_a_step_even_one_that_fails() -> None:
    machine = Machine()
    threads = machine.threads()
    torch.set_num_threads(2)
    machine.run(1.0, own=1.0, others=1.0)
    with threads:
        assert torch.get_num_threads() == 1
        with all_threads(threads):
            assert torch.get_num_threads() == 2
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    with pytest.raises(RuntimeError), threads:
        raise RuntimeError
    assert torch.get_num_threads() == 2


def test_what_a_part_sets_inside_a_step_stays() -> None:
    machine = Machine()
    threads = machine.threads(num_cores=8)
    torch.set_num_threads(3)
    machine.run(1.0, own=1.0, others=6.0)
    with threads:
        assert torch.get_num_threads() == 2
        torch.set_num_threads(1)
    assert torch.get_num_threads() == 1


def test_the_trace_tells_each_change() -> None:
    machine, tracer = Machine(), Tracer()
    recorder = Recorder(tracer)
    threads = machine.threads(tracer=tracer)
    torch.set_num_threads(2)
    for others in (0.0, 0.97, 0.97, 0.0, 0.0):
        machine.run(1.0, own=1.0, others=others)
        with threads:
            pass
    assert recorder.events("threads_changed") == [
        ThreadsChanged(num_threads=1, limit=2, num_cores=2, other_cores=0.97),
        ThreadsChanged(num_threads=2, limit=2, num_cores=2, other_cores=0.0),
    ]


def test_what_the_caller_changes_is_not_said_to_be_of_other_programs() -> None:
    machine, tracer = Machine(), Tracer()
    recorder = Recorder(tracer)
    threads = machine.threads(num_cores=8, tracer=tracer)
    for limit, others in ((4, 0.0), (2, 0.0), (4, 0.0), (4, 6.0), (1, 6.0), (4, 6.0)):
        torch.set_num_threads(limit)
        machine.run(1.0, own=1.0, others=others)
        with threads:
            pass
    assert recorder.events("threads_changed") == [
        ThreadsChanged(num_threads=2, limit=4, num_cores=8, other_cores=6.0),
        ThreadsChanged(num_threads=2, limit=4, num_cores=8, other_cores=6.0),
    ]


# --- engines ----------------------------------------------------------------------------------------------------------


def engine_with(threads: StepThreads | None, dtype: Any = "float32", **parts: Any) -> LLMEngine:
    """The embedded model with native kernels; None: each step has all threads of its caller."""

    def worker(*, model_runner: Any, step_threads: StepThreads | None) -> GPUWorker:
        return GPUWorker(model_runner=model_runner, step_threads=threads)

    return LLMEngine(
        model_config=ModelConfig(device="cpu", dtype=dtype, attention_backend="native"),
        cache_config=CacheConfig(num_blocks=64),
        parts={"worker": worker, **parts},
    )


def answers(engine: LLMEngine) -> list[Any]:
    """Tokens and log-probabilities of several requests at once, greedy and drawn."""
    best: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 1, "seed": 7}
    params = [
        SamplingParams(temperature=0.0, **best),
        SamplingParams(temperature=1.0, top_p=0.9, **best),
        SamplingParams(temperature=1.0, top_k=20, **best),
    ]
    outputs = engine.generate_batch(PROMPTS, params, progress=False).values()
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs, output.prompt_logprobs) for output in outputs]


@needs_native
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_and_log_probabilities_are_bitwise_those_of_one_thread(dtype: str) -> None:
    with engine_with(None, dtype) as engine:
        alone = answers(engine)
        for number in (2, 3):
            torch.set_num_threads(number)
            assert answers(engine) == alone
            assert torch.get_num_threads() == number


@needs_native
def test_an_engine_whose_number_changes_from_step_to_step_answers_the_same() -> None:
    machine, counts = Machine(), []
    threads = machine.threads()

    class Noting(ModelRunner):
        def execute_model(self, scheduler_output: Any) -> Any:
            counts.append(torch.get_num_threads())
            machine.run(1.0, own=1.0, others=len(counts) % 2)
            return super().execute_model(scheduler_output)

    with engine_with(None) as engine:
        alone = answers(engine)
    torch.set_num_threads(2)
    with engine_with(threads, model_runner=Noting) as engine:
        assert answers(engine) == alone
    assert counts == [2, 1] * 6 and torch.get_num_threads() == 2
