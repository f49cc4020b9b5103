"""A block's last linear takes back what the blocks in front have lost: against least squares, and in a pruned model."""

import pytest
import torch

from compress.checkpoint import Checkpoint
from compress.walk import walk
from prune import obs
from prune.obs import DAMPING, refit
from prune.propagate import STRENGTH, observe_gap, takes_gap
from prune.widths import prune_widths, readers_of

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
    torch.testing.assert_close(refit(weight, hessian, columns, gap), expected, rtol=1e-9, atol=1e-9)


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


def test_outputs_of_pruned_blocks_are_nearer_to_those_of_the_whole_model(tiny_models, monkeypatch):
    before = {"layers": 2, "ffn": 256, "heads": 4, "kv_groups": 2}
    cuts = readers_of(before, before | {"ffn": 128})
    lost = []
    for strength in (0.0, STRENGTH):
        monkeypatch.setattr(obs, "STRENGTH", strength)
        block = walked(tiny_models("llama"), lambda first: prune_widths(first, cuts, "obs", before))
        pruned = prune_widths(block, cuts, "obs", before)
        assert pruned.propagated == ["model.layers.1.mlp.down_proj"] == [*pruned.kept]
        with torch.no_grad():
            lost.append(float((block.twin.inputs - block.forward(block.inputs)).square().mean()))
    assert lost[1] < lost[0]
