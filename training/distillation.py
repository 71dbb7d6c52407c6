"""The loss of a draft model: how far its distribution is from the target's, token by token.

A draft is right where it says what the target would say, whether that is true or not. So the text of a dialogue only
sets the scene, and the target's distribution at every learned token is what is learned from: it says more than the one
token that came (which others were near), and the draft is not pulled towards what the target would never say.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from training.loop import Batch, cross_entropy, labelled_logits


class Distillation:
    """A `Loss`: the KL divergence from the target's distribution to the draft's, summed over the labelled tokens.

    Ids from `first_special_id` on are the special tokens. A batch without any is nothing but spans said twice: there
    the text is what the target would say, and not asking it halves the time.
    """

    def __init__(self, target: nn.Module, first_special_id: int) -> None:
        self.target = target.eval()
        self.first_special_id = first_special_id

    def __call__(self, logits: Tensor, batch: Batch) -> Tensor:
        """The summed loss of a batch, in nats."""
        if batch.input_ids.max() < self.first_special_id:
            return cross_entropy(logits, batch)
        with torch.no_grad():
            wanted = labelled_logits(self.target, batch).log_softmax(-1)
        return functional.kl_div(logits.log_softmax(-1), wanted, reduction="sum", log_target=True)
