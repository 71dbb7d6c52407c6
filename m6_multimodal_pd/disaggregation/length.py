"""The length of a group's requests: every engine takes the same, so it is fixed before the first of them joins.

An engine fits its length to its own memory (`m3_paged_attention/model_len.py`), reports it and waits. When as many have
reported as the group is to have, the shortest is fixed, unless the user has named one. Engines that come later hear it
at once, and are refused if they have no room for such requests. New in this milestone. vLLM takes the minimum over its
workers (`get_kv_cache_configs`).
"""

from typing import TYPE_CHECKING

from m6_multimodal_pd.disaggregation.messages import LengthFitted, LengthFixed

if TYPE_CHECKING:
    from m6_multimodal_pd.disaggregation.router import Router


class GroupLength:
    """Belongs to the router."""

    def __init__(self, router: "Router") -> None:
        """`router`: sends to engines, or refuses them."""
        self._router = router
        self.waiting: dict[str, LengthFitted] = {}
        """Engines that wait for the length to be fixed, by name."""
        self.max_model_len: int | None = None
        """None: not fixed yet."""

    def report(self, name: str, fitted: LengthFitted) -> None:
        """An engine has fitted its length."""
        self.waiting[name] = fitted
        self._answer()

    def of_role(self, role: str) -> list[str]:
        """The engines of a role that wait."""
        return [name for name, fitted in self.waiting.items() if fitted.role == role]

    def fix(self, max_model_len: int) -> None:
        """Requests have at most so many tokens from now on."""
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
    """Why an engine cannot take requests of this length; None if it can."""
    own = fitted.max_model_len
    if own < max_model_len:
        return f"it has room for requests of {own:,} tokens, and max_model_len is {max_model_len:,} here"
    if fitted.is_named and own != max_model_len:
        return f"its max_model_len is {own:,}, as named, and {max_model_len:,} here"
    return None
