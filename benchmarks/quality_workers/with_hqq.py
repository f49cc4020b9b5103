"""Weights by HQQ, in its environment: python with_hqq.py request.json."""

import torch
from hqq.core.quantize import BaseQuantizeConfig, HQQLinear
from shared import Request


def main() -> None:
    request = Request()
    size = request.options["group_size"]
    weights, stored, count = {}, 0, 0
    for name, part in request.model().named_modules():
        if ".layers." in name and isinstance(part, torch.nn.Linear):
            config = BaseQuantizeConfig(nbits=4, group_size=size)
            quantized = HQQLinear(part, config, compute_dtype=torch.float32, device="cpu", del_orig=False)
            weights[name] = quantized.dequantize()
            stored += quantized.W_q.nbytes * 8 + 2 * 16 * part.weight.numel() // size  # scale and zero in 16 bits
            count += part.weight.numel()
    request.done(bits=stored / count)
    request.save_dequantized(weights)


if __name__ == "__main__":
    main()
