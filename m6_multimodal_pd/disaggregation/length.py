"""Fix one `max_model_len` for all engines of a group, before the first of them joins.

An engine fits its length to its own memory (`m3_paged_attention/model_len.py`), reports it and waits. When all engines
of the group have reported, the router fixes the shortest length, unless the user has named one. An engine that starts
later receives the length at once, and is rejected if it has no room for such requests. New in this milestone. vLLM
takes the minimum over its workers (`get_kv_cache_configs`).
"""

from typing import TYPE_CHECKING

from m6_multimodal_pd.disaggregation.runtime.messages import LengthFitted, LengthFixed

if TYPE_CHECKING:
    from m6_multimodal_pd.disaggregation.router import Router


class GroupLength:
    """The router's record of the lengths that engines have reported, and of the fixed one."""

    def __init__(self, router: "Router") -> None:
        """`router`: sends to engines, or refuses them."""
        self._router = router
        self.waiting: dict[str, LengthFitted] = {}
        """Reports of engines that wait for the length, by engine name."""
        self.max_model_len: int | None = None
        """In tokens; None until it is fixed."""

    def report(self, name: str, fitted: LengthFitted) -> None:
        """Store the length that an engine has fitted; answer at once if the group's length is fixed."""
        self.waiting[name] = fitted
        self._answer()

    def of_role(self, role: str) -> list[str]:
        """Return the names of waiting engines of a role."""
        return [name for name, fitted in self.waiting.items() if fitted.role == role]

    def fix(self, max_model_len: int) -> None:
        """Fix the group's `max_model_len` and answer all waiting engines."""
        self.max_model_len = max_model_len
        self._answer()

    def _answer(self) -> None:
        for name in list(self.waiting) if self.max_model_len is not None else ():
            assert self.max_model_len is not None
            fitted = self.waiting.pop(name)
            why = misfit(fitted, self.max_model_len)
            if why is None:
                self._router.send(name, LengthFixed(self.max_model_len))
            else:
                self._router.refuse(name, fitted.role, why)


def misfit(fitted: LengthFitted, max_model_len: int) -> str | None:
    """Return why an engine cannot serve requests of `max_model_len` tokens, or None if it can."""
    own = fitted.max_model_len
    if own < max_model_len:
        return f"it has room for requests of {own:,} tokens, and max_model_len is {max_model_len:,} here"
    if fitted.is_named and own != max_model_len:
        return f"its max_model_len is {own:,}, as named, and {max_model_len:,} here"
    return None
