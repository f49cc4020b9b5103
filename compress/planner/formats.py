"""How many bytes a number takes: weight formats and KV-cache formats as tables.

Weights: B(O, I) = ceil(O I bits / 8) + blocks(O, I) * scale bytes + bytes per tensor, with the scale layouts that
engines read (compressed-tensors; OCP Microscaling 1.0; DeepSeek's 128 x 128 blocks). KV: bytes of one token's key or
value of one head, including scales kept per token and head.
"""

import math
from dataclasses import dataclass

__all__ = ["KV_FORMATS", "WEIGHT_FORMATS", "KvFormat", "WeightFormat"]


@dataclass(frozen=True)
class WeightFormat:
    """One weight format of a matrix (O out, I in).

    bits      per weight
    block     rows x columns that share a scale; None = all of them
    scale     bytes of one scale, 0 = none
    tensor    bytes per matrix on top
    compute   type of the matrix multiplication's inputs, see `Gpu.tflops`
    """

    name: str
    bits: int
    block: tuple[int | None, int | None]
    scale: int
    tensor: int
    compute: str
    summary: str

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of one (rows, columns) matrix with its scales."""
        blocks = math.ceil(rows / (self.block[0] or rows)) * math.ceil(columns / (self.block[1] or columns))
        return math.ceil(rows * columns * self.bits / 8) + blocks * self.scale + self.tensor


_WEIGHTS = (
    WeightFormat("bf16", 16, (None, None), 0, 0, "bf16", "16 bits, no scales"),
    WeightFormat("fp8", 8, (1, None), 2, 0, "fp8", "e4m3, one bf16 scale per row, activations in FP8"),
    WeightFormat("fp8-block", 8, (128, 128), 2, 0, "fp8", "e4m3, one bf16 scale per 128 x 128"),
    WeightFormat("int8", 8, (1, None), 2, 0, "int8", "one bf16 scale per row, activations in INT8"),
    WeightFormat("int4", 4, (1, 128), 2, 0, "bf16", "groups of 128, bf16 scales, 16-bit activations"),
    WeightFormat("nvfp4", 4, (1, 16), 1, 4, "fp4", "e2m1, e4m3 scale per 16, fp32 scale per tensor"),
    WeightFormat("mxfp4", 4, (1, 32), 1, 0, "bf16", "e2m1, power-of-two scale per 32, 16-bit activations"),
)
WEIGHT_FORMATS = {fmt.name: fmt for fmt in _WEIGHTS}


@dataclass(frozen=True)
class KvFormat:
    """One KV-cache format: bits per element and bytes per token and head on top, of keys and of values.

    latent   bits per element of an MLA latent; None = no engine stores one so
    """

    name: str
    key: tuple[float, int]
    value: tuple[float, int]
    latent: int | None
    summary: str

    def head_bytes(self, key_dim: int, value_dim: int) -> int:
        """Bytes of one token's key and value of one head."""
        sides = ((key_dim, *self.key), (value_dim, *self.value))
        return sum(math.ceil(dim * bits / 8) + extra for dim, bits, extra in sides)

    @property
    def bits(self) -> float:
        """Mean bits per element, without scales: the order from gentle to harsh."""
        return (self.key[0] + self.value[0]) / 2


_KV = (
    KvFormat("bf16", (16, 0), (16, 0), 16, "16 bits"),
    KvFormat("fp8", (8, 0), (8, 0), 8, "e4m3, one scale per layer or head"),
    KvFormat("int8", (8, 4), (8, 4), None, "fp32 scale per token and head"),
    KvFormat("nvfp4", (4.5, 0), (4.5, 0), None, "e2m1, e4m3 scale per 16"),
    KvFormat("int4", (4, 4), (4, 4), None, "fp32 scale per token and head"),
    KvFormat("turboquant_k8v4", (8, 0), (4, 4), None, "FP8 keys, 4-bit values"),
    KvFormat("turboquant_4bit_nc", (4, 2), (4, 4), None, "rotated, 4-bit"),
    KvFormat("turboquant_k3v4_nc", (3, 2), (4, 4), None, "rotated, 3-bit keys, 4-bit values"),
    KvFormat("turboquant_3bit_nc", (3, 2), (3, 4), None, "rotated, 3-bit"),
)
KV_FORMATS = {fmt.name: fmt for fmt in _KV}
