"""A mixture's experts with rounded inputs, in place of the fused module that transformers builds.

transformers holds all experts of a layer as two 3-D parameters and multiplies them in one grouped kernel, where no hook
can reach the input of one expert's down projection. This module runs the same sum expert by expert, from the same
parameters, with each expert's inputs rounded first. Experts kept as separate linears need none of this.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from compress.errors import Refused
from quant.activations import Quantizer

__all__ = ["EmulatedExperts", "ExpertInputs"]

# what transformers' experts classes say about their layout, and the only values the sum below is right for
LAYOUT = {"is_transposed": False, "has_bias": False, "has_post_expert_norm": False}


@dataclass(frozen=True)
class ExpertInputs:
    """The rounding of one expert's two inputs: hidden states into gate and up, their product into down."""

    up: Quantizer
    down: Quantizer


class EmulatedExperts(nn.Module):
    """The routed sum of experts, sum_e w_e * down_e(act(gate_e(x)) * up_e(x)), with every input rounded."""

    experts: Any  # the attributes of transformers' experts are not declared

    def __init__(self, experts: nn.Module, inputs: Sequence[ExpertInputs]) -> None:
        """Take over the parameters of `experts`, transformers' module of E fused experts.

        Raises:
            Refused: experts of a layout that is not emulated.
        """
        super().__init__()
        odd = [name for name, value in LAYOUT.items() if getattr(experts, name, value) != value]
        if odd or not hasattr(experts, "has_gate"):
            raise Refused(
                f"the inputs of {type(experts).__name__} ({', '.join(odd) or 'no layout stated'}) cannot be rounded: "
                "use a format with 16-bit inputs for its experts"
            )
        self.experts = experts
        self.inputs = inputs

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H), the chosen experts (T, K) and their weights (T, K) -> (T, H)."""
        out = torch.zeros_like(hidden_states)
        for expert in sorted(set(top_k_index.flatten().tolist())):
            token, slot = torch.where(top_k_index == expert)
            y = self._one(expert, hidden_states[token]) * top_k_weights[token, slot, None]
            out.index_add_(0, token, y.to(out.dtype))
        return out

    def _one(self, expert: int, x: Tensor) -> Tensor:
        module, rounded = self.experts, self.inputs[expert]
        x = rounded.up(x)
        if module.has_gate:
            x = module._apply_gate(F.linear(x, module.gate_up_proj[expert]))
        else:
            x = module.act_fn(F.linear(x, module.up_proj[expert]))
        return F.linear(rounded.down(x), module.down_proj[expert])
