"""What streaming holds in memory does not grow with the model: at most three of its largest tensors and one shard."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

SHARD, LAYERS, LARGEST = 40_000_000, 5, 8192 * 2048 * 2  # bytes; bytes of one up_proj
PROGRAM = """
import sys, torch
from compress.memory import peak_resident_bytes

before = peak_resident_bytes()
from pathlib import Path
from compress.checkpoint import Checkpoint
from compress.recipe import Stage
from compress.stages import Place, plan_stages, run_stage
stage = Stage.model_validate({"quantize": {"format": sys.argv[3], "method": "rtn", "ignore": []}})
[plan] = plan_stages([stage], Checkpoint.open(sys.argv[1]), Place(Path(sys.argv[2]), int(sys.argv[4])))
run_stage(plan, torch.device("cpu"), lambda amount: None)
print(peak_resident_bytes() - before)
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 210 MB whose largest tensor has 33.5 MB."""
    folder = tmp_path_factory.mktemp("large")
    shape = {"q_proj": (2048, 2048), "up_proj": (8192, 2048)}
    places = {"q_proj": "self_attn", "up_proj": "mlp"}
    weight_map = {}
    for layer in range(LAYERS):
        name = f"model-{layer:05}.safetensors"
        found = {
            f"model.layers.{layer}.{places[kind]}.{kind}.weight": torch.full(size, 0.01, dtype=torch.bfloat16)
            for kind, size in shape.items()
        }
        save_file(found, folder / name)
        weight_map |= dict.fromkeys(found, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "num_hidden_layers": LAYERS}))
    return folder


@pytest.mark.parametrize("fmt", ["bf16", "fp8", "nvfp4"])
def test_peak_memory_is_bounded_whatever_the_size(fmt: str, large: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(large), str(tmp_path), fmt, str(SHARD)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0 < int(done.stdout) <= 3 * LARGEST + SHARD
