"""What calibration keeps of the inputs of a layer: second moments, range, how active they are, and a few of them."""

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Statistics"]

SAMPLE = 256  # inputs that are kept as they are
TILE = 192  # columns: of x^T x only tiles on and below the diagonal are computed


class Statistics:
    """Sums over all tokens that a layer has seen, shared by the layers that read the same input.

    Products are float32; their sums are float64, where adding them is exact in practice. So the result does not depend
    on how the tokens were split into batches of the same size, nor over ranks.
    """

    def __init__(self, features: int, device: torch.device) -> None:
        self.tokens = 0
        self.absmax = torch.zeros(features, device=device)  # (I,) largest magnitude per column
        self.activity = torch.zeros(features, device=device)  # (I,) sum over sequences of (mean over tokens |x|)^2
        self.sample = torch.zeros(SAMPLE, features, device=device)  # (SAMPLE, I) of the first batch; rows left are zero
        self._sum = torch.zeros(features, features, dtype=torch.float64, device=device)
        self._drift: Tensor | None = None

    def add(self, inputs: Tensor, exact: Tensor | None = None) -> None:
        """Count inputs (..., I) of any float dtype, and the unquantized model's of the same tokens where known."""
        x = inputs.reshape(-1, inputs.shape[-1]).float()
        if len(x):
            if not self.tokens:
                spread = x[:: -(-len(x) // SAMPLE)]
                self.sample[: len(spread)] = spread
            self.tokens += len(x)
            _add_gram(x, self._sum)
            size = x.abs()
            self.absmax = torch.maximum(self.absmax, size.amax(dim=0))
            self.activity += size.reshape(inputs.shape).mean(dim=-2).square().reshape(-1, x.shape[1]).sum(dim=0)
            if exact is not None:
                drift = self._drift if self._drift is not None else torch.zeros_like(self._sum)
                self._drift = drift.add_((exact.reshape(x.shape).float() - x).t() @ x)

    def all_reduce(self) -> None:
        """Sum over all ranks, where there are several."""
        if not dist.is_initialized():
            return
        tokens = torch.tensor(self.tokens, device=self._sum.device)
        dist.all_reduce(tokens)
        dist.all_reduce(self._sum)
        dist.all_reduce(self.activity)
        if self._drift is not None:
            dist.all_reduce(self._drift)
        dist.broadcast(self.sample, 0)  # the first rank has the first batch
        dist.all_reduce(self.absmax, op=dist.ReduceOp.MAX)
        self.tokens = int(tokens)

    @property
    def hessian(self) -> Tensor:
        """(I, I) float32, the mean of x x^T.

        Raises:
            ValueError: no token was seen, or an input was NaN or infinite.
        """
        if not self.tokens:
            raise ValueError("no calibration token reached this layer")
        lower = (self._sum / self.tokens).float().tril_()
        mean = lower + lower.tril(-1).t()
        if not bool(mean.isfinite().all()):
            raise ValueError("a calibration activation is NaN or infinite")
        return mean

    @property
    def drift(self) -> Tensor | None:
        """(I, I) float32, the mean of (x' - x) x^T, x' the unquantized model's input; None where it was not given."""
        return None if self._drift is None else (self._drift / self.tokens).float()


def _add_gram(x: Tensor, total: Tensor) -> None:
    """Add x^T x for x (tokens, I) to `total` (I, I), right on and below its diagonal alone: it is symmetric."""
    for at in range(0, x.shape[1], TILE):
        rows = slice(at, min(at + TILE, x.shape[1]))
        total[rows, : rows.stop] += x[:, rows].t() @ x[:, : rows.stop]
