"""A block's last linear takes back what the blocks in front have lost: against least squares, and in a pruned model."""

from functools import partial

import pytest
import torch
from transformers import AutoModelForCausalLM

from compress.checkpoint import Checkpoint
from compress.walk import Whole, walk
from prune.obs import DAMPING, refit
from prune.plan import drop_layers
from prune.propagate import DROPPED, STRENGTH, observe_gap, spans_of, takes_gap
from prune.widths import prune_widths, readers_of

DIMS = {"layers": 2, "ffn": 256, "heads": 4, "kv_groups": 2}
TOKENS = torch.randint(3, 128, (6, 16), generator=torch.Generator().manual_seed(0))


def walked(directory, edit=lambda block: None):
    """The second block of two, behind a first block that `edit` has changed."""
    blocks = walk(Checkpoint.open(directory), TOKENS, device=torch.device("cpu"), reference=True)
    edit(next(blocks))
    return next(blocks)


def halve(block):
    block.linears["model.layers.0.mlp.down_proj"].weight.data.mul_(0.5)


def test_the_refit_is_the_least_squares_solution_for_outputs_and_a_share_of_the_gap():
    generator = torch.Generator().manual_seed(0)
    inputs, gaps = (torch.randn(200, n, generator=generator, dtype=torch.float64) for n in (12, 5))
    weight = torch.randn(5, 12, generator=generator, dtype=torch.float64)
    columns = torch.tensor([0, 2, 3, 7, 9, 11])
    hessian, gap = inputs.t() @ inputs / 200, gaps.t() @ inputs / 200
    damping = DAMPING * hessian.diagonal().mean()
    rows = (damping * 200).sqrt() * torch.eye(12, dtype=torch.float64)
    read, wanted = torch.cat([inputs, rows]), torch.cat([inputs @ weight.t() + STRENGTH * gaps, rows @ weight.t()])
    expected = torch.linalg.lstsq(read[:, columns], wanted).solution.t()
    torch.testing.assert_close(refit(weight, hessian, columns, STRENGTH * gap), expected, rtol=1e-9, atol=1e-9)


def test_the_gap_is_that_of_the_outputs(tiny_models):
    block = walked(tiny_models("llama"), halve)
    read = []
    name = "model.layers.1.mlp.down_proj"
    handle = block.linears[name].register_forward_pre_hook(lambda _, args: read.append(args[0]))
    with torch.no_grad():
        missing = block.twin.forward(block.twin.inputs) - block.forward(block.inputs)
    handle.remove()
    statistics, gap = observe_gap(block, name)
    assert float(missing.abs().max()) > 1e-3
    torch.testing.assert_close(gap, missing.flatten(0, 1).t() @ read[0].flatten(0, 1) / TOKENS.numel())
    assert statistics.tokens == TOKENS.numel()


@pytest.mark.parametrize(
    ("kind", "linear", "closes"),
    [("llama", "mlp.down_proj", True), ("llama", "self_attn.o_proj", False), ("gemma2", "mlp.down_proj", False)],
)
def test_only_a_linear_that_ends_the_block_closes_a_gap(tiny_models, kind, linear, closes):
    block = walked(tiny_models(kind))
    name = f"model.layers.1.{linear}"
    before = block.linears[name].weight.clone()
    assert takes_gap(block, name) is closes
    assert torch.equal(block.linears[name].weight, before)


def missing(block):
    """The mean square of what the block's outputs lack."""
    block.twin.finish()
    with torch.no_grad():
        return float((block.twin.inputs - block.forward(block.inputs)).square().mean())


def test_outputs_of_pruned_blocks_are_nearer_to_those_of_the_whole_model(tiny_models):
    cuts = readers_of(DIMS, DIMS | {"ffn": 128})
    lost = []
    for strength in (0.0, STRENGTH):
        first = partial(prune_widths, cuts=cuts, method="obs", before=DIMS, strength=strength)
        block = walked(tiny_models("llama"), first)
        pruned = prune_widths(block, cuts, "obs", DIMS, strength)
        assert pruned.propagated == ["model.layers.1.mlp.down_proj"] == [*pruned.kept]
        lost.append(missing(block))
    assert lost[1] < lost[0]


def test_a_layer_does_the_work_of_the_dropped_ones_behind_it(tiny_models):
    assert spans_of([0, 1, 3, 4], 6) == [range(1), range(1, 3), range(3, 4), range(4, 6)]
    assert spans_of([2, 3], 5) == [range(3), range(3, 5)]

    source = Checkpoint.open(tiny_models("llama"))
    whole = Whole(source, spans_of([0], 2))
    block = next(walk(drop_layers(source, [0]), TOKENS, device=torch.device("cpu"), reference=whole))
    before = missing(block)
    model = AutoModelForCausalLM.from_pretrained(source.path, dtype=torch.float32)
    found = []
    model.model.layers[1].register_forward_hook(lambda module, args, output: found.append(output))
    with torch.no_grad():
        model(TOKENS)
    torch.testing.assert_close(block.twin.inputs, found[0])

    pruned = prune_widths(block, {"down_proj": []}, "obs", DIMS, DROPPED)
    assert pruned.propagated == ["model.layers.0.mlp.down_proj"] and missing(block) < 0.9 * before


def test_a_model_with_fewer_layers_is_refitted_from_the_first_gap_on(model_of, prune):
    source = model_of("llama")
    written = Checkpoint.open(prune(source, target={"num_hidden_layers": 1}))
    plain = Checkpoint.open(source)
    same = [
        {name for name in written.tensors if torch.equal(written.read(name), view.read(name))}
        for view in (drop_layers(plain, [layer]) for layer in range(2))
    ]
    assert set(written.tensors) - max(same, key=len) == {"model.layers.0.mlp.down_proj.weight"}
