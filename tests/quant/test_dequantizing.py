"""A quantized checkpoint made 16-bit again, on request and never otherwise."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError
from compress.recipe import Stage
from compress.stages import Place, plan_stages, run_stage
from quant.loader import load_model

Models = Callable[[str], Path]
SIZE = 5 * 10**9


def run_stages(source: Path, directory: Path, *stages: dict[str, object]) -> Path:
    parsed = [Stage.model_validate(stage) for stage in stages]
    plans = plan_stages(parsed, Checkpoint.open(source), Place(directory, SIZE))
    for plan in plans:
        run_stage(plan, torch.device("cpu"), lambda amount: None)
    return plans[-1].result.path


@pytest.mark.parametrize("kind", ["llama", "qwen3-moe"])
@pytest.mark.parametrize("fmt", ["fp8", "int8", "int4", "mxfp4", "mxfp8", "nvfp4", "nf4", "bnb-int8"])
def test_holds_the_weights_an_engine_computes_with(fmt: str, kind: str, tiny_models: Models, tmp_path: Path) -> None:
    options = {"format": fmt} | ({"group_size": 32} if fmt == "int4" else {})
    quantized = run_stages(tiny_models(kind), tmp_path / "a", {"quantize": options})
    found = run_stages(quantized, tmp_path / "b", {"quantize": {"format": "bf16"}})
    assert "quantization_config" not in Checkpoint.open(found).config
    tensors = load_file(found / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    state = load_model(quantized).model.state_dict()
    exact = {name.replace("experts.experts", "experts"): weight for name, weight in state.items()}  # rounded inputs
    plain = AutoModelForCausalLM.from_pretrained(found, dtype=torch.float32).state_dict()
    assert exact.keys() == plain.keys()
    for name, weight in exact.items():
        torch.testing.assert_close(plain[name], weight.bfloat16().float(), rtol=0, atol=0)


def test_scales_of_the_kv_cache_go_with_the_format(tiny_models: Models, tmp_path: Path) -> None:
    stages = [{"quantize": {"format": "fp8"}}, {"kv_cache": {"scheme": "fp8"}}]
    quantized = run_stages(tiny_models("llama"), tmp_path / "a", *stages)
    assert load_model(quantized).kv
    found = run_stages(quantized, tmp_path / "b", {"quantize": {"format": "bf16"}})
    assert load_model(found).kv is None
    assert Checkpoint.open(found).tensors.keys() == Checkpoint.open(tiny_models("llama")).tensors.keys()


def _rename_key(file: Path, old: str, new: str) -> None:
    config = json.loads(file.read_text())
    file.write_text(json.dumps({new if key == old else key: value for key, value in config.items()}))


def test_a_quantized_source_is_never_requantized_in_silence(tiny_models: Models, tmp_path: Path) -> None:
    quantized = run_stages(tiny_models("llama"), tmp_path / "a", {"quantize": {"format": "fp8"}})
    with pytest.raises(CheckpointError, match=r"is already quantized .* first with a stage quantize: {format: bf16}"):
        run_stages(quantized, tmp_path / "b", {"quantize": {"format": "int4", "method": "rtn"}})
    _rename_key(quantized / "config.json", "quantization_config", "compression_config")  # its older name
    with pytest.raises(CheckpointError, match="is already quantized"):
        run_stages(quantized, tmp_path / "b", {"quantize": {"format": "int4", "method": "rtn"}})
    both = run_stages(
        quantized, tmp_path / "c", {"quantize": {"format": "bf16"}}, {"quantize": {"format": "int4", "method": "rtn"}}
    )
    assert load_model(both).formats["int4"] == 14
