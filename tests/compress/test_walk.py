"""The layer walk: the model's own function, true inputs at every layer, and the same result however it is split."""

import gc

import pytest
import torch
from greenlet import getcurrent, greenlet
from transformers import AutoModelForCausalLM

from compress import walk_block
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, InputError
from compress.walk import walk
from compress.walk_model import SeparateExperts
from compress.walk_pause import PausedPass
from compress.walk_statistics import TILE, Statistics

KINDS = ("llama", "llama-untied", "qwen2", "qwen3", "qwen3-moe")
CPU = torch.device("cpu")


@pytest.fixture
def small_batches(monkeypatch):
    monkeypatch.setattr(walk_block, "BATCH_TOKENS", 64)


def tokens(count=6, length=32):
    return torch.randint(3, 128, (count, length), generator=torch.Generator().manual_seed(0))


def round_to_quarters(weight):
    return (weight * 64).round() / 64


def quantize_all(directory, **options):
    """Walk a model rounding every linear; the last hidden states and each group's statistics."""
    seen = {}
    for block in walk(Checkpoint.open(directory), tokens(), device=CPU, **options):
        for group in block.groups(list(block.linears)):
            seen[group.names] = (group.statistics.hessian, group.statistics.tokens)
            group.replace([round_to_quarters(weight) for weight in group.weights])
    return block.inputs, seen


def rounded_model(directory):
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if ".layers." in name and parameter.dim() > 1 and not name.endswith("mlp.gate.weight"):
            parameter.data = round_to_quarters(parameter.data)
    return model.eval()


def last_hidden(model, ids):
    states = {}
    layer = model.model.layers[-1]
    layer.register_forward_hook(lambda module, args, output: states.update(out=output))
    with torch.no_grad():
        model(ids)
    return states["out"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_that_changes_nothing_is_the_model(kind, tiny_models, small_batches):
    directory = tiny_models(kind)
    for block in walk(Checkpoint.open(directory), tokens(), device=CPU):
        assert block.name == f"model.layers.{block.index}"
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    torch.testing.assert_close(block.inputs, last_hidden(model, tokens()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_walk_that_replaces_weights_is_the_changed_model(kind, tiny_models, small_batches):
    directory = tiny_models(kind)
    hidden, _ = quantize_all(directory)
    torch.testing.assert_close(hidden, last_hidden(rounded_model(directory), tokens()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_every_layer_sees_the_inputs_that_the_replaced_layers_before_it_produce(kind, tiny_models, small_batches):
    directory = tiny_models(kind)
    _, seen = quantize_all(directory)
    model = rounded_model(directory)
    inputs = {}
    for name, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, args, name=name: inputs.update({name: args and args[0]}))
    with torch.no_grad():
        model(tokens())
    assert len(seen) == 8
    for names, (hessian, count) in seen.items():
        x = inputs[names[-1]].flatten(0, 1)
        assert count == len(x)
        torch.testing.assert_close(hessian, x.t() @ x / count, rtol=1e-3, atol=1e-5)


def test_groups_are_the_linears_that_read_the_same_input(tiny_models):
    _, seen = quantize_all(tiny_models("qwen3"))
    prefix = "model.layers.1."
    assert [names for names in seen if names[0].startswith(prefix)] == [
        tuple(prefix + name for name in group)
        for group in (
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
            ("self_attn.o_proj",),
            ("mlp.gate_proj", "mlp.up_proj"),
            ("mlp.down_proj",),
        )
    ]


def test_experts_are_linears_with_groups_of_their_own(tiny_models):
    _, seen = quantize_all(tiny_models("qwen3-moe"))
    expert = "model.layers.0.mlp.experts.2."
    assert (expert + "gate_proj", expert + "up_proj") in seen
    assert (expert + "down_proj",) in seen
    assert not any("mlp.gate" in names[0] and "experts" not in names[0] for names in seen)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"])
def test_experts_are_counted_under_the_checkpoints_names(kind, tiny_models, small_batches):
    source = Checkpoint.open(tiny_models(kind))
    counted = 0
    for block in walk(source, tokens(), device=CPU, reference=True):
        for _ in block.groups(list(block.linears)):  # experts of the two sides see tokens of their own
            pass
        for expert in block.expert_tokens():
            counted += 1
            assert any(name.startswith(f"{expert}.") for name in block.linears), expert
    assert counted or kind == "gpt-oss"


def test_only_named_linears_are_grouped(tiny_models):
    for block in walk(Checkpoint.open(tiny_models("llama")), tokens(), device=CPU):
        wanted = [f"{block.name}.mlp.up_proj", f"{block.name}.self_attn.k_proj"]
        assert [group.names for group in block.groups(wanted)] == [(wanted[1],), (wanted[0],)]


def test_observing_changes_nothing_and_sees_the_block_as_it_is(tiny_models, small_batches):
    for block in walk(Checkpoint.open(tiny_models("llama")), tokens(), device=CPU):
        names, before = list(block.linears), block.inputs.clone()
        observed = block.observe(names)
        assert torch.equal(block.inputs, before)
        for group, other in zip(observed, block.groups(names), strict=True):
            assert group.names == other.names
            assert torch.equal(group.statistics.hessian, other.statistics.hessian)


def test_the_reference_is_the_unquantized_model(tiny_models):
    directory = tiny_models("llama")
    for block in walk(Checkpoint.open(directory), tokens(), device=CPU, reference=True):
        for group in block.groups(list(block.linears)):
            group.replace([weight * 0 for weight in group.weights])
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    torch.testing.assert_close(block.twin.inputs, last_hidden(model, tokens()), rtol=1e-4, atol=1e-5)


def test_rounded_inputs_reach_the_layer_and_not_its_statistics(tiny_models):
    seen = {}
    for block in walk(Checkpoint.open(tiny_models("llama")), tokens(), device=CPU):
        for group in block.groups(list(block.linears)):
            seen[group.names[0]] = group.statistics.absmax.max()
            group.rounding = torch.zeros_like
    assert seen["model.layers.0.self_attn.q_proj"] > 0
    assert seen["model.layers.0.self_attn.o_proj"] == 0  # attention over zeros
    assert seen["model.layers.1.self_attn.q_proj"] > 0


def test_hidden_states_may_live_in_a_file(tiny_models, tmp_path, small_batches):
    kept, _ = quantize_all(tiny_models("llama"))
    spilled, _ = quantize_all(tiny_models("llama"), spill=tmp_path)
    assert torch.equal(kept, spilled)
    assert (tmp_path / "hidden_states.bin").stat().st_size == kept.nbytes


def test_leaving_a_walk_in_the_middle_of_a_block_ends_its_passes(tiny_models, small_batches):
    for block in walk(Checkpoint.open(tiny_models("llama")), tokens(), device=CPU):
        for _ in block.groups(list(block.linears)):
            break
        break
    assert not [each for each in gc.get_objects() if isinstance(each, greenlet) and each is not getcurrent() and each]


def test_paused_passes_leave_gradients_as_they_were_and_their_block_cannot_be_run(tiny_models, small_batches):
    for block in walk(Checkpoint.open(tiny_models("llama")), tokens(), device=CPU):
        for _ in block.groups(list(block.linears)):
            assert torch.is_grad_enabled()
            with pytest.raises(RuntimeError, match=r"^a block whose passes are paused cannot be run$"):
                block.forward(block.inputs[:1])
            break
        break
    assert torch.is_grad_enabled()


def test_an_abandoned_pass_lets_go_of_what_it_showed():
    def show():
        with torch.no_grad():  # left while the pass is thrown out
            each.pause("here", torch.zeros(1))

    each = PausedPass(show)
    with torch.no_grad():
        each.resume()
    assert each.at == "here" and each.shown().shape == (1,)
    with torch.no_grad():
        each.abandon()
    assert each.ended and each.at is None and torch.is_grad_enabled()
    with pytest.raises(ValueError, match="the pass is not paused"):
        each.shown()


def test_a_pass_that_fails_before_it_pauses_leaves_no_hooks(tiny_models, small_batches):
    block = next(walk(Checkpoint.open(tiny_models("llama")), tokens(), device=CPU))
    names = list(block.linears)
    block.layout(names)
    block.module.input_layernorm.weight = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match="must match the size"):
        next(block.groups(names))
    assert not any(linear._forward_pre_hooks for linear in block.linears.values())


def test_an_error_inside_a_pass_is_raised_where_it_is_resumed():
    def fail():
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        PausedPass(fail).resume()


def test_no_calibration_tokens_are_refused(tiny_models):
    message = r"^there are no calibration tokens: give calibration data or use method rtn$"
    with pytest.raises(InputError, match=message):
        next(walk(Checkpoint.open(tiny_models("llama")), tokens(0), device=CPU))


def test_activations_that_are_not_finite_are_refused(tiny_models):
    message = (
        r"^a calibration activation at model\.layers\.0\.mlp\.down_proj is NaN or infinite: check the source model$"
    )
    block = next(walk(Checkpoint.open(tiny_models("llama")), tokens(), device=CPU))
    block.linears["model.layers.0.mlp.up_proj"].weight.data[3] = float("nan")
    with pytest.raises(InputError, match=message):
        list(block.groups(list(block.linears)))


def test_a_missing_tensor_is_named(tiny):
    checkpoint = Checkpoint.open(tiny)
    del checkpoint.tensors["model.layers.1.mlp.up_proj.weight"]
    message = r"^the tensor 'model\.layers\.1\.mlp\.up_proj\.weight' is missing"
    with pytest.raises(CheckpointError, match=message):
        list(walk(checkpoint, tokens(), device=CPU))


class Fused(torch.nn.Module):
    """The attributes of transformers' experts that are read."""

    def __init__(self, experts, hidden, width):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.zeros(experts, 2 * width, hidden))
        self.act_fn = torch.nn.functional.silu


def separate_experts(floor):
    torch.manual_seed(0)
    experts = SeparateExperts(Fused(3, 8, 4), floor)
    return (
        experts.to_empty(device="cpu")
        .requires_grad_(False)
        .apply(lambda m: m.reset_parameters() if isinstance(m, torch.nn.Linear) else None)
    )


def test_an_expert_with_few_tokens_is_shown_others_without_changing_its_output():
    hidden, index = torch.randn(20, 8), torch.zeros(20, 1, dtype=torch.long)
    index[3] = 1
    shown = []
    few, none = separate_experts(floor=5), separate_experts(floor=0)
    for expert in range(3):
        gate = few.get_submodule(f"{expert}.gate_proj")
        gate.register_forward_pre_hook(lambda m, args: shown.append(len(args[0])))
    weights = torch.ones(20, 1)
    torch.testing.assert_close(few(hidden, index, weights), none(hidden, index, weights))
    assert shown == [19, 5, 5]
    assert few.routed == [19, 1, 0]


@pytest.mark.parametrize("features", [37, TILE, 2 * TILE + 5])
def test_hessian_is_the_mean_product_and_exactly_symmetric(features):
    x = torch.randn(5, 10, features, generator=torch.Generator().manual_seed(0))
    seen = Statistics(features, CPU)
    seen.add(x[:3])
    seen.add(x[3:])
    torch.testing.assert_close(seen.hessian, x.flatten(0, 1).t() @ x.flatten(0, 1) / 50)
    assert torch.equal(seen.hessian, seen.hessian.t())


def test_statistics_need_a_token():
    with pytest.raises(ValueError, match=r"^no calibration token reached this layer$"):
        _ = Statistics(4, CPU).hessian
