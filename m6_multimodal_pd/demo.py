"""Pictures and clips in every request: `python -m m6_multimodal_pd.demo`.

Without flags: three pictures and a clip, drawn for this, in one batch with questions that have none, each shown beside
its answer; where the tokens of a prompt with a picture stand; what a picture costs when it comes again; and the same
batch through two processes, one that computes prompts and one that answers. `--image` and `--video` show something of
your own with `--prompt` or in a `--chat`. Most other flags are those of m1 to m5.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast, get_args

import torch
from rich.console import Console
from rich.text import Text

from m1_single_request import demo as m1
from m1_single_request.errors import ConfigError
from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m3_paged_attention import demo as m3
from m4_radix_cache import demo as m4
from m5_chunked_prefill_spec import demo as m5
from m5_chunked_prefill_spec.config import CHUNKED_BATCHED_TOKENS, SpeculativeConfig
from m6_multimodal_pd.config import URL_SCHEMES, MultimodalConfig
from m6_multimodal_pd.demo_parts.stage import Part, Settings
from m6_multimodal_pd.demo_parts.tour import tour
from m6_multimodal_pd.demo_parts.viewer import Viewer
from m6_multimodal_pd.disaggregation.config import DisaggregationConfig, TransportName
from m6_multimodal_pd.llm_engine import LLMEngine

NUM_TEXTS = 3
DESCRIPTION = """Watch the engine see pictures, answer, and explain every step. Without --prompt and --chat it shows a
tour, which needs no network and no GPU: pictures, a clip and texts in one batch; where a picture's tokens stand; a
picture that comes again; then the same batch through a process for prompts and one for answers."""
MEANINGS = m5.MEANINGS | {
    "dtype": "of weights and KV; default: on CUDA what the model names, on a CPU float32, or bfloat16 for a large one",
    "max_tokens": "an answer ends after so many; default: 128",
    "n": "so many answers to one prompt, which share it and its pictures; in the tour: to the first picture's question",
    "temperature": "0, the default, takes the likeliest token; more draws it",
    "top_k": "draw from so many of the likeliest tokens; default: -1, all",
    "top_p": "draw from the likeliest tokens that have this share together; default: 1, all",
    "min_p": "draw from tokens with at least this share of the likeliest one's probability; default: 0, all",
    "presence_penalty": "less of what the answer has already; default: 0",
    "frequency_penalty": "the same for each time that it has it; default: 0",
    "repetition_penalty": "less of what prompt or answer have already; default: 1, no less",
    "seed": "of what is drawn: the same one draws the same",
    "num_prompts": f"requests without a picture in the tour's batch; default: {NUM_TEXTS}",
    "max_num_batched_tokens": "so many new tokens go through the model in one step; a longer prompt is cut, inside a "
    f"picture, too; default: {CHUNKED_BATCHED_TOKENS['cpu']} on a CPU, {CHUNKED_BATCHED_TOKENS['cuda']:,} on a GPU",
    "speculative": "who guesses tokens; default: ngram in the tour, else nobody. A draft model cannot see: it guesses "
    "for texts only",
}
"""Of flags of earlier milestones, here."""


def make_parser(prog: str = "python -m m6_multimodal_pd.demo") -> argparse.ArgumentParser:
    """The flags of m1 to m5, those of pictures, and those of engines that share the work."""
    parser = m5.make_parser(prog)
    parser.description = DESCRIPTION
    add_picture_flags(parser)
    add_group_flags(parser)
    parser.set_defaults(num_prompts=NUM_TEXTS)
    m5.retell(parser, MEANINGS, m5.MEMORY)
    return parser


def add_picture_flags(parser: argparse.ArgumentParser) -> None:
    """What is shown, and what the vision tower may cost."""
    pictures = parser.add_argument_group(
        "pictures",
        "With --prompt they stand before its text, with --chat before the first question, where /image PATH and "
        "/video PATH show more. With neither, the demo asks what is in them. Pixels and budget are those of the model "
        "and the device, if nothing is said.",
    )
    pictures.add_argument(
        "--image", action="append", default=[], metavar="PATH", help="show this picture; may be repeated"
    )
    pictures.add_argument(
        "--video",
        action="append",
        default=[],
        metavar="PATH",
        help="show this clip, a GIF, APNG or WebP, or a folder of frames; may be repeated, and comes behind the images",
    )
    pictures.add_argument(
        "--video-fps", type=float, metavar="FPS", help="frames a second of a --video that does not say so, a folder"
    )
    pictures.add_argument(
        "--allow-url",
        action="append",
        default=[],
        choices=URL_SCHEMES,
        help="let --image and --video be URLs of this kind; may be repeated",
    )
    pictures.add_argument("--min-pixels", type=int, metavar="PIXELS", help="enlarge a smaller picture to so many")
    pictures.add_argument("--max-pixels", type=int, metavar="PIXELS", help="reduce a larger picture to so many")
    pictures.add_argument(
        "--encoder-budget", type=int, metavar="TOKENS", help="the vision tower makes at most so many in one step"
    )
    pictures.add_argument(
        "--embedding-cache-bytes", type=int, metavar="BYTES", help="memory for what the vision tower has made"
    )


def add_group_flags(parser: argparse.ArgumentParser) -> None:
    """How many engines share the work."""
    group = parser.add_argument_group(
        "prefill and decode apart",
        "Some engines compute prompts, others answer, and a prompt's KV moves from one to the other. Each is a process "
        "that loads the model. The tour ends with such a group, 1 + 1 unless these flags say otherwise; with a --model "
        "of your own only if one of them is given. With --prompt and --chat they make a group answer in place of one "
        "engine.",
    )
    group.add_argument("--pd", action="store_true", help="a group, of one engine each")
    group.add_argument(
        "--prefill", type=int, metavar="N", help="so many engines that compute prompts; default: 1; implies --pd"
    )
    group.add_argument("--decode", type=int, metavar="N", help="so many engines that answer; default: 1; implies --pd")
    group.add_argument(
        "--transport",
        choices=get_args(TransportName),
        help="how KV moves between them; default: shared_memory; in_process: all of them run in this process, in "
        "turns; implies --pd",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    return m1.exit_status(run, make_parser().parse_args(argv))


def run(args: argparse.Namespace, console: Console) -> None:
    """Do what the flags say."""
    m3.check_flags(args)
    media = media_parts(args)
    if media and m1.is_tour(args):
        args.prompt = question_about(args)
    settings = settings_of(args, console)
    if args.threads or args.model is None:
        torch.set_num_threads(args.threads or 1)
    if m1.is_tour(args):
        tour(settings, console)
        return
    with LLMEngine(
        model_config=settings.model,
        scheduler_config=settings.scheduler,
        cache_config=settings.cache,
        speculative_config=settings.speculative,
        multimodal_config=settings.multimodal,
        trace_config=settings.trace,
        **groups(settings),
    ) as engine:
        viewer = Viewer(engine, settings, console, video_options(args))
        for part in media:
            viewer.show(part)
        if media and args.prompt is not None:
            console.print(Text.assemble(("question  ", "bold"), args.prompt))
        user = cast(SingleRequestEngine, viewer)  # all that m1 calls of an engine
        if args.chat:
            console.print("[dim]/image PATH and /video PATH show something with the next question[/dim]")
            m1.chat(user, settings.params, console, viewer.commands)
        else:
            m1.converse(user, args, settings.params, console)


def settings_of(args: argparse.Namespace, console: Console) -> Settings:
    """All flags, checked."""
    params = replace(m1.sampling_params(args), n=1 if args.n is None else args.n)
    memory, is_tour = m4.cache_config(args), m1.is_tour(args)
    return Settings(
        model=m3.model_config(args),
        scheduler=m5.scheduler_config(args),
        cache=m5.roomy(memory) if is_tour else memory,
        speculative=speculative_config(args),
        multimodal=multimodal_config(args),
        trace=m1.trace_config(args, m1.console_reader(args, console)),
        disaggregation=disaggregation_config(args),
        params=replace(params, n=1) if is_tour else params,
        num_texts=args.num_prompts,
        num_answers=params.n,
        live=args.trace in (None, "off"),
        options=m4.request_options(args),
    )


def media_parts(args: argparse.Namespace) -> list[Part]:
    """What the flags show, as parts of a message. Raises `ConfigError` for flags that have no effect."""
    if args.video_fps is not None and not args.video and not args.chat:
        raise ConfigError(f"video_fps={args.video_fps} has no effect without a video")
    if args.raw and (args.image or args.video):
        raise ConfigError("raw: it is the chat template that puts pictures into a prompt; leave --raw or them away")
    images: list[Part] = [{"type": "image", "image": path} for path in args.image]
    return [*images, *({"type": "video", "video": path, **video_options(args)} for path in args.video)]


def video_options(args: argparse.Namespace) -> dict[str, Any]:
    """What the flags say of every video."""
    return {} if args.video_fps is None else {"video_fps": args.video_fps}


def question_about(args: argparse.Namespace) -> str:
    """What is asked about pictures that came without a question."""
    if args.video:
        return "What happens in the clip?"
    return "Compare the two pictures." if len(args.image) == 2 else "Describe the picture."


def speculative_config(args: argparse.Namespace) -> SpeculativeConfig:
    """Who guesses, checked. If nobody was asked for: nobody, but in the tour, which is to show it."""
    asked = args.speculative or ("ngram" if m1.is_tour(args) else "none")
    known = m5.speculative_configs(argparse.Namespace(**vars(args) | {"speculative": asked}))
    return known.get(asked, SpeculativeConfig())


def disaggregation_config(args: argparse.Namespace) -> DisaggregationConfig | None:
    """The flags of engines that share the work, checked; None, if they do not. The tour has a pair of them, unless that
    would load a large model twice more."""
    if getattr(args, "group", None) is not None:
        group: DisaggregationConfig = args.group
        return group
    names = ("prefill", "decode", "transport")
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    wanted = args.pd or given or (m1.is_tour(args) and args.model is None)
    return DisaggregationConfig(**given) if wanted else None


def groups(settings: Settings) -> dict[str, Any]:
    """The keyword that makes an engine a group of them."""
    return {} if settings.disaggregation is None else {"disaggregation_config": settings.disaggregation}


def multimodal_config(args: argparse.Namespace) -> MultimodalConfig:
    """The flags of pictures, checked."""
    names = ("min_pixels", "max_pixels", "encoder_budget", "embedding_cache_bytes")
    given: dict[str, Any] = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return MultimodalConfig(allowed_url_schemes=tuple(args.allow_url), **given)


if __name__ == "__main__":
    raise SystemExit(main())
