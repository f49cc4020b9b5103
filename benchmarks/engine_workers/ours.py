"""Per-token NLL through the loader that the gate uses: python ours.py request.json response.json."""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from quant.loader import load_model


def main(request_path: str, response_path: str) -> None:
    with open(request_path) as file:
        request = json.load(file)
    loaded = load_model(request["checkpoint"], dtype=getattr(torch, request["dtype"]))
    nll = []
    with torch.inference_mode():
        for ids in request["documents"]:
            logprobs = loaded.model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            nll.append((-logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)))[:, 0].tolist())
    with open(response_path, "w") as file:
        json.dump({"nll": nll, "formats": dict(loaded.formats)}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
