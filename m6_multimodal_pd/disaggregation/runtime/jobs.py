"""Requests as messages, and back.

The router has checked a request and knows all its texts; what an engine needs are numbers. On the way back come tokens
and log-probabilities, and errors as a name and a text: what is no error of ours arrives as a `RemoteError`.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from m1_single_request import errors as m1
from m1_single_request.outputs import Logprob, TokenLogprobs
from m1_single_request.sampler import LogprobRow, SampledTokens
from m3_paged_attention import errors as m3
from m4_radix_cache import errors as m4
from m6_multimodal_pd import errors as m6
from m6_multimodal_pd.disaggregation.runtime.messages import Fault, Item, Job, Media, Row, Tokens
from m6_multimodal_pd.models.qwen3_vl import MediaTokens
from m6_multimodal_pd.multimodal.inputs import Modality, MultimodalDataItem, MultimodalInputs
from m6_multimodal_pd.multimodal.prompt import ChatPrompt
from m6_multimodal_pd.request import Req

KNOWN_ERRORS: dict[str, type[m1.EngineError]] = {
    name: value
    for module in (m1, m3, m4, m6)
    for name, value in vars(module).items()
    if isinstance(value, type) and issubclass(value, m1.EngineError)
}
LONGEST_TEXT = 4096
TOLD = Logprob(0.0, 1, "")


def job_of(req: Req, *, speculate: bool) -> Job:
    """A request, as it stands, for engines. `speculate`: whether its tokens may be guessed."""
    media = req.multimodal_inputs
    assert media is None or isinstance(media, MultimodalInputs)
    return Job(
        rid=req.rid,
        prompt_token_ids=tuple(req.origin_input_ids),
        output_token_ids=tuple(req.output_ids),
        params=replace(req.sampling_params, n=1),
        seed=req.seed,
        priority=req.priority,
        cache_salt=req.extra_key,
        speculate=speculate,
        media=None if media is None else _media_of(media),
    )


def _media_of(inputs: MultimodalInputs) -> Media:
    return Media(
        items=tuple(
            Item(
                modality=item.modality.value,
                offsets=item.offsets,
                feature=item.feature,
                grid_thw=item.grid_thw,
                hash=item.hash,
                size=item.size,
            )
            for item in inputs.mm_items
        ),
        mrope_positions=inputs.mrope_positions,
        mrope_position_delta=inputs.mrope_position_delta,
        options_key=inputs.options_key,
    )


def prompt_of(job: Job, tokens: MediaTokens | None) -> list[int]:
    """The prompt of a job as intake takes it, with its pictures. `tokens`: of the model; None: it takes texts only."""
    if job.media is None or tokens is None:
        return list(job.prompt_token_ids)
    inputs = MultimodalInputs(
        mm_items=tuple(
            MultimodalDataItem(
                modality=Modality(item.modality),
                offsets=item.offsets,
                feature=item.feature,
                grid_thw=item.grid_thw,
                hash=item.hash,
                size=item.size,
            )
            for item in job.media.items
        ),
        mrope_positions=job.media.mrope_positions,
        mrope_position_delta=job.media.mrope_position_delta,
        options_key=job.media.options_key,
    )
    return ChatPrompt(job.prompt_token_ids, inputs)


def resume(req: Req, output_token_ids: tuple[int, ...]) -> None:
    """Let a new request have said these tokens already, elsewhere. What was told of their log-probabilities is told: an
    entry stands in for each, where the request asks for them."""
    sequence = req.sequence
    asked = req.sampling_params.logprobs is not None
    for token in output_token_ids:
        sequence.detokenizer.push(token)
        sequence.add_token_id(token, {token: TOLD} if asked else None)


def row_of(named: TokenLogprobs | None) -> Row | None:
    """Log-probabilities by token, as a message has them."""
    if named is None:
        return None
    return Row(
        token_ids=tuple(named),
        logprobs=tuple(one.logprob for one in named.values()),
        ranks=tuple(one.rank for one in named.values()),
    )


def to_row(row: Row | None) -> LogprobRow | None:
    """The same as a sampler makes them."""
    return None if row is None else LogprobRow(row.token_ids, row.logprobs, row.ranks)


def sampled_of(tokens: Tokens) -> SampledTokens:
    """What came, as a sampler gives it."""
    of_prompt = tokens.prompt_logprobs
    return SampledTokens(
        tokens.token_ids,
        tuple(map(to_row, tokens.logprobs)),
        None if of_prompt is None else tuple(row for own in of_prompt if (row := to_row(own)) is not None),
    )


def named_row(row: Row | None) -> Mapping[int, Logprob] | None:
    """The same by token, without texts."""
    if row is None:
        return None
    columns = zip(row.token_ids, row.logprobs, row.ranks, strict=True)
    return {token_id: Logprob(logprob, rank, "") for token_id, logprob, rank in columns}


def fault_of(error: BaseException) -> Fault:
    """An error as it can be told."""
    kind = type(error).__name__
    text = str(error) if kind in KNOWN_ERRORS else f"{kind}: {error}"
    text = text.encode("utf-8", "backslashreplace").decode()  # a file's name may hold what cannot be sent
    return Fault(kind if kind in KNOWN_ERRORS else m6.RemoteError.__name__, text[:LONGEST_TEXT])


def error_of(fault: Fault, engine: str) -> m1.EngineError:
    """The error that an engine told of."""
    error_type: Any = KNOWN_ERRORS.get(fault.kind, m6.RemoteError)
    error: m1.EngineError = error_type(f"{fault.text} (on {engine})")
    return error
