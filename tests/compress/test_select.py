"""Modules named from headers, and the language that selects them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.architectures import fused_groups
from compress.checkpoint import Checkpoint
from compress.errors import CheckpointError, RecipeError
from compress.modules import modules
from compress.select import matches, select
from compress.tensor_file import read_tensor

Models = Callable[[str], Path]


def names(directory: Path, cls: str) -> list[str]:
    return [module.name for module in modules(Checkpoint.open(directory)) if module.cls == cls]


def test_classes_of_a_llama(tiny: Path) -> None:
    linears = names(tiny, "Linear")
    assert len(linears) == 2 * 7 + 1
    assert linears[-1] == "lm_head"  # tied: no tensor of its own, but it has a name
    assert names(tiny, "Embedding") == ["model.embed_tokens"]


def test_a_configuration_that_does_not_say_whether_the_head_is_tied(tiny: Path, tmp_path: Path) -> None:
    """As those that transformers 4 wrote of models whose class ties by default, Gemma's for one."""
    shutil.copytree(tiny, tmp_path / "m")
    config = json.loads((tmp_path / "m/config.json").read_text())
    for stated, tied in ((True, True), (None, True), (False, False)):
        said = {} if stated is None else {"tie_word_embeddings": stated}
        rest = {key: value for key, value in config.items() if key != "tie_word_embeddings"}
        (tmp_path / "m/config.json").write_text(json.dumps(rest | said))
        assert ("lm_head" in names(tmp_path / "m", "Linear")) is tied


def test_classes_of_a_mixture_of_experts(tiny_models: Models) -> None:
    directory = tiny_models("qwen3-moe")
    assert names(directory, "Router") == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate"]
    assert "model.layers.1.mlp.experts.3.down_proj" in names(directory, "Linear")


def test_parts_that_are_not_the_decoder(tiny: Path) -> None:
    extra = {
        "visual.blocks.0.attn.qkv.weight": torch.zeros(4, 4),
        "model.layers.2.self_attn.q_proj.weight": torch.zeros(4, 4),  # beyond num_hidden_layers
    }
    save_file(load_file(tiny / "model.safetensors") | extra, tiny / "model.safetensors")
    assert names(tiny, "Vision") == ["visual.blocks.0.attn.qkv"]
    assert names(tiny, "MTP") == ["model.layers.2.self_attn.q_proj"]


def fuse_experts(directory: Path) -> dict[str, torch.Tensor]:
    """Store the experts as fused 3-D tensors; returns the 2-D ones they came from."""
    tensors = load_file(directory / "model.safetensors")
    apart = {name: tensors.pop(name) for name in list(tensors) if ".experts." in name}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"
        expert = [{p: apart[f"{prefix}.{e}.{p}_proj.weight"] for p in ("gate", "up", "down")} for e in range(4)]
        tensors[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([x["gate"], x["up"]]) for x in expert])
        tensors[f"{prefix}.down_proj"] = torch.stack([x["down"] for x in expert])
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return apart


def test_fused_experts_are_runs_of_their_tensor(tiny_models: Models, tmp_path: Path) -> None:
    import shutil

    directory = Path(shutil.copytree(tiny_models("qwen3-moe"), tmp_path / "fused"))
    apart = fuse_experts(directory)
    found = {f"{m.name}.weight": m for m in modules(Checkpoint.open(directory)) if ".experts." in m.name}
    assert found.keys() == apart.keys()
    for name, module in found.items():
        assert torch.equal(read_tensor(module.weight), apart[name])


def test_square_fused_experts_are_refused(tiny: Path) -> None:
    extra = {"model.layers.0.mlp.experts.down_proj": torch.zeros(2, 128, 128)}
    save_file(load_file(tiny / "model.safetensors") | extra, tiny / "model.safetensors")
    with pytest.raises(CheckpointError, match="are square: whether rows are outputs cannot be told"):
        modules(Checkpoint.open(tiny))


def pick(directory: Path, targets: list[str], ignore: list[str]) -> list[str]:
    return [module.name for module in select(modules(Checkpoint.open(directory)), targets, ignore)]


def test_ignore_beats_targets(tiny: Path) -> None:
    chosen = pick(tiny, ["Linear"], ["lm_head", r"re:.*layers\.0\."])
    assert len(chosen) == 7
    assert all(name.startswith("model.layers.1.") for name in chosen)


def test_regex_is_anchored_at_the_start_only(tiny: Path) -> None:
    assert len(pick(tiny, ["re:.*self_attn"], [])) == 8
    with pytest.raises(RecipeError, match="matches no module"):
        pick(tiny, ["re:self_attn"], [])


def test_strength_of_a_match(tiny: Path) -> None:
    module = next(m for m in modules(Checkpoint.open(tiny)) if m.name == "model.layers.0.mlp.up_proj")
    assert matches(["Linear"], module) == 1
    assert matches(["Linear", "re:.*up_proj$"], module) == 2
    assert matches(["Linear", "model.layers.0.mlp.up_proj"], module) == 3
    assert matches(["up_proj"], module) == 0


@pytest.mark.parametrize(
    ("targets", "ignore", "says"),
    [
        (["Liner"], [], "targets: 'Liner' matches no module: did you mean 'Linear'?"),
        (["Linear"], ["lm_haed"], "ignore: 'lm_haed' matches no module: did you mean 'lm_head'?"),
        (["zzz"], [], "targets: 'zzz' matches no module: name a module, a class (Linear, Embedding, Router"),
        (["re:("], [], "targets: 're:(' is no regular expression"),
        (["Linear"], ["Linear"], "leaves nothing of targets"),
    ],
)
def test_selection_that_means_nothing(tiny: Path, targets: list[str], ignore: list[str], says: str) -> None:
    with pytest.raises(RecipeError) as error:
        pick(tiny, targets, ignore)
    assert says in str(error.value)


def test_every_wrong_entry_is_listed(tiny: Path) -> None:
    with pytest.raises(RecipeError) as error:
        pick(tiny, ["Liner", "zzz"], ["nobody"])
    assert str(error.value).count("matches no module") == 3


def test_fused_groups() -> None:
    layer = ["a.q_proj", "a.k_proj", "a.v_proj", "a.o_proj", "b.gate_proj", "b.up_proj", "c.0.w1", "c.0.w3", "c.1.w1"]
    assert fused_groups(layer) == [
        ("a.q_proj", "a.k_proj", "a.v_proj"),
        ("a.o_proj",),
        ("b.gate_proj", "b.up_proj"),
        ("c.0.w1", "c.0.w3"),
        ("c.1.w1",),
    ]
