"""A checkpoint by llm-compressor, in its environment: python with_llmc.py request.json."""

import torch
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.gptq import GPTQModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from llmcompressor.modifiers.transform.awq import AWQModifier
from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
from shared import Request


def scheme(request: Request) -> QuantizationScheme:
    """The preset that is asked for, or W4A16 with groups of another size."""
    found = preset_name_to_scheme(request.options.get("scheme", "W4A16"), ["Linear"])
    if "group_size" in request.options:
        found.weights.group_size = request.options["group_size"]
    return found


def main() -> None:
    request = Request()
    if not torch.accelerator.is_available():
        torch.Tensor.pin_memory = lambda tensor: tensor  # its AWQ pins memory unasked, which fails without one
    groups = {"config_groups": {"group_0": scheme(request)}, "ignore": ["lm_head"]}
    recipes = {
        "rtn": lambda: [QuantizationModifier(**groups)],
        "gptq": lambda: [GPTQModifier(**groups)],
        "awq": lambda: [AWQModifier(), QuantizationModifier(**groups)],
        "smooth-gptq": lambda: [SmoothQuantModifier(smoothing_strength=0.8), GPTQModifier(**groups)],
    }
    model, recipe = request.model(), recipes[request.method]()
    rows = {"input_ids": request.tokens.tolist(), "attention_mask": torch.ones_like(request.tokens).tolist()}
    data = {"dataset": Dataset.from_dict(rows), "num_calibration_samples": len(request.tokens)}
    free = request.method == "rtn"
    more = {} if free else {**data, "max_seq_length": request.tokens.shape[1], "shuffle_calibration_samples": False}
    oneshot(model=model, recipe=recipe, **more)
    model.to(torch.bfloat16).save_pretrained(request.target, save_compressed=True)
    request.tokenizer().save_pretrained(request.target)
    request.done()


if __name__ == "__main__":
    main()
