"""A calibrated run under torchrun: two processes that share the tokens write the bytes of one."""

import shutil
from pathlib import Path

import torch
import torch.multiprocessing as mp

from compress import walk_block
from compress.checkpoint import Checkpoint
from quant.calibrated import Calibration, run_calibrated
from quant.formats import make_format
from quant.plan import plan_quantize


def quantize(directory, out):
    torch.set_num_threads(1)
    walk_block.BATCH_TOKENS = 64
    tokens = torch.randint(3, 128, (8, 32), generator=torch.Generator().manual_seed(0))
    source = Checkpoint.open(directory)
    plan = plan_quantize(source, make_format("int8"), targets=("Linear",), ignore=("lm_head",), max_shard_size=1 << 40)
    out.mkdir(exist_ok=True)
    calibration = Calibration("awq-gptq", tokens, out.parent / f"{out.name}.journal")
    run_calibrated(plan, calibration, out, torch.device("cpu"), lambda done: None)


def run_rank(rank, directory, out):
    rendezvous = f"file://{out.parent / 'rendezvous'}"
    torch.distributed.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    quantize(directory, out)
    torch.distributed.destroy_process_group()


def test_two_ranks_write_the_bytes_of_one(tiny_models, tmp_path, monkeypatch):
    directory = Path(shutil.copytree(tiny_models("llama"), tmp_path / "model"))
    monkeypatch.setattr(walk_block, "BATCH_TOKENS", 64)
    quantize(directory, tmp_path / "one")
    other = mp.get_context("spawn").Process(target=run_rank, args=(1, directory, tmp_path / "two"))
    other.start()
    run_rank(0, directory, tmp_path / "two")
    other.join()
    assert other.exitcode == 0
    one, two = (tmp_path / out / "model.safetensors" for out in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
