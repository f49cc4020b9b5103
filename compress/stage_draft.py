"""The draft stage: beside the weights, which stay as they are, a folder `draft/` with a small model that guesses ahead.

Speculative decoding gives the target's own text, only sooner, so what the gate judges does not change; what the draft
is worth is measured here and told in the report. The draft is distilled from the checkpoint this stage reads, so after
a quantize stage it learns what the quantized model says.
"""

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint import Checkpoint
from compress.progress import Advance, say
from compress.stage_distill import check_options
from compress.stage_learn import Work, learn, load_teacher
from compress.stage_plan import Place, StagePlan, planned_tensors
from compress.writer import ShardWriter, plan_shards
from distill.options import Draft
from quant.stream import copy_tensor

__all__ = ["DRAFT", "plan_draft"]

DRAFT = "draft"


def plan_draft(options: Draft, source: Checkpoint, target: Path, place: Place) -> StagePlan:
    """The same tensors; the draft comes on top.

    Raises:
        RecipeError: more layers than the target has, top_k above its vocabulary, a batch for other processes.
    """
    from distill.draft import kept_layers  # brings the model code

    check_options(options.distill, source, source)
    kept_layers(int(source.text_config["num_hidden_layers"]), options.layers)
    shards = plan_shards(source.specs, place.max_shard_size)

    def write(directory: Path, device: torch.device, advance: Advance) -> dict[str, Any]:
        journal = target.with_name(f"{target.name}.journal")
        work = Work(journal, device, advance, source.nbytes)
        report = _make(options, source, place, directory / DRAFT, work)
        with ShardWriter(directory, shards) as writer:
            for name, info in source.tensors.items():
                copy_tensor(name, info, info.dtype, writer, lambda _: None)
        shutil.rmtree(journal)
        return report

    return StagePlan(
        name="draft",
        summary=f"draft of {options.layers} layers beside it",
        source=source,
        result=Checkpoint(target, source.config, planned_tensors(shards, target)),
        shards=shards,
        layers=[],
        write=write,
    )


def _make(options: Draft, source: Checkpoint, place: Place, folder: Path, work: Work) -> dict[str, Any]:
    """Cut, distil, measure and write the draft."""
    from distill.speculation import speculate

    code = place.trust_remote_code
    cut = partial(_cut, options, source.path, work.device, trust_remote_code=code)
    found = learn(options.distill, cut, source, place, work)
    say("measuring what the draft guesses right")
    prompts = found.held_out[: options.prompts, : options.prompt_tokens]
    draft = found.model.eval()
    target = load_teacher(source.path, work.device, trust_remote_code=code).model
    speculation = speculate(target, draft.to(target.dtype), prompts, options.new_tokens)
    draft.to(torch.bfloat16).save_pretrained(folder)
    if found.tokenizer is not None:
        found.tokenizer.save_pretrained(folder)
    own, whole = (sum(parameter.numel() for parameter in model.parameters()) for model in (draft, target))
    worth = _worth(speculation)
    say(worth)
    figures = {"parameters": own, "target_parameters": whole, **speculation, "worth": worth}
    return {**found.report, "draft": figures}


def _worth(found: dict[str, Any]) -> str:
    """In a sentence, whether to serve it."""
    figures = (
        f"{found['acceptance_rate']:.0%} of its guesses are accepted, a token costs {found['cost']:.0%} of the "
        f"target's: an expected speed-up of {found['expected_speedup']:.2f}, measured {found['measured_speedup']:.2f}"
    )
    if found["expected_speedup"] > 1:
        return f"the draft is worth serving: {figures}"
    return f"the draft slows its target down: {figures}; train it longer and on more text, or leave it out"


def _cut(options: Draft, path: Path, device: torch.device, *, trust_remote_code: bool) -> tuple[Any, Any]:
    """The draft before it has learnt anything, with its tokenizer."""
    from distill.draft import build_draft
    from quant.loader import load_model

    loaded = load_model(path, trust_remote_code=trust_remote_code)
    return build_draft(loaded.model, options.layers, options.ffn).to(device), loaded.tokenizer  # type: ignore[arg-type]
