"""Per-token NLL through vLLM. Runs in vLLM's own environment: python vllm_cpu.py request.json response.json."""

import json
import sys

from vllm import LLM, SamplingParams


def main(request_path: str, response_path: str) -> None:
    with open(request_path) as file:
        request = json.load(file)
    documents = request["documents"]
    llm = LLM(
        request["checkpoint"],
        dtype=request["dtype"],
        enforce_eager=True,
        max_model_len=max(map(len, documents)) + 8,
        max_num_seqs=4,
        distributed_executor_backend="uni",
        enable_prefix_caching=False,
    )
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in documents],
        SamplingParams(prompt_logprobs=0, max_tokens=1, detokenize=False),
        use_tqdm=False,
    )
    nll = [
        [-found[token].logprob for token, found in zip(ids[1:], output.prompt_logprobs[1:], strict=True)]
        for ids, output in zip(documents, outputs, strict=True)
    ]
    with open(response_path, "w") as file:
        json.dump({"nll": nll}, file)


if __name__ == "__main__":
    main(*sys.argv[1:])
