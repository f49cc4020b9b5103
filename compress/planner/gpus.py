"""The GPUs a plan can be made for: memory, bandwidth and matrix throughput, each row with its source.

Memory is what PyTorch reports as total, not the label: an "80 GB" H100 has 79.18 GiB to give, and reading the label as
GiB would already be 1% wrong. Throughputs are dense figures; data sheets often print the sparse ones, twice as high.
Left out: prices, which change weekly, and the links between GPUs.
"""

from dataclasses import dataclass

from compress.planner.options import nearest

__all__ = ["GPUS", "Gpu", "find_gpu"]

AIC = "NVIDIA AIConfigurator systems/*.yaml @095f58a (github.com/ai-dynamo/aiconfigurator)"
SHEET = "NVIDIA data sheet"


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    memory      GiB that PyTorch reports as total
    measured    where `memory` was read: "torch", "nvidia-smi" (up to 1% above torch) or "label"
    bandwidth   TB/s (1e12)
    bf16, ...   dense TFLOPS (1e12) of matrix multiplication; None = no such units
    """

    name: str
    memory: float
    measured: str
    bandwidth: float
    bf16: float
    fp8: float | None
    fp4: float | None
    int8: float | None
    source: str

    def tflops(self, compute: str) -> float:
        """Dense TFLOPS for inputs of this type; those of 16 bits where it has no units for it."""
        found: float | None = getattr(self, compute)
        return self.bf16 if found is None else found


_ROWS = (
    Gpu("A100-40GB", 39.49, "torch", 1.555, 312, None, None, 624, AIC),
    Gpu("A100-80GB", 79.15, "torch", 2.039, 312, None, None, 624, AIC),
    Gpu("A6000-48GB", 47.4, "torch", 0.768, 155, None, None, 310, f"{SHEET} (sparse figures halved)"),
    Gpu("L4-24GB", 22.03, "torch", 0.300, 121, 242, None, 242, AIC),
    Gpu("L40S-48GB", 44.99, "nvidia-smi", 0.864, 362, 733, None, 733, AIC),
    Gpu("H100-80GB", 79.18, "torch", 3.35, 989, 1979, None, 1979, f"SXM; {AIC}"),
    Gpu("H100-PCIe-80GB", 79.18, "torch", 2.0, 756, 1513, None, 1513, AIC),
    Gpu("H100-NVL-94GB", 93.1, "torch", 3.9, 835, 1671, None, 1671, f"{SHEET} (sparse figures halved)"),
    Gpu("H200-141GB", 139.8, "torch", 4.8, 989, 1979, None, 1979, AIC),
    Gpu("B200-180GB", 178.36, "torch", 7.7, 2250, 4500, 9000, 4500, AIC),
    Gpu("B300-288GB", 268.59, "nvidia-smi", 7.75, 2250, 4500, 14000, None, AIC),
    Gpu("RTX-PRO-6000-96GB", 95.59, "nvidia-smi", 1.792, 468, 936, 1871, 936, AIC),
    Gpu("RTX-4090-24GB", 23.58, "torch", 1.008, 165, 330, None, 661, "NVIDIA Ada white paper; memory: common logs"),
    Gpu("RTX-5090-32GB", 31.4, "torch", 1.792, 210, 419, 1676, 838, "NVIDIA RTX Blackwell white paper (sparse halved)"),
    Gpu("MI300X-192GB", 191.98, "label", 5.3, 1307, 2615, None, 2615, "AMD data sheet"),
)

GPUS = {gpu.name: gpu for gpu in _ROWS}
ALIASES = {
    "A100": "A100-80GB",
    "A100-SXM4-40GB": "A100-40GB",
    "A100-SXM4-80GB": "A100-80GB",
    "H100": "H100-80GB",
    "H100-SXM": "H100-80GB",
    "H100-PCIE": "H100-PCIe-80GB",
    "H100-NVL": "H100-NVL-94GB",
    "RTX-A6000": "A6000-48GB",
    "B200-192GB": "B200-180GB",
}


def find_gpu(name: str) -> Gpu:
    """The row of a GPU by name; case, blanks and a missing memory size do not matter.

    Raises:
        InputError: no such GPU, with the nearest name.
    """
    wanted = name.strip().upper().replace("_", "-").replace(" ", "-")
    names = {**{key.upper(): key for key in GPUS}, **{key.rpartition("-")[0].upper(): key for key in GPUS}, **ALIASES}
    if wanted not in names:
        raise nearest("gpu", name, list(GPUS), names)
    return GPUS[names[wanted]]
