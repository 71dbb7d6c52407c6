"""Requests, log-probabilities and errors as messages, and back: what another engine makes of them is the same."""

import importlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from m1_single_request import SamplingParams
from m1_single_request.errors import EngineError, InvalidPromptError
from m6_multimodal_pd.disaggregation.runtime.jobs import KNOWN_ERRORS, LONGEST_TEXT, error_of, fault_of, job_of
from m6_multimodal_pd.disaggregation.runtime.messages import Ended, Fault, Job, Prefill, ToEngine, ToRouter
from m6_multimodal_pd.errors import RemoteError, TransferError
from m6_multimodal_pd.multimodal.inputs import MultimodalInputs
from m6_multimodal_pd.wire import Codec
from tests.m6_multimodal_pd.items import inputs, item, make_req

CODEC: Codec[Any] = Codec(ToEngine, 2**20)


def request(*, media: MultimodalInputs | None = None, params: SamplingParams | None = None) -> Any:
    req = make_req(3, list(range(20, 35)), outputs=(8, 9), priority=-4, extra_key="salt")
    req.seed, req.multimodal_inputs = -(2**62), media
    if params is not None:
        req.sampling_params = params
    return req


def travelled(job: Job) -> Job:
    """The job as an engine gets it."""
    message = CODEC.decode(CODEC.encode(Prefill(1, job, "d")))
    assert isinstance(message, Prefill)
    return message.job


# --- requests ---------------------------------------------------------------------------------------------------------


def test_a_job_says_all_that_an_engine_must_know() -> None:
    params = SamplingParams(max_tokens=7, n=3, temperature=0.5, stop="x", logit_bias={3: 1.0}, prompt_logprobs=1)
    media = inputs(15, item("image", (2, 5)), item("video", (7, 9), (11, 13)))
    req = request(media=media, params=params)
    for job in (job_of(req), travelled(job_of(req))):
        assert job.rid == "r3"
        assert job.prompt_token_ids == tuple(range(20, 35)) and job.output_token_ids == (8, 9)
        assert job.params == replace(params, n=1), "each of n is a request of its own by now"
        assert (job.seed, job.priority, job.cache_salt, job.speculate) == (-(2**62), -4, "salt", True)
        assert job.media is not None
        assert [item.num_tokens for item in job.media.mm_items] == [item.num_tokens for item in media.mm_items]
        assert (job.media.mrope_positions == media.mrope_positions).all()
    req.speculate = False
    assert not job_of(req).speculate


# --- errors -----------------------------------------------------------------------------------------------------------


for path in Path(__file__).parents[2].glob("m[1-6]_*/*errors.py"):
    importlib.import_module(f"{path.parent.name}.{path.stem}")


def all_errors(kind: type[EngineError] = EngineError) -> set[type[EngineError]]:
    """Every error of the milestones up to m6: of their modules of errors, and any other that was loaded."""
    own = {kind} if re.match("m[1-6]_", kind.__module__) else set()
    return own.union(*map(all_errors, kind.__subclasses__()))


ERRORS = sorted(all_errors(), key=lambda kind: kind.__name__)


def test_all_errors_of_all_milestones_are_known_by_name() -> None:
    assert {kind.__name__: kind for kind in ERRORS} == KNOWN_ERRORS
    assert len({kind.__name__ for kind in ERRORS}) == len(ERRORS) > 15, "no two have the same name"


@pytest.mark.parametrize("kind", ERRORS, ids=lambda kind: kind.__name__)
def test_an_error_of_ours_comes_back_as_itself(kind: type[EngineError]) -> None:
    error = error_of(fault_of(kind("it's 5 too many")), "decode-0")
    assert type(error) is kind
    assert str(error) == "it's 5 too many (on decode-0)"


class OwnError(EngineError):
    """Somebody's own, of which only one engine knows."""


@pytest.mark.parametrize("error", [ValueError("five"), KeyError("x"), KeyboardInterrupt(), OwnError("mine")])
def test_any_other_error_comes_back_as_a_remote_one_with_its_name(error: BaseException) -> None:
    came = error_of(fault_of(error), "prefill-1")
    assert type(came) is RemoteError
    assert str(came) == f"{type(error).__name__}: {error} (on prefill-1)"


@pytest.mark.parametrize("kind", ["Unknown", "ValueError", "SystemExit", "os", "__class__"])
def test_a_name_that_is_no_error_of_ours_makes_nothing_but_a_remote_error(kind: str) -> None:
    assert type(error_of(Fault(kind, "text"), "p")) is RemoteError


@pytest.mark.parametrize(
    "error",
    [
        TransferError("x" * 10_000),
        ValueError("é" * 10_000),
        InvalidPromptError("the file \udcff"),
        ValueError("\ud800" * 10_000),
        type("E" * 200, (Exception,), {})("a long name"),
        TransferError(),
    ],
    ids=["long", "not ASCII", "a file's name", "surrogates", "a long name", "empty"],
)
def test_an_error_can_be_told_whatever_it_says(error: BaseException) -> None:
    fault = fault_of(error)
    assert len(fault.text) <= LONGEST_TEXT
    codec: Codec[Any] = Codec(ToRouter, 2**20)
    message = codec.decode(codec.encode(Ended(1, fault, False)))
    assert message.fault == fault
