"""The weights of a model as a short list of matrices, from safetensors headers or, without them, from the config.

Without headers the model is built by transformers on the meta device, which allocates nothing: names and shapes are
exact for every architecture transformers knows, and no table of parameter formulas has to be kept.

Headers of quantized checkpoints give the logical shape back (two FP4 codes per byte, eight INT4 codes per int32), so
that other formats can be counted from them. Left out: bitsandbytes, GGUF and torchao files.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from compress.architectures import EMBEDDINGS, MULTIMODAL, NEXT_TOKEN_HEADS, ROUTERS, layer_of
from compress.errors import InputError
from compress.planner.formats import WEIGHT_FORMATS

__all__ = ["Header", "Weight", "inventory", "key_rows", "meta_headers"]

Header = tuple[str, tuple[int, ...], int]  # safetensors dtype name, shape, bytes

HEADS = {"lm_head", "embed_out", "output_layer"}
SCALES = (
    ".weight_scale",
    ".weight_scale_inv",
    ".weight_scale_2",
    ".weight_global_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".input_scale",
    ".input_global_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".qzeros",
    ".scales",
    ".g_idx",
    "_scales",
)
CODES = (".weight_packed", ".qweight", "_blocks")  # packed codes, several to an element
METHODS = ("compressed-tensors", "fp8", "mxfp4", "gptq", "awq", "modelopt")
# what the config of a quantized checkpoint says when its headers are not at hand: format, and which weights have it
STORED_AS = {"mxfp4": ("mxfp4", {"expert"}), "fp8": ("fp8-block", {"expert", "linear"})}


@dataclass(frozen=True)
class Weight:
    """`count` matrices of one shape and role.

    role     linear, expert, embedding, head, router, vision, other (norms, biases); "mtp" is not loaded by engines
    shape    (O, I), logical: before packing
    stored   bytes of one, as the checkpoint has it
    scale    it belongs to the quantization of `role` and goes when that does
    """

    role: str
    shape: tuple[int, int]
    stored: int
    scale: bool
    count: int

    @property
    def numel(self) -> int:
        """Parameters in all of them; 0 for scales."""
        return 0 if self.scale else self.count * prod(self.shape)


def inventory(headers: Mapping[str, Header], config: Any, quantization: Mapping[str, Any]) -> tuple[Weight, ...]:
    """Group the tensors of a checkpoint.

    Args:
        headers: every tensor by name.
        config: the language model's transformers config.
        quantization: `quantization_config`, empty if none.

    Raises:
        InputError: a quantization method whose files are not read.
    """
    method = str(quantization.get("quant_method", ""))
    if method and method not in METHODS:
        raise InputError(f"weights quantized with {method!r} cannot be planned: give the source model instead")
    codes = 32 // _bits_of(quantization)
    tied = bool(getattr(config, "tie_word_embeddings", False))
    counts = Counter(
        weight for name, header in headers.items() if (weight := _weight(name, header, config, codes)) is not None
    )
    return tuple(
        Weight(role, shape, stored, scale, count)
        for (role, shape, stored, scale), count in counts.items()
        if not (tied and role == "head")
    )


def _bits_of(quantization: Mapping[str, Any]) -> int:
    """Bits of packed integers: `bits` (gptq, awq) or the first group's `num_bits` (compressed-tensors); 4 if silent."""
    groups = quantization.get("config_groups") or {}
    weights = [group.get("weights") or {} for group in groups.values() if isinstance(group, dict)]
    found = quantization.get("bits") or next((w["num_bits"] for w in weights if "num_bits" in w), 4)
    return int(found)


def _weight(name: str, header: Header, config: Any, codes: int) -> tuple[str, tuple[int, int], int, bool] | None:
    dtype, shape, stored = header
    scale = name.endswith(SCALES)
    if name.endswith(CODES) or (name.endswith(".weight") and dtype == "U8"):
        shape = (*shape[:-1], shape[-1] * (codes if dtype == "I32" else 2))
        if name.endswith("_blocks"):  # (experts, out, blocks, bytes)
            shape = (*shape[:2], prod(shape[2:]))
        name = name.removesuffix("_packed").removesuffix("_blocks").replace(".qweight", ".weight")
    for suffix in SCALES:
        name = name.removesuffix(suffix) if scale else name
    role = _role(name, shape, config)
    if scale and role in {"other", "router"}:
        role = "expert" if ".experts." in name else "linear"
    rows = prod(shape[:-1]) if shape else 1
    return role, (rows, shape[-1] if shape else 1), stored, scale


def _role(name: str, shape: tuple[int, ...], config: Any) -> str:
    parts = name.removesuffix(".weight").split(".")
    layer = layer_of(name)
    if MULTIMODAL.intersection(parts):
        return "vision"
    if NEXT_TOKEN_HEADS.intersection(parts) or (layer is not None and layer >= config.num_hidden_layers):
        return "mtp"
    if parts[-1] in EMBEDDINGS:
        return "embedding"
    if parts[-1] in HEADS and len(shape) == 2:
        return "head"
    if parts[-1] in ROUTERS:
        return "router"
    return _matrix_role(name, shape) if layer is not None else "other"


def _matrix_role(name: str, shape: tuple[int, ...]) -> str:
    expert = ".experts." in name or ".block_sparse_moe." in name
    if expert and "bias" not in name and len(shape) in (2, 3):
        return "expert"
    return "linear" if len(shape) == 2 and name.endswith(".weight") else "other"


def key_rows(headers: Mapping[str, Header]) -> set[int]:
    """Output sizes of the unpacked key projections: what the KV cache of a layer must hold per token."""
    names = [name for name in headers if name.endswith(".self_attn.k_proj.weight") and layer_of(name) is not None]
    return {headers[name][1][0] for name in names if not MULTIMODAL.intersection(name.split("."))}


def meta_headers(config: Any, quantization: Mapping[str, Any]) -> dict[str, Header]:
    """Names and shapes of a model of this config, as if its 16-bit checkpoint (or its known quantized one) were read.

    Args:
        config: the whole transformers config, multimodal parts included.
        quantization: `quantization_config`, empty if none.

    Raises:
        InputError: transformers cannot build it.
    """
    import torch  # imports of seconds, not needed when headers are at hand
    import transformers

    text = config.get_text_config(decoder=True)
    architecture = getattr(transformers, (getattr(config, "architectures", None) or ["AutoModelForCausalLM"])[0], None)
    build = getattr(architecture, "_from_config", None) or transformers.AutoModelForCausalLM.from_config
    try:
        with torch.device("meta"):
            named = dict(build(config).named_parameters())
    except (ValueError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        raise InputError(f"no model can be built from the config ({error}): give a directory with weights") from error
    shapes = {name: tuple(parameter.shape) for name, parameter in named.items()}
    return dict(_as_stored(shapes.items(), text, str(quantization.get("quant_method", ""))))


def _as_stored(shapes: Iterable[tuple[str, tuple[int, ...]]], config: Any, method: str) -> Iterable[tuple[str, Header]]:
    name_of_format, roles = STORED_AS.get(method, ("bf16", set()))
    fmt = WEIGHT_FORMATS[name_of_format]
    for name, shape in shapes:
        quantized = _role(name, shape, config) in roles
        nbytes = fmt.nbytes(prod(shape[:-1]), shape[-1]) if quantized else 2 * prod(shape)
        yield name, ("BF16", shape, nbytes)
