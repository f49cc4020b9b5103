"""Per layer, the bits of a weight and what rounding did to it, as rows of words for a report.

There are two errors, and the words keep them apart. A calibrated stage has seen each layer's inputs, so it knows the
error of the layer's output. Rounding to nearest streams weights alone, so it knows only how far the weights moved; two
layers with equal weight errors can differ many times in what that does to their outputs.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["LayerErrors", "layer_errors"]

UNSEEN = " (error of its weights: calibration does not reach it)"
WORST, MOST = 8, 500  # layers shown at once, and listed in all
OUTPUT = "Layers whose output changed most: squared error of the output, relative to its energy"
WEIGHTS = "Layers whose weights moved most: squared error of the weights, relative to their energy"
WEIGHTS_NOTE = (
    "Rounding to nearest sees no inputs, so this is the error of the weights (told from one row in 32) and "
    "not of what the layers put out; the metrics above measure what it does to the model."
)


@dataclass(frozen=True)
class LayerErrors:
    """A table: what it shows, its rows by falling error, those of all layers in order of the model, and a note."""

    caption: str
    header: tuple[str, ...]
    worst: Sequence[tuple[str, ...]]
    rows: Sequence[tuple[str, ...]]
    note: str = ""


def layer_errors(report: Mapping[str, Any]) -> LayerErrors | None:
    """What the report of a stage says of its layers (run.json, stages[].report); None where it says nothing."""
    bits = report.get("bits", {})
    if weights := report.get("weight_errors"):
        return _table({name: (error,) for name, error in weights.items()}, bits, WEIGHTS, ("weight error",))
    blocks = report.get("blocks", ())
    layers = {name: found for block in blocks for name, found in block.get("layers", {}).items() if "error" in found}
    if not layers:
        return None
    errors = {name: (found["error"], found["nearest"]) for name, found in layers.items()}
    unseen = {name for name, found in layers.items() if not found["tokens"]}
    return _table(errors, bits, OUTPUT, ("output error", "with round to nearest"), unseen)


def _table(
    errors: Mapping[str, tuple[float, ...]],
    bits: Mapping[str, float],
    caption: str,
    columns: tuple[str, ...],
    unseen: Collection[str] = (),
) -> LayerErrors:
    rows = {
        name: (
            name + (UNSEEN if name in unseen else ""),
            f"{bits[name]:.2f}" if name in bits else "–",
            *(f"{value:.3%}" for value in found),
        )
        for name, found in errors.items()
    }
    worst = sorted(errors, key=lambda name: -errors[name][0])[:WORST]
    header = ("layer", "bits per weight", *columns)
    note = WEIGHTS_NOTE if caption is WEIGHTS else ""
    return LayerErrors(caption, header, [rows[name] for name in worst], [*rows.values()][:MOST], note)
