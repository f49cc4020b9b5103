"""Torch-Pruning narrows the FFN layers of a model: run by benchmarks/pruning.py with the Python that has it.

    python with_torch_pruning.py SOURCE OUTPUT WIDTH IMPORTANCE TOKENS

WIDTH is the intermediate size that is left, IMPORTANCE "magnitude" or "taylor", TOKENS a file of calibration tokens
(N, T). Taylor importance needs gradients: of the language model's loss, on those tokens.
"""

import sys

import torch
import torch_pruning
from transformers import AutoModelForCausalLM, AutoTokenizer

IMPORTANCE = {
    "magnitude": torch_pruning.importance.GroupMagnitudeImportance(p=2),
    "taylor": torch_pruning.importance.GroupTaylorImportance(),
}


def main(source: str, output: str, width: int, importance: str, tokens: torch.Tensor) -> None:
    """Prune and save as an ordinary checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    model.config.use_cache = False
    gates = [layer.mlp.gate_proj for layer in model.model.layers]
    pruner = torch_pruning.pruner.BasePruner(
        model,
        tokens[:1, :8],
        importance=IMPORTANCE[importance],
        pruning_ratio=0.0,
        pruning_ratio_dict=dict.fromkeys(gates, 1 - width / model.config.intermediate_size),
        ignored_layers=[model.lm_head, model.model.embed_tokens],
    )
    if importance == "taylor":
        for row in tokens:
            (model(input_ids=row[None], labels=row[None]).loss / len(tokens)).backward()
    pruner.step()
    found = {gate.out_features for gate in gates}
    if found != {width}:
        raise SystemExit(f"Torch-Pruning left widths {sorted(found)}, not {width}")
    model.config.intermediate_size = width
    model.to(torch.bfloat16).save_pretrained(output)
    AutoTokenizer.from_pretrained(source).save_pretrained(output)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], torch.load(sys.argv[5]))
