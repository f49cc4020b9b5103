"""Recipes: what is wrong is said at once, all of it, with path, value and what is allowed."""

from pathlib import Path

import pytest

from compress.errors import RecipeError
from compress.recipe import Recipe
from compress.recipe_file import load_recipe, parse_recipe, shipped_recipes

KV = ["kv-fp8", "kv-int8", "kv-int4", "fp8-kv-fp8"]
SHIPPED = ["bf16", "fp8", "fp8-block", "int4", "int8", "mxfp4", "nf4", "nvfp4", *KV]


def refused(*overrides: str, name: str = "fp8.yaml") -> str:
    with pytest.raises(RecipeError) as error:
        load_recipe(name, overrides)
    return str(error.value)


def test_shipped_recipes_are_all_there() -> None:
    assert set(SHIPPED) <= shipped_recipes().keys()


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_recipe_is_whole(name: str) -> None:
    text = shipped_recipes()[name]
    assert text.splitlines()[0] == f"# compress run recipe={name}.yaml"
    recipe = load_recipe(name)
    assert recipe.output == f"out/{name}"
    assert any(metric.required for metric in recipe.gate.metrics.values())


@pytest.mark.parametrize("name", KV)
def test_kv_recipes_require_long_documents_and_recall(name: str) -> None:
    recipe = load_recipe(name)
    required = {recipe.data_of(metric) for metric, options in recipe.gate.metrics.items() if options.required}
    assert {"long", "recall"} <= required
    assert recipe.evals.documents["long"].max_tokens >= 2048 and recipe.evals.documents["long"].count >= 20
    assert recipe.evals.problems["recall"].source == "recall" and recipe.evals.problems["recall"].count >= 20
    assert recipe.stages[-1].name == "kv_cache"


def test_overrides_reach_everything() -> None:
    recipe = load_recipe(
        "int4",
        [
            "stages.0.quantize.group_size=32",
            "gate.metrics.text.max_increase=2%",
            "model=./dir",
            "evals.documents.text.count=9",
            "max_shard_size=200MiB",
            "stages.0.quantize.ignore=[lm_head, 're:.*down_proj$']",
        ],
    )
    assert recipe.stages[0].quantize.group_size == 32
    assert recipe.gate.metrics["text"].margin == pytest.approx(0.02)
    assert (recipe.model, recipe.evals.documents["text"].count, recipe.max_shard_size) == ("./dir", 9, 200 * 2**20)
    assert recipe.stages[0].quantize.ignore == ("lm_head", "re:.*down_proj$")


@pytest.mark.parametrize("name", shipped_recipes())
def test_resolved_recipe_reads_back_equal(name: str) -> None:
    recipe = load_recipe(name)
    assert Recipe.model_validate(recipe.model_dump(mode="json", exclude_none=True)) == recipe


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("modle=x", "modle: unknown key, did you mean 'model'?"),
        (
            "gate.metrics.text.max_increas=2%",
            "gate.metrics.text.max_increas: unknown key, did you mean 'max_increase'?",
        ),
        ("stages.0.quantize.format=fp9", "stages.0.quantize: format 'fp9' is unknown, did you mean 'fp8'?"),
        ("stages.0.quantize.group_size=32", "format 'fp8' has no option 'group_size'"),
        ("stages.0.quantize.iterations=5", "method 'rtn' does not iterate: leave iterations out, or use learned"),
        ("stages.0.quantize.method=gtpq", "stages.0.quantize.method: no method 'gtpq'"),
        ("gate.alpha=2", "gate.alpha: input should be less than 0.5 (got 2)"),
        ("gate.metrics.extra.kind=kl", "gate.metrics.extra.max: missing; say how much divergence is allowed"),
        ("gate.metrics.text={kind: log_perplexity}", "gate.metrics.text.max_increase: missing; say how much loss"),
        ("gate.metrics.text.max_increase=lots", "gate.metrics.text.max_increase: write a percentage, for example 3%"),
        ("gate.metrics.text.max_increase=-1%", "the margin must be above 0%"),
        ("gate.metrics.math.max_increase=.nan", "gate.metrics.math.max_increase"),
        ("gate.metrics={}", "gate.metrics: dictionary should have at least 1 item"),
        (
            "gate.metrics.math.data=nowhere",
            "gate.metrics.math: gold_nll needs evals.problems.nowhere, which is missing",
        ),
        ("evals.problems.text={source: arithmetic}", "text is used twice"),
        ("evals.documents.text.count=0", "evals.documents.text.count: input should be greater than 0 (got 0)"),
        ("max_shard_size=big", "max_shard_size: write a size, for example 5GB or 200MiB (got 'big')"),
        ("stages=[]", "stages: tuple should have at least 1 item"),
        ("stages.0={quantize: {format: int8}, kv_cache: {scheme: int8}}", "exactly one of quantize, kv_cache"),
        (
            "stages.0={kv_cache: {scheme: fp9}}",
            "stages.0.kv_cache: scheme 'fp9' is unknown, did you mean 'fp8'?",
        ),
        ("stages.0={kv_cache: {scheme: fp8, residal: 32}}", "kv_cache.residal: unknown key, did you mean 'residual'?"),
        ("stages.0={}", "stages.0: a stage has exactly one of quantize, kv_cache, distill, draft"),
    ],
)
def test_problem_is_named_with_its_path(override: str, says: str) -> None:
    assert says in refused(override)


def test_every_problem_in_one_message() -> None:
    message = refused("modle=x", "gate.alpha=2", "stages.0.quantize.format=fp9")
    assert "has 3 problem(s)" in message
    assert message.count("\n  - ") == 3


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("model", "is not of the form dotted.key=value"),
        ("=x", "is not of the form dotted.key=value"),
        ("stages.3.quantize.format=fp8", "'3' must be a number from 0 to 0"),
        ("stages.x=1", "'x' must be a number from 0 to 0"),
        ("model.name=x", "goes through 'demo', which has no keys"),
        ("model={", "has a value that is not valid YAML"),
    ],
)
def test_override_that_cannot_be_set(override: str, says: str) -> None:
    assert says in refused(override)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "is not valid YAML"),
        ("- 1", "holds no mapping of keys to values"),
        ("model: a\nmodel: b\n", "line 1: the key 'model' is given twice"),
        ("", "holds no mapping of keys to values"),
    ],
)
def test_text_that_is_no_recipe(text: str, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        parse_recipe(text)


def test_unknown_recipe_name(tmp_path: Path) -> None:
    assert "did you mean fp8.yaml?" in refused(name="fp88.yaml")
    assert "give a path or one of bf16" in refused(name=str(tmp_path / "zzzzz.yaml"))


def test_path_comes_before_a_shipped_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(shipped_recipes()["fp8"].replace("output: out/fp8", "output: out/mine"))
    assert load_recipe(str(path)).output == "out/mine"
