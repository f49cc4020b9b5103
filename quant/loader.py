"""A checkpoint directory as the model that an engine would compute with: what the gate evaluates, and nothing else.

transformers builds the model and converts names and fused experts; every weight it is given is dequantized here by the
format's own `decode`, and every input an engine would round is rounded by a hook in front of its layer. transformers'
own loading of quantized files is not used, because it drops some scales and the rounding inside experts.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, Refused
from compress.model_config import model_config
from quant.inputs import attach_rounding
from quant.kv.cache import KvEmulation
from quant.kv.stored import kv_emulation
from quant.stored import Stored, sort_tensors

__all__ = ["LoadedModel", "load_model", "load_tokenizer"]

TOKENIZERS = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")


@dataclass(frozen=True)
class LoadedModel:
    """What was loaded.

    model      in evaluation mode, weights dequantized
    tokenizer  None where the directory has none
    formats    format name -> number of modules stored in it
    kv         the quantized KV cache that every pass of the model uses, None for 16 bits; ask it for a cache, so that
               keys and values are counted and tokens enter it as in generation
    """

    model: PreTrainedModel
    tokenizer: Any | None
    formats: Mapping[str, int]
    kv: KvEmulation | None


@dataclass(frozen=True)
class LazyWeight:
    """A tensor that is read when it is sliced, as transformers slices each one it loads."""

    checkpoint: Checkpoint
    stored: Stored
    name: str  # "<module>.weight", or a plain tensor
    broken: list[str]  # names with NaN or infinite values, filled as they are read

    def __getitem__(self, index: Any) -> Tensor:
        module = self.stored.modules.get(self.name.removesuffix(".weight"))
        tensor = module.weight(self.checkpoint) if module else self.checkpoint.read(self.name)
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            self.broken.append(self.name)
        return tensor[index]


def load_model(
    directory: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    trust_remote_code: bool = False,
    attn_implementation: str = "sdpa",
) -> LoadedModel:
    """Build the model of a checkpoint, quantized or not. Memory: about one model of `dtype`.

    Args:
        directory: the checkpoint.
        dtype: of the weights and of the arithmetic outside the rounded inputs.
        device: where the model goes.
        trust_remote_code: run Python code that the checkpoint brings.
        attn_implementation: "sdpa" or "eager", which families without sdpa (Gemma 2, gpt-oss) always take.

    Raises:
        CheckpointError: damaged, the tokenizer too, or quantized in a way that is not read.
        Refused: weights missing, unexpected, of another shape, or not finite.
    """
    checkpoint = Checkpoint.open(directory)
    stored = sort_tensors(checkpoint)
    config = model_config(checkpoint, trust_remote_code=trust_remote_code)
    kv = kv_emulation(checkpoint, stored.kv_scales, config, torch.device(device))
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)  # type: ignore[no-untyped-call]
    model = _model(checkpoint, stored, type(built), config=config, dtype=dtype, attn_implementation=attn_implementation)
    attach_rounding(model, stored)
    if kv:
        kv.attach(model)
    return LoadedModel(
        model.to(torch.device(device)),  # type: ignore[arg-type]
        load_tokenizer(checkpoint.path, trust_remote_code),
        Counter(module.fmt.name for module in stored.modules.values()),
        kv,
    )


def _model(
    checkpoint: Checkpoint, stored: Stored, cls: Any, *, config: Any, dtype: torch.dtype, attn_implementation: str
) -> PreTrainedModel:
    broken: list[str] = []
    names = [*(f"{module}.weight" for module in stored.modules), *stored.plain]
    has_generation = (checkpoint.path / "generation_config.json").exists()
    model, report = cls.from_pretrained(
        None,
        config=config,
        state_dict={name: LazyWeight(checkpoint, stored, name, broken) for name in names},
        generation_config=GenerationConfig.from_pretrained(checkpoint.path) if has_generation else None,
        dtype=dtype,
        attn_implementation=attn_implementation if cls._supports_sdpa else "eager",
        ignore_mismatched_sizes=True,  # they are refused below, all at once
        output_loading_info=True,
    )
    _check_report(checkpoint.path, report, broken)
    model.config.name_or_path = str(checkpoint.path)
    return model  # type: ignore[no-any-return]


def _check_report(path: Path, report: Mapping[str, Any], broken: list[str]) -> None:
    mismatched = {name: f"{list(stored)} for {list(built)}" for name, stored, built in report["mismatched_keys"]}
    problems = {
        "missing": sorted(report["missing_keys"]),
        "unexpected": sorted(report["unexpected_keys"]),
        "of another shape": [f"{name} {shapes}" for name, shapes in sorted(mismatched.items())],
        "NaN or infinite": sorted(broken),
    }
    found = [f"{kind}: {', '.join(names)}" for kind, names in problems.items() if names]
    if found:
        raise Refused(f"the weights of {path} do not fill the model that its config.json describes; {'; '.join(found)}")


def load_tokenizer(path: Path, trust_remote_code: bool) -> Any | None:
    """A checkpoint's tokenizer; None where it brings none.

    Raises:
        CheckpointError: damaged.
    """
    if not any((path / name).exists() for name in TOKENIZERS):
        return None
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (ValueError, KeyError, TypeError, OSError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise CheckpointError(f"the tokenizer of {path} cannot be read ({reason}): fetch its files again") from error
