"""A student beside its teacher on the same rows of tokens.

The loss is computed inside the student's wrapper, not after it, so that whatever shards or replicates the student sees
one forward pass that ends in a number, and so that the head is used where its weights are whole. The teacher stands
outside: it is not wrapped, not saved, and has no gradients.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.head import final_states, read_head
from distill.data import Rows
from distill.losses import FORWARD_KL, Loss, summed_loss

__all__ = ["Student", "Teacher"]


class Teacher:
    """A frozen model. Refused where its logits do not follow from its final hidden states."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)  # type: ignore[no-untyped-call]
        self.head = read_head(model)

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """Final hidden states (N, T, hidden) of ids (N, T)."""
        return final_states(self.model, ids)


class Student(nn.Module):
    """A model that learns; Refused as its teacher."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules  # what FSDP wraps
        self.head = read_head(model)

    def forward(self, ids: Tensor, learnt: Tensor, teacher: Teacher, loss: Loss) -> Tensor:
        """The loss (float32 scalar) summed over the tokens of ids (N, T) that `learnt` (N, T) names."""
        mask = learnt[:, 1:]
        theirs = teacher.states(ids)[:, :-1][mask]
        ours = self.model.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1][mask]
        return summed_loss((ours, self.head), (theirs, teacher.head), ids[:, 1:][mask], loss=loss)

    @torch.no_grad()
    def divergence(self, rows: Rows, teacher: Teacher, micro_batch: int) -> float:
        """KL(teacher ‖ student) in nats per token over all learnt tokens of `rows`, at temperature 1."""
        device = self.model.device
        places = torch.split(torch.arange(len(rows.ids)), micro_batch)
        parts = (rows[place] for place in places)
        sums = [self(part.ids.to(device), part.learnt.to(device), teacher, FORWARD_KL).double() for part in parts]
        return float(torch.stack(sums).sum()) / rows.tokens
