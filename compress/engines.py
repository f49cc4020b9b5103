"""Which engines load a checkpoint as it is, by the quantization block of its config.json.

A table of what was tried with transformers 5 and vLLM 0.32: a load snippet is shown only where loading works.
"""

from collections.abc import Mapping
from typing import Any, Final

from compress.checkpoint import quantization_block

__all__ = ["TRANSFORMERS", "VLLM", "loads_in"]

TRANSFORMERS, VLLM = "transformers", "vLLM"
BOTH: Final = (TRANSFORMERS, VLLM)
# compressed-tensors: layout of the file -> engines
LAYOUTS: Final[Mapping[str, tuple[str, ...]]] = {
    "float-quantized": BOTH,
    "int-quantized": BOTH,
    "pack-quantized": BOTH,
    "mixed-precision": BOTH,
    "mxfp4-pack-quantized": BOTH,
    "mxfp8-quantized": BOTH,
    "nvfp4-pack-quantized": BOTH,
}
METHODS: Final[Mapping[str, tuple[str, ...]]] = {
    "bitsandbytes": (TRANSFORMERS,),  # vLLM reads it, slower than 16 bits
    "fp8": BOTH,
    "mxfp4": BOTH,
    "mxfp8": (TRANSFORMERS,),
}


def loads_in(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Engines that load a checkpoint with this config.json; empty if none is known to."""
    block = quantization_block(config)
    if not block:
        return BOTH
    if block.get("quant_method") != "compressed-tensors":
        return METHODS.get(str(block.get("quant_method")), ())
    engines = LAYOUTS.get(str(block.get("format")), ())
    return tuple(engine for engine in engines if engine != TRANSFORMERS or not _misread(block, config))


def _misread(block: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """transformers 5.24 refuses packed zero points, and experts of INT8 and of FP8 blocks; of NVFP4 experts it drops
    the global scale without a word."""
    groups = block.get("config_groups", {}).values()
    weights = [group.get("weights") or {} for group in groups]
    packed = any(weight.get("num_bits") == 4 and weight.get("symmetric") is False for weight in weights)
    experts = any(key in config for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    strategies = {weight.get("strategy") for weight in weights}
    return packed or (
        experts and (block.get("format") == "int-quantized" or bool(strategies & {"block", "tensor_group"}))
    )
