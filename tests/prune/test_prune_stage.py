"""The prune stage on tiny models: plain checkpoints, exact where nothing is lost, refused in words."""

import json
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, RecipeError
from compress.recipe import Stage
from compress.stages import Place, plan_stages

TOKENS = torch.arange(3, 67)[None]
WIDTH = {"target": {"intermediate_size": 192}, "axes": ["ffn"]}


def logits(path, tokens=TOKENS):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(tokens).logits


def edit(path, change):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.no_grad():
        for layer in model.model.layers:
            change(layer)
    model.save_pretrained(path)


def config_of(path):
    return json.loads((path / "config.json").read_text())


@pytest.mark.parametrize("method", ["obs", "activation"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_channels_that_are_always_zero_go_without_a_trace(model_of, prune, kind, method):
    source = model_of(kind)

    def silence(layer):
        layer.mlp.up_proj.weight[[5 * i for i in range(50)]] = 0
        layer.mlp.gate_proj.weight[[i for i in range(241, 256) if i != 245]] = 0  # with those of up: 64

    edit(source, silence)
    result = prune(source, method=method, **WIDTH)
    torch.testing.assert_close(logits(result), logits(source), rtol=1e-4, atol=1e-4)
    assert config_of(result)["intermediate_size"] == 192
    tensors = Checkpoint.open(result).tensors
    assert tensors["model.layers.1.mlp.gate_proj.weight"].shape == (192, 128)
    assert tensors["model.layers.0.mlp.down_proj.weight"].shape == (128, 192)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
def test_heads_whose_values_are_zero_go_without_a_trace(model_of, prune, kind):
    source = model_of(kind)

    def silence(layer):  # heads 1 and 2: the second of the first group, the first of the second
        layer.self_attn.o_proj.weight[:, 32:96] = 0

    edit(source, silence)
    result = prune(source, target={"num_attention_heads": 2}, axes=["heads"])
    config = config_of(result)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 2, 32)
    torch.testing.assert_close(logits(result), logits(source), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_a_key_value_group_takes_its_heads_and_biases_with_it(model_of, prune, kind):
    source = model_of(kind)

    def silence(layer):
        layer.self_attn.o_proj.weight[:, :64] = 0

    edit(source, silence)
    result = prune(source, target={"num_key_value_heads": 1}, axes=["kv_groups"])
    config = config_of(result)
    assert (config["num_attention_heads"], config["num_key_value_heads"], config["head_dim"]) == (2, 1, 32)
    tensors = Checkpoint.open(result).tensors
    assert tensors["model.layers.0.self_attn.k_proj.weight"].shape == (32, 128)
    if kind == "qwen2":
        assert tensors["model.layers.0.self_attn.v_proj.bias"].shape == (32,)
    torch.testing.assert_close(logits(result), logits(source), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("score", ["kl", "cosine"])
def test_a_layer_that_does_nothing_is_the_one_that_goes(model_of, prune, score):
    source = model_of("qwen2")

    def silence(layer):
        if layer.self_attn.layer_idx == 0:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()

    edit(source, silence)
    result = prune(source, target={"num_hidden_layers": 1}, axes=["layers"], layer_score=score)
    config = config_of(result)
    assert config["num_hidden_layers"] == 1
    assert config["layer_types"] == ["full_attention"]
    torch.testing.assert_close(logits(result), logits(source), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe"])
def test_experts_that_put_out_nothing_go_and_the_router_forgets_them(model_of, prune, kind):
    source = model_of(kind)

    def silence(layer):
        layer.mlp.experts.down_proj[[0, 2]] = 0

    edit(source, silence)
    result = prune(source, target={"num_experts" if kind == "qwen3-moe" else "num_local_experts": 2}, axes=["experts"])
    before = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    after = AutoModelForCausalLM.from_pretrained(result, dtype=torch.float32)
    for old, new in zip(before.model.layers, after.model.layers, strict=True):
        assert torch.equal(new.mlp.gate.weight, old.mlp.gate.weight[[1, 3]])
        assert torch.equal(new.mlp.experts.down_proj, old.mlp.experts.down_proj[[1, 3]])
        assert torch.equal(new.mlp.experts.gate_up_proj, old.mlp.experts.gate_up_proj[[1, 3]])


def test_refit_loses_less_than_scores_alone(model_of, prune, tmp_path):
    source = model_of("llama")
    text = "The expression is evaluated from left to right, and its value is the value of the last operand. " * 4
    tokens = AutoTokenizer.from_pretrained(source)(text, return_tensors="pt")["input_ids"]
    expected = logits(source, tokens)
    errors = {}
    for method in ("obs", "activation", "random"):
        result = prune(source, method=method, target={"intermediate_size": 128}, axes=["ffn"])
        errors[method] = float((logits(result, tokens) - expected).square().mean())
        result.rename(tmp_path / method)
    assert errors["obs"] < 0.7 * errors["activation"]
    assert errors["obs"] < 0.7 * errors["random"]


def test_the_result_loads_in_a_fresh_process_with_its_side_files(model_of, prune):
    source = model_of("llama")
    GenerationConfig(max_new_tokens=7).save_pretrained(source)
    result = prune(source, target={"params": "-16%"}, axes=["ffn", "layers"], round_to=64)
    code = (
        "import sys, warnings; warnings.simplefilter('error')\n"
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        "model, tokenizer = M.from_pretrained(sys.argv[1]), T.from_pretrained(sys.argv[1])\n"
        "assert model.lm_head.weight is model.model.embed_tokens.weight\n"
        "print(model.generate(**tokenizer('def f', return_tensors='pt')).shape[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(result)], capture_output=True, text=True, check=True)
    assert int(done.stdout) <= 12
    assert "lm_head.weight" not in Checkpoint.open(result).tensors


def test_a_killed_run_goes_on_from_its_finished_blocks(model_of, prune, monkeypatch, tmp_path):
    source = model_of("llama")
    whole = prune(source, **WIDTH)
    weights = {name: Checkpoint.open(whole).read(name) for name in Checkpoint.open(whole).tensors}
    whole.rename(tmp_path / "whole")
    import prune.run as run

    pruned = []

    def once(block, *args, **kwargs):
        pruned.append(block.name)
        if len(pruned) == 2:
            raise KeyboardInterrupt
        return original(block, *args, **kwargs)

    original = run.prune_widths
    monkeypatch.setattr(run, "prune_widths", once)
    with pytest.raises(KeyboardInterrupt):
        prune(source, **WIDTH)
    (tmp_path / "out" / "0-prune.partial").rename(tmp_path / "leftover")
    again = Checkpoint.open(prune(source, **WIDTH))
    assert pruned == ["model.layers.0", "model.layers.1", "model.layers.1"]
    assert all(torch.equal(again.read(name), weight) for name, weight in weights.items())


def test_a_later_stage_plans_on_the_pruned_dims(model_of, tmp_path):
    stages = [
        {"prune": {**WIDTH, "round_to": 64}},
        {"quantize": {"format": "int4", "group_size": 128, "method": "rtn"}},
    ]
    with pytest.raises(RecipeError, match="these layers cannot take the format"):
        plan_stages(
            [Stage.model_validate(stage) for stage in stages],
            Checkpoint.open(model_of("llama")),
            Place(tmp_path, 10**9),
        )


REFUSALS = {
    "unreachable": (
        {"target": {"params": "-60%"}, "axes": ["ffn"]},
        "no legal ffn come within 1.0% of params 124,774: the nearest is 164,480 (-47.3%) with intermediate_size 64; "
        "change the target, tolerance, round_to or axes",
    ),
    "heads": (
        {"target": {"num_attention_heads": 3}, "axes": ["heads"]},
        "3 heads over 2 key-value heads and a hidden size of 128 do not divide: choose another number",
    ),
    "larger": (
        {"target": {"intermediate_size": 512}},
        "intermediate_size 512 is not between 1 and the source's 256",
    ),
    "same": (
        {"target": {"intermediate_size": 256}},
        "the target's dims are the source's own: nothing would be pruned",
    ),
}


@pytest.mark.parametrize(("options", "message"), REFUSALS.values(), ids=REFUSALS)
def test_targets_that_no_dims_meet_are_refused(model_of, prune, options, message):
    with pytest.raises(RecipeError) as error:
        prune(model_of("llama"), **options)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("llama", {"target": {"params": "-20%"}, "axes": ["experts"]}, "has no axis 'experts'"),
        (
            "qwen3-moe",
            {"target": {"params": "-20%"}, "axes": ["ffn"]},
            "the width of a mixture's experts is not pruned",
        ),
    ],
    ids=["no experts", "width of experts"],
)
def test_axes_that_a_model_does_not_have_are_refused(model_of, prune, kind, options, message):
    with pytest.raises(CheckpointError, match=message):
        prune(model_of(kind), **options)


def test_an_expert_count_below_what_a_token_takes_is_refused(model_of, prune):
    with pytest.raises(RecipeError, match="1 experts are fewer than the 2 that each token takes"):
        prune(model_of("mixtral"), target={"num_local_experts": 1})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": {"params": "10%"}}, "a change is between -100% and 0%"),
        ({"target": {"params": "ten"}}, "write a change as -10%"),
        ({"target": {"width": 3}}, "target 'width': give params or memory alone, or dims"),
        ({"target": {"params": "-10%"}, "method": "obd"}, "no method 'obd': one of obs, activation, random"),
        ({"target": {"params": "-10%"}, "axes": ["ffn", "ffn"]}, "at most once"),
        ({"target": {"params": "-10%"}, "tolerance": "small"}, "write a percentage"),
    ],
    ids=["growth", "word", "unknown dim", "method", "axes", "tolerance"],
)
def test_options_are_refused_when_the_recipe_is_read(options, message):
    with pytest.raises(ValueError, match=message):
        Stage.model_validate({"prune": options})
