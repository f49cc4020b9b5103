"""The walk under torchrun: two processes that share the tokens see the statistics of one."""

import shutil
from pathlib import Path

import torch
import torch.multiprocessing as mp

from compress import walk_block
from compress.checkpoint import Checkpoint
from compress.walk import walk


def quantize_all(directory):
    """Walk a model rounding every linear; each group's statistics."""
    torch.set_num_threads(1)
    walk_block.BATCH_TOKENS = 64
    tokens = torch.randint(3, 128, (6, 32), generator=torch.Generator().manual_seed(0))
    seen = {}
    for block in walk(Checkpoint.open(directory), tokens, device=torch.device("cpu")):
        for group in block.groups(list(block.linears)):
            seen[group.names] = (group.statistics.hessian, group.statistics.tokens)
            group.replace([(weight * 64).round() / 64 for weight in group.weights])
    return seen


def run_rank(rank, directory, out):
    torch.distributed.init_process_group("gloo", init_method=f"file://{out / 'rendezvous'}", rank=rank, world_size=2)
    torch.save(quantize_all(directory), out / f"{rank}.pt")
    torch.distributed.destroy_process_group()


def test_two_ranks_see_the_statistics_of_one(tiny_models, tmp_path, monkeypatch):
    directory = Path(shutil.copytree(tiny_models("qwen3-moe"), tmp_path / "model"))
    monkeypatch.setattr(walk_block, "BATCH_TOKENS", 64)
    expected = quantize_all(directory)
    other = mp.get_context("spawn").Process(target=run_rank, args=(1, directory, tmp_path))
    other.start()
    run_rank(0, directory, tmp_path)
    other.join()
    assert other.exitcode == 0
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert list(found) == list(expected)
        for names, (hessian, count) in expected.items():
            assert found[names][1] == count
            assert torch.equal(found[names][0], hessian)
