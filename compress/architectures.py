"""What we know about architectures, as tables: names that tell what a module is, and what belongs together.

Everything else is read off the checkpoint itself. To support a new family, add a row.
"""

import re

__all__ = ["EMBEDDINGS", "FUSED", "MULTIMODAL", "ROUTERS", "fused_groups", "layer_of"]

# last component of a module's name
EMBEDDINGS = {"embed_tokens", "wte", "wpe", "word_embeddings", "embed_in", "embed_out_tokens", "tok_embeddings"}
ROUTERS = {"gate", "router", "shared_expert_gate", "block_sparse_moe.gate", "router.layer"}

# any component of a module's name: parts that are not the language model's decoder, carried over untouched
MULTIMODAL = {"visual", "vision_tower", "vision_model", "multi_modal_projector", "audio_tower", "mm_projector"}
NEXT_TOKEN_HEADS = {"mtp", "nextn", "eh_proj", "shared_head"}  # multi-token prediction

# siblings that engines fuse into one matrix: they share one format, one ignore state, and NVFP4's global scale
FUSED = (
    ("q_proj", "k_proj", "v_proj"),
    ("gate_proj", "up_proj"),
    ("w1", "w3"),
    ("q_a_proj", "kv_a_proj_with_mqa"),
)

# experts that a checkpoint stores as one (experts, out, in) tensor: fused name -> names of its row blocks
FUSED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
# families whose fused experts interleave gate and up: splitting into halves would be wrong
INTERLEAVED_EXPERTS = {"gpt_oss"}

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def layer_of(name: str) -> int | None:
    """The index of the decoder layer a module or tensor belongs to, None for embeddings, final norm and head."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def fused_groups(names: list[str]) -> list[tuple[str, ...]]:
    """Partition module names into the groups that engines fuse; a module of no group is a group of one.

    Groups keep the order of their first member.
    """
    siblings = {child: group for group in FUSED for child in group}
    groups: dict[tuple[str, object], list[str]] = {}
    for name in names:
        parent, _, child = name.rpartition(".")
        groups.setdefault((parent, siblings.get(child, child)), []).append(name)
    return [tuple(group) for group in groups.values()]
