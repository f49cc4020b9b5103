"""What a KV cache has seen, per layer: the range of its keys and values, and how much a stored scale clips."""

from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from quant.elements import E4M3_MAX

__all__ = ["LayerStatistics", "SideStatistics", "describe"]

# Up to here the nearest value of E4M3 is its last, as without an end; beyond, the end clips. Steps there are 32 apart.
CLIPS_ABOVE: Final = E4M3_MAX + 16


@dataclass
class SideStatistics:
    """The keys, or the values, of one layer.

    absmax    (H,) float32 largest magnitude of each head
    elements  numbers seen
    clipped   numbers beyond the end of the grid at the stored scale
    """

    absmax: Tensor | None = None
    elements: int = 0
    clipped: int = 0

    @property
    def finite(self) -> bool:
        """Whether every number seen was finite."""
        return self.absmax is None or bool(self.absmax.isfinite().all())

    def add(self, x: Tensor, valid: Tensor | None, scale: Tensor | None) -> None:
        """Count (B, H, T, D), where `valid` (B, T) says so; `scale` is the stored one, (1,) or (H, 1, 1)."""
        size = x.detach().abs().float()
        if valid is not None:
            size = size.masked_fill(~valid.to(size.device)[:, None, :, None], 0)
        largest = size.amax(dim=(0, 2, 3))
        self.absmax = largest if self.absmax is None else torch.maximum(self.absmax, largest)
        tokens = x.shape[0] * x.shape[2] if valid is None else int(valid.sum())
        self.elements += tokens * x.shape[1] * x.shape[3]
        if scale is not None:
            self.clipped += int((size > CLIPS_ABOVE * scale.float()).sum())


@dataclass
class LayerStatistics:
    """Both sides of one layer."""

    keys: SideStatistics = field(default_factory=SideStatistics)
    values: SideStatistics = field(default_factory=SideStatistics)


def describe(side: SideStatistics, scale: Tensor | None) -> dict[str, Any]:
    """Plain data: absmax, the stored scales (null where found at run time), and the clipped fraction beside them."""
    absmax = None if side.absmax is None else float(side.absmax.max())
    if scale is None or not side.elements:
        return {"absmax": absmax, "scale": None, "clipped": None}
    return {"absmax": absmax, "scale": scale.flatten().tolist(), "clipped": side.clipped / side.elements}
