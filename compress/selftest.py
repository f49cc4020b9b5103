"""`compress selftest`: prove on the recipe's own model and data that the gate can pass, fail and refuse.

Three variants of the source go through the same code as any other: the source itself must PASS, a copy whose weights
carry noise must FAIL, a copy with one NaN must be REFUSED. A gate that cannot fail is worth nothing.
"""

import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from compress.checkpoint import Checkpoint
from compress.errors import Refused
from compress.evaluation import load_sets
from compress.judgement import Side, hash_side, judge
from compress.modules import modules
from compress.progress import say, step
from compress.recipe import Recipe
from compress.recipe_file import load_recipe
from compress.source import cache_directory, check_usable, fetch_source
from compress.tensor_file import Spec
from compress.writer import ShardWriter, copy_side_file, plan_shards, write_json
from evals.gate import overall
from evals.samples import SampleSet

__all__ = ["selftest"]

NOISE = 0.5  # of each matrix' standard deviation: far beyond any quantization
Damage = Callable[[Tensor], Tensor]


def selftest(name: str, overrides: Sequence[str], *, as_json: bool = False) -> int:
    """Run the three cases and print them; 0 if each ends as it must, 1 otherwise."""
    recipe = load_recipe(name, [*overrides, "gate.allow_identical=true"])
    source = Checkpoint.open(fetch_source(recipe.model, recipe.revision, say))
    check_usable(source, trust_remote_code=recipe.trust_remote_code)
    sets = load_sets(recipe)
    baseline = hash_side(source.path, "the source", links=True)
    cases = []
    for label, expected, damage in CASES:
        say(f"{label}: must be {expected}")
        found = _verdict(recipe, sets, source, baseline, damage)
        cases.append({"variant": label, "must_be": expected, "is": found})
    passed = all(case["is"] == case["must_be"] for case in cases)
    if as_json:
        print(json.dumps({"passed": passed, "cases": cases}, indent=2))
    else:
        Console().print(_table(cases))
    return 0 if passed else 1


def _table(cases: Sequence[Mapping[str, str]]) -> Table:
    table = Table("variant", "must be", "is", header_style="bold")
    for case in cases:
        table.add_row(*case.values())
    return table


def _verdict(recipe: Recipe, sets: list[SampleSet], source: Checkpoint, baseline: Side, damage: Damage | None) -> str:
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="selftest.", dir=cache_directory()) as folder:
        variant = source.path if damage is None else _damaged(source, Path(folder) / "variant", damage)
        try:
            judgement = judge(recipe, sets, baseline, variant, Path(folder) / "evaluation", ledger=False)
        except Refused:
            return "REFUSED"
        return overall(judgement.results, metrics=judgement.plan.metrics, refusals=judgement.refusals).verdict


def _damaged(source: Checkpoint, target: Path, damage: Damage) -> Path:
    """A copy of the checkpoint with every linear layer changed."""
    target.mkdir()
    linear = {module.tensor for module in modules(source) if module.cls == "Linear" and len(module.weight.shape) == 2}
    linear -= {module.tensor for module in modules(source) if module.cls == "Embedding"}
    specs = {name: Spec(info.dtype, info.shape) for name, info in source.tensors.items()}
    with (
        step("damaging a copy", source.nbytes) as advance,
        ShardWriter(target, plan_shards(specs, 5 * 10**9)) as writer,
    ):
        for name, info in source.tensors.items():
            tensor = source.read(name)
            writer.append(name, damage(tensor) if name in linear else tensor)
            advance(info.nbytes)
    write_json(target / "config.json", source.config)
    for file in source.side_files:
        copy_side_file(source.path / file, target / file)
    return target


def _noisy(weight: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(weight.numel())
    noise = torch.randn(weight.shape, generator=generator)
    return (weight.float() + NOISE * weight.float().std() * noise).to(weight.dtype)


def _with_nan(weight: Tensor) -> Tensor:
    weight.view(-1)[0] = torch.nan
    return weight


CASES: tuple[tuple[str, str, Damage | None], ...] = (
    ("the source itself", "PASS", None),
    ("a copy with noise", "FAIL", _noisy),
    ("a copy with NaN", "REFUSED", _with_nan),
)
