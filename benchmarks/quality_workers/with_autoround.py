"""Weights by AutoRound, in its environment: python with_autoround.py request.json."""

import torch
from auto_round import AutoRound
from shared import Request
from torch.utils.data import DataLoader


def main() -> None:
    request = Request()
    options = request.options
    scheme = {"scheme": options["scheme"], "act_bits": 16} if "scheme" in options else {"scheme": "W4A16"}
    if "group_size" in options:
        scheme |= {"group_size": options["group_size"], "sym": True}
    rounder = AutoRound(
        request.model(),
        request.tokenizer(),
        **scheme,
        iters=options["iterations"],
        dataset=DataLoader(list(request.tokens), batch_size=1),
        nsamples=len(request.tokens),
        seqlen=request.tokens.shape[1],
        device_map="cpu",
        enable_torch_compile=False,
    )
    model, _ = rounder.quantize()
    weights = {
        name: part.weight.detach().float()
        for name, part in model.named_modules()
        if ".layers." in name and isinstance(part, torch.nn.Linear)
    }
    request.done(bits=4 + (16 / options["group_size"] if "group_size" in options else 8 / 32))
    request.save_dequantized(weights)


if __name__ == "__main__":
    main()
