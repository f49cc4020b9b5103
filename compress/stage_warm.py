"""The warm start of a distill stage: a checkpoint between student and training, block by block nearer the teacher.

It is written in float32, so that nothing of what the blocks have learnt is rounded away, and loaded like any other.
"""

import shutil
from pathlib import Path
from typing import Any

import torch

from compress.checkpoint import Checkpoint, quantization_block, read_json
from compress.errors import RecipeError, Refused
from compress.progress import say, step
from compress.stage_plan import Place
from compress.tensor_file import Spec
from compress.walk_journal import Journal
from compress.writer import ShardWriter, copy_side_file, plan_shards, write_json
from distill.options import WarmStart
from quant.stream import copy_tensor

__all__ = ["check_blocks", "warm_start"]

FOUND = "warm_start.json"
ALIKE = ("num_hidden_layers", "hidden_size")


def check_blocks(student: Checkpoint, teacher: Checkpoint) -> None:
    """Refuse a teacher whose blocks are not each the target of one of the student's.

    Raises:
        RecipeError: it is quantized, or has other layers or another width.
    """
    if quantization_block(teacher.config) is not None:
        raise RecipeError("stages: distill.warm_start needs a teacher in 16 bits, this one is quantized: leave it out")
    for key in ALIKE:
        ours, theirs = (side.text_config[key] for side in (student, teacher))
        if ours != theirs:
            raise RecipeError(
                f"stages: distill.warm_start pairs blocks, but {key} is {ours} in the student and {theirs} in the "
                "teacher: leave it out"
            )


def warm_start(
    options: WarmStart, pair: tuple[Checkpoint, Checkpoint], place: Place, folder: Path, device: torch.device
) -> tuple[Path, dict[str, Any]]:
    """The directory to start the training from, made now or by an earlier run, and what run.json keeps.

    Raises:
        Diverged: a block's error that is not finite.
        Refused: blocks whose tensors the checkpoint holds in another layout.
    """
    student, teacher = pair
    directory = folder / "warm"
    if not directory.exists():
        from distill.blocks import WarmUp, warm_blocks  # brings the model code

        tokens = place.calibration_tokens(options.calibration, student)
        plan = WarmUp(options.steps, options.batch, options.learning_rate, place.trust_remote_code)
        journal = Journal(folder / "blocks", writes=True)
        with step("warm start", student.text_config["num_hidden_layers"]) as advance:
            errors = warm_blocks(student, teacher, tokens, plan, journal, (device, lambda _: advance(1)))
        means = [sum(side) / len(errors) for side in zip(*errors, strict=True)]
        _write(student, journal, {"before": means[0], "after": means[1]}, directory)
        shutil.rmtree(journal.directory)
    found = read_json(directory / FOUND)
    say(f"warm start: relative error of a block {found['before']:.4f}, then {found['after']:.4f}")
    return directory, {"warm_start": {**options.model_dump(), **found}}


def _write(student: Checkpoint, journal: Journal, found: dict[str, float], directory: Path) -> None:
    partial = directory.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    trained = {name: part for part in journal.parts() for name, _ in journal.tensors(part)}
    lost = sorted(set(trained) - set(student.tensors))
    if lost:
        raise Refused(f"distill.warm_start cannot store {lost[0]!r}, which the checkpoint holds in another layout")
    specs = {
        name: Spec(torch.float32 if info.dtype.is_floating_point else info.dtype, info.shape)
        for name, info in student.tensors.items()
    }
    with ShardWriter(partial, plan_shards(specs, 5 * 10**9)) as writer:
        for part in journal.parts():
            for name, tensor in journal.tensors(part):
                writer.append(name, tensor)
        for name, info in student.tensors.items():
            if name not in trained:
                copy_tensor(name, info, specs[name].dtype, writer, lambda _: None)
    for file in student.side_files:
        copy_side_file(student.path / file, partial / file)
    config = student.config | {"dtype": "float32"}
    nested = {key: value | {"dtype": "float32"} for key, value in config.items() if key == "text_config"}
    write_json(partial / "config.json", config | nested)
    write_json(partial / FOUND, found)
    partial.rename(directory)
