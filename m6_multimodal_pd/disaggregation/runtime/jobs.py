"""Requests and errors as messages, and back.

The router has checked a request and makes all texts of it; an engine needs numbers only. It returns tokens,
log-probabilities, and errors as a name and a text: an error that is not the project's own arrives as a `RemoteError`.
"""

from dataclasses import replace

from m1_single_request import errors as m1
from m1_single_request.outputs import Logprob, TokenLogprobs
from m1_single_request.sampler import LogprobRow
from m3_paged_attention import errors as m3
from m4_radix_cache import errors as m4
from m6_multimodal_pd import errors as m6
from m6_multimodal_pd.disaggregation.runtime.messages import Fault, Job
from m6_multimodal_pd.request import Req

KNOWN_ERRORS: dict[str, type[m1.EngineError]] = {
    name: value
    for module in (m1, m3, m4, m6)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, m1.EngineError)
}
LONGEST_TEXT = 4096
REPORTED = Logprob(0.0, 1, "")


def job_of(req: Req) -> Job:
    """Return a request in its present state for engines."""
    return Job(
        rid=req.rid,
        prompt_token_ids=tuple(req.origin_input_ids),
        output_token_ids=tuple(req.output_ids),
        params=replace(req.sampling_params, n=1),
        seed=req.seed,
        priority=req.priority,
        cache_salt=req.extra_key,
        speculate=req.speculate,
        media=req.multimodal_inputs,
    )


def resume(req: Req, output_token_ids: tuple[int, ...]) -> None:
    """Give a new request the output tokens of earlier attempts. Their log-probabilities were reported before: an entry
    stands in for each, if the request asks for them."""
    sequence = req.sequence
    asked = req.sampling_params.logprobs is not None
    for token in output_token_ids:
        sequence.detokenizer.push(token)
        sequence.add_token_id(token, {token: REPORTED} if asked else None)


def row_of(named: TokenLogprobs | None) -> LogprobRow | None:
    """Return log-probabilities by token as a row, without texts."""
    if named is None:
        return None
    values = named.values()
    return LogprobRow(tuple(named), tuple(one.logprob for one in values), tuple(one.rank for one in values))


def fault_of(error: BaseException) -> Fault:
    """Return an error as a message has it, with at most LONGEST_TEXT characters."""
    kind = type(error).__name__
    text = str(error) if kind in KNOWN_ERRORS else f"{kind}: {error}"
    text = text.encode("utf-8", "backslashreplace").decode()  # a file name may hold surrogates
    return Fault(kind if kind in KNOWN_ERRORS else m6.RemoteError.__name__, text[:LONGEST_TEXT])


def error_of(fault: Fault, engine: str) -> m1.EngineError:
    """Return the error that an engine has reported."""
    error_type = KNOWN_ERRORS.get(fault.kind, m6.RemoteError)
    return error_type(f"{fault.text} (on {engine})")
