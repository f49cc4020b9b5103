"""The table of calibration methods. A method chooses codes and scales on the grid that a format defines.

Every method works with every format; which one a format takes when the recipe names none is `DEFAULTS`, chosen by the
measurements of docs/LOG.md. A method is a choice of steps, each in a file of its own that knows no other:

    search      scales by least weighted rounding error     scale_search.py
    compensate  codes one column at a time, errors passed on    gptq.py
    propagate   aim at what the unquantized model outputs       propagate.py
    equalize    channel factors folded into the layer before    equalize.py
    learn       codes moved towards the source's block outputs  learned.py
"""

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["DEFAULTS", "ITERATIONS", "METHODS", "Method"]


@dataclass(frozen=True)
class Method:
    """A row of the table.

    summary     one line for `compress list methods`
    calibrated  it reads calibration data
    """

    summary: str
    calibrated: bool = True
    search: bool = True
    compensate: bool = False
    propagate: bool = False
    equalize: bool = False
    learn: bool = False

    @property
    def reference(self) -> bool:
        """It also needs what the unquantized model computes."""
        return self.propagate or self.learn


METHODS: Mapping[str, Method] = {
    "rtn": Method("round to nearest; needs no data and streams", calibrated=False, search=False),
    "search": Method("search scales weighted by the inputs' energy, then round to nearest"),
    "gptq": Method("search scales, then round column by column and let the others make up for it", compensate=True),
    "awq": Method("move channel factors into the layer before, search scales, round to nearest", equalize=True),
    "awq-gptq": Method("channel factors, searched scales, compensated rounding", compensate=True, equalize=True),
    "awq-gptaq": Method(
        "the same, aimed at the unquantized model's outputs", compensate=True, propagate=True, equalize=True
    ),
    "learned": Method(
        "awq-gptaq, then codes learned towards the unquantized block's outputs",
        compensate=True,
        propagate=True,
        equalize=True,
        learn=True,
    ),
}

ITERATIONS = 200  # of learned rounding

DEFAULTS: Mapping[str, str] = {  # of formats not named here: rtn
    "int4": "awq-gptq",
    "mxfp4": "awq-gptq",
    "nvfp4": "awq-gptq",
    "int8": "awq",
}
