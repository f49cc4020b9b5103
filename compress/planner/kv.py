"""The KV cache of a model as a paged engine lays it out: bytes per token, blocks per request, users and context.

Formulas follow vLLM's v1 cache manager (vllm/v1/kv_cache_interface.py and core/kv_cache_utils.py):
  full attention      kv_heads * (key + value bytes) per token; ceil(length / block) blocks
  MLA                 kv_lora_rank + qk_rope_head_dim elements per token, once, on every tensor-parallel rank
  sliding window w    as full, but never more than ceil((w - 1 + in_flight) / block) + 1 blocks
  recurrent state     one page per request; attention blocks are made long enough to be as big as that page
Layers of different kinds are put into groups of equal size, so that any block can serve any group.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil, floor
from typing import Any

from compress.errors import InputError
from compress.planner.formats import KvFormat
from compress.planner.model import Model

__all__ = ["Group", "Layout", "attention_layers", "layout"]

BLOCK, LATENT_BLOCK = 16, 64  # tokens per block on CUDA
INDEXER_SCALE = 4  # bytes per 128 FP8 elements of a sparse-attention indexer's key
SPARSE_FP8 = 656  # bytes of an FP8 MLA token under sparse attention: 512 e4m3, 4 fp32 scales, 64 bf16 of RoPE
NO_CACHE = {"moe", "mlp", "sparse", "dense"}
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "indexed_attention"}


@dataclass(frozen=True)
class Layer:
    """What one layer keeps of a request on one GPU.

    heads, key, value   KV heads on this GPU and their dims; 0 for MLA and recurrent layers
    latent, index       MLA: elements of the latent; elements of the sparse indexer's key
    window              tokens after which older ones are dropped; 0 = none
    state               bytes of a recurrent layer, whatever the length
    """

    heads: int = 0
    key: int = 0
    value: int = 0
    latent: int = 0
    index: int = 0
    window: int = 0
    state: int = 0

    def token_bytes(self, fmt: KvFormat) -> int:
        """Bytes of one token; 0 for a recurrent layer."""
        if not self.latent:
            return self.heads * fmt.head_bytes(self.key, self.value)
        indexer = self.index + self.index // 128 * INDEXER_SCALE
        sparse = self.index and fmt.latent == 8
        return indexer + (SPARSE_FP8 if sparse else self.latent * (fmt.latent or 0) // 8)


@dataclass(frozen=True)
class Group:
    """`layers` layers of one kind, in `copies` groups with a block table each; `block` tokens per block."""

    layer: Layer
    layers: int
    copies: int
    block: int

    def blocks(self, length: int, in_flight: int) -> int:
        """Blocks a request of `length` tokens occupies in all copies."""
        if self.layer.state:
            return self.copies
        if not self.layer.window:
            return self.copies * ceil(length / self.block)
        return self.copies * (ceil(min(self.layer.window - 1 + in_flight, length) / self.block) + 1)


@dataclass(frozen=True)
class Layout:
    """The cache of a model on one GPU; a block is `size` layers' pages of `page` bytes."""

    groups: tuple[Group, ...]
    size: int
    page: int
    in_flight: int
    token_bytes: int  # what one token more costs a long request

    @property
    def block_bytes(self) -> int:
        return self.size * self.page

    def request_blocks(self, length: int) -> int:
        """Blocks of a request of `length` tokens."""
        return sum(group.blocks(length, self.in_flight) for group in self.groups)

    def request_bytes(self, length: int) -> int:
        """Bytes a request of `length` tokens occupies."""
        return self.request_blocks(length) * self.block_bytes

    def pool_blocks(self, room: float) -> int:
        """Whole blocks in `room` bytes."""
        return max(0, floor(room / self.block_bytes))

    def users(self, room: float, length: int) -> int:
        """Requests of `length` tokens held at the same time in `room` bytes."""
        return self.pool_blocks(room) // self.request_blocks(length)

    def context(self, room: float, users: int, limit: int) -> int:
        """Longest context, at most `limit`, that `users` requests can have at the same time in `room` bytes."""
        share = self.pool_blocks(room) // users
        return last_true(lambda length: self.request_blocks(length) <= share, limit)


def last_true(holds: Callable[[int], bool], limit: int) -> int:
    """The last n in 0..limit with holds(n), for a condition that stays false once it is; 0 if it never holds."""
    low, high = 0, limit
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if holds(middle) else (low, middle - 1)
    return low


def layout(model: Model, fmt: KvFormat, tp: int, *, in_flight: int, block: int = BLOCK) -> Layout | None:
    """The cache of a model in a format on one of `tp` GPUs; None where no engine stores it so.

    Args:
        in_flight: tokens of one request that may be computed in one step (max_num_batched_tokens).
        block: tokens per block of full attention.

    Raises:
        InputError: layers whose cache is not known, or a `tp` that does not divide the heads.
    """
    layers = attention_layers(model, tp)
    if not layers:
        raise InputError(f"{model.name} has no layers that keep a cache: there is nothing to plan")
    if fmt.latent is None and any(layer.latent for layer in layers):
        return None
    block = LATENT_BLOCK if any(layer.latent for layer in layers) else block
    block, page = _page(layers, fmt, block)
    size = _group_size(list(layers.values()))
    groups = tuple(
        Group(layer, count, ceil(count / size), page // layer.token_bytes(fmt) if not layer.state else block)
        for layer, count in layers.items()
    )
    growing = sum(count * layer.token_bytes(fmt) for layer, count in layers.items() if not layer.window)
    return Layout(groups, size, page, in_flight, growing)


def _page(layers: Counter[Layer], fmt: KvFormat, block: int) -> tuple[int, int]:
    """Tokens per block and bytes per layer and block, equal for all layers."""
    tokens = {layer.token_bytes(fmt) for layer in layers if not layer.state}
    state = max(layer.state for layer in layers)
    if not tokens:
        return 1, state
    widest = max(tokens)
    if any(widest % narrow for narrow in tokens):
        raise InputError(f"layers keep {sorted(tokens)} bytes per token, which share no page size: not planned")
    if state > block * widest:
        block = ceil(state / widest / BLOCK) * BLOCK
    return block, block * widest


def _group_size(counts: list[int]) -> int:
    """Layers per group: all of the rarest kind, unless padding the others up to the commonest wastes less."""
    return max(counts) if max(counts) < 1.5 * min(counts) else min(counts)


def attention_layers(model: Model, tp: int) -> Counter[Layer]:
    """What layers keep on one of `tp` GPUs, and how many of them; layers without a cache do not count.

    Raises:
        InputError: a kind of layer that is not known, or heads that do not divide.
    """
    heads = model.get("num_attention_heads", default=1)
    if heads % tp:
        raise InputError(f"tp={tp} does not divide the {heads} attention heads of {model.name}: use a divisor")
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(f"{model.name} is an encoder-decoder model: only decoders are planned")
    kinds = _kinds(model)
    own = [kind for kind in kinds if kind not in NO_CACHE]
    shared = model.get("num_kv_shared_layers")
    counts = Counter(own[: len(own) - shared])
    found = Counter({_layer(model, kind, tp): count for kind, count in counts.items()})
    _check_keys(model, found)
    return found


def _kinds(model: Model) -> list[str]:
    kinds = getattr(model.config, "layer_types", None)
    if kinds:
        return list(kinds)
    windowed = model.get("sliding_window") > 0
    return ["sliding_attention" if windowed else "full_attention"] * model.get("num_hidden_layers")


def _layer(model: Model, kind: str, tp: int) -> Layer:
    if kind in ("linear_attention", "conv"):
        return Layer(state=_state_bytes(model, kind, tp))
    if kind not in ATTENTION:
        raise InputError(f"{model.name} has layers of kind {kind!r}, whose cache is not known: not planned")
    if model.get("kv_lora_rank"):
        latent = model.get("kv_lora_rank") + model.get("qk_rope_head_dim")
        return Layer(latent=latent, index=model.get("index_head_dim") if kind == "indexed_attention" else 0)
    windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    head_dim = model.get("head_dim", default=model.get("hidden_size") // model.get("num_attention_heads", default=1))
    full = Layer(max(1, _kv_heads(model) // tp), head_dim, model.get("v_head_dim", default=head_dim))
    return replace(full, window=model.get(windows[kind])) if kind in windows else full


def _kv_heads(model: Model) -> int:
    if getattr(model.config, "multi_query", False) and not getattr(model.config, "new_decoder_architecture", False):
        return 1
    return model.get("num_key_value_heads", "num_kv_heads", "num_attention_heads")


def _check_keys(model: Model, layers: Iterable[Layer]) -> None:
    """Refuse where the stored key projections have another width than the config says."""
    said = {_kv_heads(model) * layer.key for layer in layers if layer.key}
    if said and model.key_rows - said:
        raise InputError(
            f"{model.name} stores key projections of {sorted(model.key_rows)} channels where its config says "
            f"{sorted(said)}: its layers differ in heads, which is not planned"
        )


def _state_bytes(model: Model, kind: str, tp: int) -> int:
    """Bytes of a recurrent layer's convolution and matrix state on one GPU."""
    if kind == "conv":
        return model.get("conv_L_cache") * model.get("hidden_size") // tp * 2
    for fields in STATES:
        if getattr(model.config, fields["heads"], None) is not None:
            heads, dim, size, groups, kernel = (model.get(fields[name]) for name in STATE_FIELDS)
            channels = heads * dim + 2 * size * groups
            wide = str(_any(model.config, "mamba_ssm_dtype", "mamba_ssm_cache_dtype")).removeprefix("torch.")
            return ((kernel - 1) * channels * 2 + heads * dim * size * (4 if wide == "float32" else 2)) // tp
    raise InputError(f"{model.name} has recurrent layers whose state is not known: not planned")


def _any(config: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(config, name, None)) is not None), None)


STATE_FIELDS = ("heads", "dim", "size", "groups", "kernel")
STATES = (  # Gated DeltaNet; Mamba-2 as Nemotron-H writes it; Mamba-2 as Bamba and Granite write it
    {
        "heads": "linear_num_value_heads",
        "dim": "linear_value_head_dim",
        "size": "linear_key_head_dim",
        "groups": "linear_num_key_heads",
        "kernel": "linear_conv_kernel_dim",
    },
    {
        "heads": "mamba_num_heads",
        "dim": "mamba_head_dim",
        "size": "ssm_state_size",
        "groups": "n_groups",
        "kernel": "conv_kernel",
    },
    {
        "heads": "mamba_n_heads",
        "dim": "mamba_d_head",
        "size": "mamba_d_state",
        "groups": "mamba_n_groups",
        "kernel": "mamba_d_conv",
    },
)
