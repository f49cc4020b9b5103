"""Per-token NLL through llama.cpp: python llama_cpp_gguf.py request.json response.json."""

import json
import sys

import numpy as np
from llama_cpp import Llama


def main(request_path: str, response_path: str) -> None:
    with open(request_path) as file:
        request = json.load(file)
    documents = request["documents"]
    model = Llama(request["checkpoint"], n_ctx=max(map(len, documents)) + 8, logits_all=True, verbose=False)
    nll = []
    for ids in documents:
        model.reset()
        model.eval(ids)
        logits = np.array(model.scores[: len(ids) - 1], dtype=np.float64)  # (tokens - 1, vocabulary)
        top = logits.max(axis=1, keepdims=True)
        logsum = np.log(np.exp(logits - top).sum(axis=1)) + top[:, 0]
        nll.append((logsum - logits[np.arange(len(ids) - 1), ids[1:]]).tolist())
    with open(response_path, "w") as file:
        json.dump({"nll": nll}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
