"""Weights by GPTQModel, in its environment: python with_gptqmodel.py request.json."""

import os

os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # with fewer its pools of threads cannot be made

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from safetensors.torch import load_file
from shared import Request


def unpacked(words: torch.Tensor) -> torch.Tensor:
    """int32 (R, C) as codes (8 R, C), the lowest bits first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)[None, :, None]
    return ((words[:, None] >> shifts) & 15).reshape(-1, words.shape[1])


def dequantized(parts: dict[str, torch.Tensor], offset: int) -> torch.Tensor:
    """The float32 weight (O, I) of a GPTQ layer; `offset` is what a stored zero point is short of."""
    zeros = unpacked(parts["qzeros"].t().contiguous()).t() + offset  # (I/g, O)
    group = parts["g_idx"].long()
    return ((unpacked(parts["qweight"]) - zeros[group]) * parts["scales"].float()[group]).t()


def main() -> None:
    request = Request()
    config = QuantizeConfig(bits=4, group_size=request.options["group_size"], sym=True)
    model = GPTQModel.load(request.source, config, device="cpu", dtype=torch.float32)
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row)[None]} for row in request.tokens]
    model.quantize(rows, batch_size=8)
    packed = request.target / "packed"
    model.save(str(packed))
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for file in packed.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            owner, _, leaf = name.rpartition(".")
            tensors.setdefault(owner, {})[leaf] = tensor
    offset = 0 if config.format == "gptq_v2" else 1
    layers = {name: parts for name, parts in tensors.items() if "qweight" in parts}
    weights = {name: dequantized(parts, offset) for name, parts in layers.items()}
    stored = sum(8 * part.nbytes for parts in layers.values() for part in parts.values())
    request.done(bits=stored / sum(weight.numel() for weight in weights.values()))
    request.save_dequantized(weights)


if __name__ == "__main__":
    main()
