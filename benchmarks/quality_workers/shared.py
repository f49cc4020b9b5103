"""What the workers of quality.py have in common: reading the request, measuring themselves, writing the model.

Needs nothing but torch, transformers and safetensors, because it runs in every peer's environment.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers.modeling_utils  # noqa: F401 - imports do not count, whoever makes them first
from transformers import AutoModelForCausalLM, AutoTokenizer


class Request:
    """What quality.py asked for; the clock starts when it is made, after the imports."""

    def __init__(self) -> None:
        found = json.loads(Path(sys.argv[1]).read_text())
        self.source: str = found["source"]
        self.target = Path(found["target"])
        self.method: str = found["method"]
        self.options: dict[str, Any] = found["options"]
        self.calibration: dict[str, Any] = found["calibration"]
        self.sets: dict[str, tuple[str, int]] = found["sets"]
        self.tokens: torch.Tensor = torch.load(found["tokens"])  # (N, T)
        self._start = time.process_time()

    def model(self) -> Any:
        """The source in float32: without AVX-512, bfloat16 products are several times slower."""
        return AutoModelForCausalLM.from_pretrained(self.source, dtype=torch.float32)

    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.source)

    def done(self, **more: Any) -> None:
        """Leave what the work took."""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        found = {"cpu_seconds": time.process_time() - self._start, "peak_bytes": peak, **more}
        (self.target / "made.json").write_text(json.dumps(found))

    def save_dequantized(self, weights: dict[str, torch.Tensor]) -> None:
        """The source in float32 with the weights of these modules replaced."""
        model = self.model()
        modules = dict(model.named_modules())
        for name, weight in weights.items():
            modules[name].weight.data.copy_(weight)
        model.save_pretrained(self.target)
        self.tokenizer().save_pretrained(self.target)
