"""Propagated errors: aim each layer at what the unquantized model outputs, not at its own weights.

Behind quantized layers a layer reads x where the unquantized model reads x'. Codes that bring W~ x close to W x keep
the prefix's error; those that bring it close to W x' take some of it back. Completing the square,

    E |W x' - W~ x|^2  =  E |(W* - W~) x|^2 + const,    W* = W + W D H^-1,    D = E (x' - x) x^T,    H = E x x^T

so the same solvers work on W* in place of W. Sources: GPTAQ (arXiv 2504.02692), which adds the same term inside the
column loop, and Qronos (arXiv 2505.11695). D is estimated from as few tokens as H and, unlike H, fits their noise, so
only the share STRENGTH of the correction is taken; GPTAQ's code takes a quarter.
"""

from torch import Tensor

from quant.methods.gptq import Factor

__all__ = ["STRENGTH", "corrected"]

STRENGTH = 0.5


def corrected(weight: Tensor, drift: Tensor, factor: Factor) -> Tensor:
    """The weight (O, I) to aim at.

    Args:
        weight: (O, I) float32.
        drift: (I, I) float32 D, rows of x', columns of x.
        factor: of the damped H.
    """
    upper = factor.upper
    step = drift[:, factor.order] @ upper.t() @ upper  # D H^-1, columns in the factor's order
    return weight + STRENGTH * (weight @ step[:, factor.order.argsort()])
