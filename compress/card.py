"""The model card: front matter for the hub and a section with the verdict, merged into the card that is there.

What people wrote stays: our section stands between two markers and is replaced as a whole. Front matter is carried
over, licence included, but the results of another model (`model-index`), which a copied card may bring along. Our
own results are written there only where a whole benchmark was measured and everything passed; a table shows the rest.

The hub's other place for results, `.eval_results/*.yaml`, is left out: it feeds public leaderboards, and whether a data
set has one, under which task id and in percent or not, stands in the data set's own repository and not in a run.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from jinja2 import Environment, PackageLoader, StrictUndefined

from compress.amounts import format_bytes
from compress.checkpoint import quantization_block
from compress.engines import TRANSFORMERS, VLLM, loads_in
from compress.errors import InputError
from compress.evidence_files import LOCK, read_gate, read_json, seal
from compress.inputs import HUB_REPOSITORY
from compress.manifest import EVIDENCE
from compress.report import COLUMNS, claim, headline, markdown_text, metric_cells

__all__ = ["CardInput", "model_card", "read_card_input"]

BEGIN, END = "<!-- compress: begin -->", "<!-- compress: end -->"
FRONT = re.compile(r"\A---\s*\n(.*?)\n---\s*\n", re.DOTALL)
# data of a recipe -> the data set it is on the hub
BENCHMARKS: Final = {"wikitext": ("wikitext-2-raw-v1", "Salesforce/wikitext"), "gsm8k": ("gsm8k", "openai/gsm8k")}


@dataclass(frozen=True)
class CardInput:
    """What a card is made of: gate.json, run.json, the lock, config.json, the seal, and the source's hub id if any."""

    gate: Mapping[str, Any]
    run: Mapping[str, Any]
    lock: Mapping[str, Any]
    config: Mapping[str, Any]
    seal: str
    base_model: str | None


def read_card_input(directory: Path, base_model: str | None) -> CardInput:
    """Everything a card needs from the output of a run; the source's id is `base_model`, else how it was fetched.

    Raises:
        InputError, Refused: files that are missing or damaged.
    """
    folder = directory / EVIDENCE
    run = read_json(folder / "run.json")
    fetched = str(run.get("source", ""))
    is_id = bool(HUB_REPOSITORY.fullmatch(fetched)) and not Path(fetched).exists()
    return CardInput(
        gate=read_gate(directory),
        run=run,
        lock=yaml.safe_load((folder / LOCK).read_text(encoding="utf-8")),
        config=read_json(directory / "config.json"),
        seal=seal(directory),
        base_model=base_model or (fetched if is_id else None),
    )


def model_card(found: CardInput, repo: str, existing: str | None) -> str:
    """The text of README.md for `repo`, merged into `existing`.

    Raises:
        InputError: the front matter of the existing card cannot be read.
    """
    front, body = _split(existing or "")
    metadata = _metadata(front, found, repo)
    section = f"{BEGIN}\n{_section(found, repo)}\n{END}"
    before, begin, rest = body.partition(BEGIN)
    _, end, after = rest.partition(END)
    body = f"{before}{section}{after}" if begin and end else f"{section}\n\n{body.strip()}"
    head = yaml.safe_dump(metadata, sort_keys=False, allow_unicode=True)
    return f"---\n{head}---\n\n{body.strip()}\n"


def _split(text: str) -> tuple[dict[str, Any], str]:
    """Front matter and the rest."""
    match = FRONT.match(text)
    if match is None:
        return {}, text
    try:
        front = yaml.safe_load(match[1])
    except yaml.YAMLError as error:
        raise InputError(f"the front matter of README.md is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(front, dict | None):
        raise InputError("the front matter of README.md holds no mapping of keys to values")
    return front or {}, text[match.end() :]


def _metadata(front: Mapping[str, Any], found: CardInput, repo: str) -> dict[str, Any]:
    """The front matter: what was there, and what is true of these files."""
    kept = {key: value for key, value in front.items() if key not in ("model-index", "base_model_relation")}
    tags = kept.get("tags")
    ours = ["compress-gate", *_formats(found.config)]
    kept["tags"] = list(dict.fromkeys([*(tags if isinstance(tags, list) else [tags] if tags else []), *ours]))
    kept = {"library_name": "transformers", "pipeline_tag": "text-generation"} | kept
    if found.base_model:
        kept |= {"base_model": found.base_model, "base_model_relation": "quantized"}
    results = _results(found)
    return kept | ({"model-index": [{"name": repo, "results": results}]} if results else {})


def _formats(config: Mapping[str, Any]) -> list[str]:
    block = quantization_block(config) or {}
    return [str(block[key]) for key in ("quant_method", "format") if block.get(key)]


def _results(found: CardInput) -> list[dict[str, Any]]:
    """model-index entries: only of a PASS, only of a benchmark of which every sample was scored."""
    if found.gate["verdict"] != "PASS":
        return []
    return [_result(metric, *known) for metric in found.gate["metrics"] if (known := _benchmark(metric, found))]


def _benchmark(metric: Mapping[str, Any], found: CardInput) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The data set of a metric and how a task computes its figure; None for a part of one, or for one of your own."""
    data = found.lock["plan"]["data"].get(metric["data"], {})
    if data.get("source") in BENCHMARKS and data.get("complete") == metric["n"]:
        name, kind = BENCHMARKS[data["source"]]
        return {"name": name, "type": kind}, {}
    task = found.run.get("tasks", {}).get(metric["data"], {})
    if task.get("dataset") and task["documents"] == metric["n"]:
        dataset = {"name": task["task"], "type": task["dataset"], "config": task["config"], "split": task["split"]}
        how = {"harness": "lm-eval", **{key: task[key] for key in ("metric", "filter", "num_fewshot")}}
        return {key: value for key, value in dataset.items() if value}, how
    return None


def _result(metric: Mapping[str, Any], dataset: Mapping[str, Any], how: Mapping[str, Any]) -> dict[str, Any]:
    names = ("baseline", "loss", "lower", "upper", "margin", "n")
    return {
        "task": {"type": "text-generation"},
        "dataset": dict(dataset),
        "metrics": [
            {
                "type": metric["kind"],
                "name": metric["id"],
                "value": metric["variant"],
                "args": {**{name: metric[name] for name in names}, **how},
            }
        ],
    }


def _section(found: CardInput, repo: str) -> str:
    """Our part of the card, as Markdown in which nothing from outside is markup."""
    environment = Environment(
        loader=PackageLoader("compress", "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"text": markdown_text, "bytes": format_bytes, "literal": _literal}
    engines = loads_in(found.config)
    return environment.get_template("card.md.j2").render(
        gate=found.gate,
        run=found.run,
        headline=headline(found.gate),
        claim=claim(found.gate) if found.gate["verdict"] == "PASS" else "",
        columns=COLUMNS,
        optional=any(not metric["required"] for metric in found.gate["metrics"]),
        rows=[metric_cells(metric) for metric in found.gate["metrics"]],
        recipe=yaml.safe_dump(found.lock["recipe"], sort_keys=False, allow_unicode=True).rstrip(),
        engines=engines,
        transformers=TRANSFORMERS in engines,
        vllm=VLLM in engines,
        repo=repo,
        seal=found.seal,
    )


def _literal(text: str) -> str:
    """A fenced block with a fence longer than any in the text."""
    runs = [len(run) for run in re.findall("`+", text)]
    fence = "`" * max(3, *(length + 1 for length in runs)) if runs else "```"
    return f"{fence}\n{text}\n{fence}"
