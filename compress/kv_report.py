"""What a report says about the KV cache and about facts far back in a text, as plain data and as tables of words.

run.json then holds

    kv_cache   scheme, serving (who reads it from the checkpoint), and layers: layer, keys and values, each with
               absmax, scale (a list; null where found at run time) and clipped (a fraction), over all that was scored
    recall     per data and depth: n, and nats per token of baseline and variant
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compress.amounts import format_loss, format_score
from evals.recall import depth_of

__all__ = ["Section", "long_range", "sections", "token_bytes"]

Rows = Sequence[Mapping[str, Any]]
SIDES = ("keys", "values")
DASH = "–"


@dataclass(frozen=True)
class Section:
    """A titled table with a sentence before it; every column but the first holds numbers."""

    title: str
    text: str
    header: tuple[str, ...]
    rows: list[tuple[str, ...]]


def long_range(kv_cache: Mapping[str, Any] | None, rows: Mapping[str, tuple[Rows, Rows]]) -> dict[str, Any]:
    """The entries of run.json; `rows` are those of baseline and variant by data."""
    found = {
        "kv_cache": kv_cache,
        "recall": [entry for data, sides in rows.items() for entry in _by_depth(data, *sides)],
    }
    return {name: value for name, value in found.items() if value}


def _by_depth(data: str, baseline: Rows, variant: Rows) -> Iterator[dict[str, Any]]:
    """Where the variant stopped early, the samples of both sides up to there."""
    pairs: dict[float, list[tuple[Mapping[str, Any], Mapping[str, Any]]]] = {}
    for pair in zip(baseline, variant, strict=False):
        depth = depth_of(str(pair[0]["id"]))
        if depth is not None:
            pairs.setdefault(depth, []).append(pair)
    for depth, found in sorted(pairs.items()):
        ours, theirs = (
            sum(row["nll"] for row in side) / sum(row["tokens"] for row in side) for side in zip(*found, strict=True)
        )
        yield {"data": data, "depth": depth, "n": len(found), "baseline": ours, "variant": theirs}


def sections(run: Mapping[str, Any]) -> list[Section]:
    """The parts of a report, none where run.json has nothing of the kind."""
    found = []
    if run.get("kv_cache"):
        found.append(_kv_cache(run["kv_cache"]))
    if run.get("recall"):
        found.append(_recall(run["recall"]))
    return found


def token_bytes(run: Mapping[str, Any]) -> tuple[int, int] | None:
    """Bytes of one token's keys and values over all layers, in 16 bits and as stored; None without a kv_cache stage."""
    layers = [layer for stage in run["stages"] if stage["name"] == "kv_cache" for layer in stage["layers"]]
    return (
        (sum(layer["bytes_before"] for layer in layers), sum(layer["bytes_after"] for layer in layers))
        if layers
        else None
    )


def _kv_cache(kv_cache: Mapping[str, Any]) -> Section:
    text = (
        f"The variant was measured with a KV cache in {kv_cache['scheme']}, {kv_cache['serving']}. Largest magnitudes "
        "and the fraction beyond the end of the grid are of all keys and values that were scored."
    )
    header = ("layer", *(f"{side}: {what}" for side in SIDES for what in ("largest", "scale", "clipped")))
    return Section("KV cache", text, header, [_layer(layer) for layer in kv_cache["layers"]])


def _layer(layer: Mapping[str, Any]) -> tuple[str, ...]:
    cells = [str(layer["layer"])]
    for side in (layer[name] for name in SIDES):
        scale, clipped = side["scale"], side["clipped"]
        cells += [
            f"{side['absmax']:.3g}",
            _scale(scale) if scale else DASH,
            DASH if clipped is None else f"{clipped:.2g}",
        ]
    return tuple(cells)


def _scale(scale: Sequence[float]) -> str:
    low, high = min(scale), max(scale)
    return f"{low:.3g}" if low == high else f"{low:.3g} to {high:.3g}"


def _recall(recall: Sequence[Mapping[str, Any]]) -> Section:
    rows = [
        (
            f"{entry['data']} at {entry['depth']:.0%}",
            str(entry["n"]),
            *(format_score("gold_nll", entry[side]) for side in ("baseline", "variant")),
            format_loss("gold_nll", entry["variant"] - entry["baseline"]),
        )
        for entry in recall
    ]
    text = "Loss of the right answer by where in the text the fact stands that is asked for."
    return Section("Recall by depth", text, ("depth", "n", "baseline", "variant", "loss"), rows)
