"""Where the rounding of inputs goes in a built model: hooks on linears, and a module of our own for fused experts.

A checkpoint names modules as they are on disk; transformers may build them under other names, and all experts of a
layer as two parameters. Its own renaming rules tell where each weight landed.
"""

import re
from collections.abc import Mapping

from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from compress.errors import CheckpointError, Refused
from quant.activations import Quantizer, activation_quantizer
from quant.experts import EmulatedExperts, ExpertInputs
from quant.stored import Stored, StoredModule

__all__ = ["attach_rounding"]

EXPERT = re.compile(r"\.experts\.(\d+)\.")
DOWN = "down_proj"  # the fused parameter of the second projection; the others are gate_up_proj and up_proj


def attach_rounding(model: PreTrainedModel, stored: Stored) -> None:
    """Round the inputs of every module whose format quantizes activations, as an engine does.

    Raises:
        CheckpointError: an input scale that is missing or no positive number.
        Refused: a module whose inputs cannot be reached.
    """
    rounded = {name: module for name, module in stored.modules.items() if module.fmt.activations}
    fused: dict[str, dict[str, dict[int, list[str]]]] = {}  # experts module -> its parameter -> expert -> modules
    for name, parameter in _landing(model, rounded).items():
        owner, _, leaf = parameter.rpartition(".")
        module, expert = model.get_submodule(owner), EXPERT.search(name)
        if isinstance(module, nn.Linear) and leaf == "weight":
            quantizer = _quantizer(stored, [name])
            module.register_forward_pre_hook(lambda _, args, q=quantizer: (q(args[0]), *args[1:]))
        elif expert and hasattr(module, DOWN):
            fused.setdefault(owner, {}).setdefault(leaf, {}).setdefault(int(expert[1]), []).append(name)
        else:
            raise Refused(
                f"the inputs of {name}, a {type(module).__name__}, cannot be rounded: ignore it in quantization"
            )
    for owner, parameters in fused.items():
        _replace_experts(model, owner, stored, parameters)


def _landing(model: PreTrainedModel, modules: Mapping[str, StoredModule]) -> dict[str, str]:
    """Module name on disk -> the parameter of `model` that holds its weight, alone or among others."""
    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    return {
        name: rename_source_key(f"{name}.weight", renamings, converters, model.base_model_prefix, state)[0]
        for name in modules
    }


def _quantizer(stored: Stored, names: list[str]) -> Quantizer:
    """The rounding that modules with one input share."""
    kinds = [stored.modules[name].fmt.activations or {} for name in names]
    scales = [stored.input_scales.get(name) for name in names]
    if any(kind != kinds[0] for kind in kinds) or len({None if s is None else float(s) for s in scales}) > 1:
        raise Refused(f"{' and '.join(names)} share one input, but are stored with different input scales")
    try:
        return activation_quantizer(kinds[0], scale=scales[0])
    except ValueError as error:
        raise CheckpointError(f"{names[0]}: {error}") from error


def _replace_experts(
    model: PreTrainedModel, owner: str, stored: Stored, parameters: Mapping[str, Mapping[int, list[str]]]
) -> None:
    experts = model.get_submodule(owner)
    down = parameters.get(DOWN, {})
    up = next((names for leaf, names in parameters.items() if leaf != DOWN), {})
    count = getattr(experts, DOWN).shape[0]
    if sorted(down) != list(range(count)) or sorted(up) != list(range(count)):
        raise Refused(f"only some experts of {owner} have quantized inputs: engines need all {count} or none")
    inputs = [ExpertInputs(_quantizer(stored, up[i]), _quantizer(stored, down[i])) for i in range(count)]
    model.set_submodule(owner, EmulatedExperts(experts, inputs))
