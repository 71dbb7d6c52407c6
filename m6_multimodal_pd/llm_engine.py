"""m6's engine: m1's face over m6's parts. A prompt may be messages with images and video, in every call."""

from m1_single_request.llm_engine import LLMEngine as SingleRequestEngine
from m6_multimodal_pd.config import DEFAULT_MODEL, EngineConfig
from m6_multimodal_pd.interfaces import ROLES
from m6_multimodal_pd.wiring import PARTS


class LLMEngine(SingleRequestEngine):
    """The full engine. `generate`, `stream`, `add_request` and `chat` take messages whose contents may be lists of
    texts, images and videos; `chat_prompt` makes a prompt of them that keeps its pictures. A request may come with
    `priority=`, `cache_salt=` and `speculate=`."""

    parts = PARTS
    roles = ROLES
    config_type = EngineConfig
    default_model = DEFAULT_MODEL
    request_options = ("priority", "cache_salt", "speculate")
