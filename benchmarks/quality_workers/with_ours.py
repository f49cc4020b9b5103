"""A checkpoint by our own quantize stage: python with_ours.py request.json."""

import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from shared import Request

from compress.checkpoint import Checkpoint
from compress.recipe import Stage
from compress.stages import Place, plan_stages, run_stage
from evals.samples import load_samples


def main() -> None:
    request = Request()
    quantize = {"method": request.method, **request.options, "calibration": request.calibration}
    stage = Stage.model_validate({"quantize": quantize})
    evaluated = [
        load_samples(kind, kind=kind, source=source, count=count)  # type: ignore[arg-type]
        for kind, (source, count) in request.sets.items()
    ]
    place = Place(request.target.parent / f"{request.target.name}.stages", 10**10, evaluated=evaluated)
    shutil.rmtree(place.directory, ignore_errors=True)  # what a killed run left: going on from it would cost less
    plan = plan_stages([stage], Checkpoint.open(request.source), place)[0]
    run_stage(plan, torch.device("cpu"), lambda _: None)
    request.target.rmdir()
    plan.result.path.rename(request.target)
    shutil.rmtree(place.directory)
    request.done()


if __name__ == "__main__":
    main()
