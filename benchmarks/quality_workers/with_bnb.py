"""Weights by bitsandbytes' NF4: python with_bnb.py request.json."""

import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from shared import Request


def main() -> None:
    request = Request()
    size = request.options["group_size"]
    weights = {}
    for name, part in request.model().named_modules():
        if ".layers." in name and isinstance(part, torch.nn.Linear):
            codes, state = quantize_4bit(part.weight.data, blocksize=size, quant_type="nf4")
            weights[name] = dequantize_4bit(codes, state)
    request.done(bits=4 + 32 / size)  # the block's largest magnitude in float32
    request.save_dequantized(weights)


if __name__ == "__main__":
    main()
