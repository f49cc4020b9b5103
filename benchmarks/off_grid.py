"""Take a Llama-like model off the grid that its weights may come from, without changing its function.

    python benchmarks/off_grid.py SOURCE TARGET [--spread 0.5] [--seed 0]

Weights that were once quantized lie on a grid, and rounding to a like grid looks better on them than it is. Here each
norm is folded into the linears that read it, and the channels between up and down, and between v and o, are multiplied
by random positive factors, exp(spread * normal), on one side and divided by them on the other.
"""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def fold_norm(norm: torch.nn.Module, linears: list[torch.nn.Linear]) -> None:
    """Move the norm's weight into the columns of the linears behind it."""
    for linear in linears:
        linear.weight.data *= norm.weight.data
    norm.weight.data.fill_(1)


def off_grid(model: torch.nn.Module, spread: float, generator: torch.Generator) -> None:
    """Change the weights of a Llama-like model in place; its function stays."""
    head = model.config.head_dim
    copies = model.config.num_attention_heads // model.config.num_key_value_heads
    for layer in model.model.layers:
        attention, mlp = layer.self_attn, layer.mlp
        fold_norm(layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj])
        fold_norm(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj])
        for before, after, repeat in ((mlp.up_proj, mlp.down_proj, 1), (attention.v_proj, attention.o_proj, copies)):
            factor = torch.exp(spread * torch.randn(before.out_features, generator=generator))
            before.weight.data *= factor[:, None]
            # each key-value head is read by `repeat` query heads that follow each other
            after.weight.data /= (
                factor.reshape(-1, head if repeat > 1 else len(factor)).repeat_interleave(repeat, 0).reshape(-1)
            )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--spread", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(options.source, dtype=torch.float32)
    off_grid(model, options.spread, torch.Generator().manual_seed(options.seed))
    model.to(torch.bfloat16).save_pretrained(options.target)
    AutoTokenizer.from_pretrained(options.source).save_pretrained(options.target)


if __name__ == "__main__":
    main()
