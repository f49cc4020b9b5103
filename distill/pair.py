"""A student beside its teacher on the same rows of tokens.

The loss is computed inside the student's wrapper, not after it, so that whatever shards or replicates the student sees
one forward pass that ends in a number, and so that the head is used where its weights are whole. The teacher stands
outside: it is not wrapped, not saved, and has no gradients; or it is not there at all, and has been asked beforehand.
"""

from typing import Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from compress.head import final_states, read_head
from distill.data import Rows
from distill.losses import FORWARD_KL, Loss, States, Targets, TopK, summed_loss

__all__ = ["Recorded", "Student", "Teacher", "Teaches"]


class Teaches(Protocol):
    """Whatever knows what a teacher predicts."""

    def targets(self, rows: Rows) -> Targets:
        """For the learnt tokens of rows, one row after the other."""


class Recorded:
    """What the rows themselves bring, by `distill.record`."""

    def targets(self, rows: Rows) -> TopK:
        if rows.top is None:
            raise ValueError("the rows bring no predictions of a teacher")
        return rows.top[:, :-1][rows.learnt[:, 1:]]


class Teacher:
    """A frozen model. Refused where its logits do not follow from its final hidden states."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model.eval().requires_grad_(False)  # type: ignore[no-untyped-call]
        self.head = read_head(model)

    @torch.no_grad()
    def states(self, ids: Tensor) -> Tensor:
        """Final hidden states (N, T, hidden) of ids (N, T)."""
        return final_states(self.model, ids)

    def targets(self, rows: Rows) -> States:
        return States(self.states(rows.ids)[:, :-1][rows.learnt[:, 1:]], self.head)


class Student(nn.Module):
    """A model that learns; Refused as its teacher."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self._no_split_modules = model._no_split_modules  # what FSDP wraps
        self.head = read_head(model)

    def tie_weights(self) -> None:
        """Asked for by accelerate, which takes tied weights apart where it shards a model (FSDP2)."""
        self.model.tie_weights()

    def forward(self, rows: Rows, teacher: Teaches, loss: Loss) -> Tensor:
        """The loss (float32 scalar) summed over the learnt tokens of rows that lie where the student does."""
        mask = rows.learnt[:, 1:]
        ours = self.model.base_model(input_ids=rows.ids, use_cache=False).last_hidden_state[:, :-1][mask]
        return summed_loss((ours, self.head), teacher.targets(rows), rows.ids[:, 1:][mask], loss=loss)

    @torch.no_grad()
    def divergence(self, rows: Rows, teacher: Teaches, micro_batch: int) -> float:
        """KL(teacher ‖ student) in nats per token over all learnt tokens of `rows`, at temperature 1."""
        places = torch.split(torch.arange(len(rows.ids)), micro_batch)
        sums = [self(rows[place].to(self.model.device), teacher, FORWARD_KL).double() for place in places]
        return float(torch.stack(sums).sum()) / rows.tokens
