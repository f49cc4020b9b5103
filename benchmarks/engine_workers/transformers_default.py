"""Per-token NLL through transformers' default load: python transformers_default.py request.json response.json."""

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main(request_path: str, response_path: str) -> None:
    with open(request_path) as file:
        request = json.load(file)
    model = AutoModelForCausalLM.from_pretrained(request["checkpoint"], dtype=getattr(torch, request["dtype"]))
    nll = []
    with torch.inference_mode():
        for ids in request["documents"]:
            logprobs = model(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
            nll.append((-logprobs.gather(1, torch.tensor(ids[1:]).unsqueeze(1)))[:, 0].tolist())
    with open(response_path, "w") as file:
        json.dump({"nll": nll}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
