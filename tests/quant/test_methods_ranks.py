"""A calibrated run under torchrun: two processes that share the tokens write what one does, and none waits forever."""

import contextlib
import json
import time
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file, save_file

from compress import walk_block
from compress.checkpoint import Checkpoint
from quant.calibrated import Calibration, run_calibrated
from quant.formats import make_format
from quant.plan import plan_quantize

PATIENCE = timedelta(seconds=60)  # with a rank that makes another call than the others, an error instead of a hang
CASES = {  # experts in files of their own, fused in one tensor, and fused in a layout that is left in 16 bits
    "llama": ("awq-gptaq", "int8", {}),
    "mixtral": ("search", "fp8", {"strategy": "tensor", "inputs": "static"}),
    "qwen3-moe": ("awq-gptaq", "int4", {"group_size": 32}),
    "fused": ("search", "nvfp4", {"activations": True}),
    "gpt-oss": ("awq", "mxfp4", {}),
    "qwen2": ("learned", "int4", {"group_size": 32}),
}


def fuse(directory, out):
    """The same model with the experts of a layer in two tensors."""
    tensors = load_file(directory / "model.safetensors")
    for layer in range(2):
        experts = f"model.layers.{layer}.mlp.experts"
        parts = [[tensors.pop(f"{experts}.{i}.{n}_proj.weight") for n in ("gate", "up", "down")] for i in range(4)]
        tensors[f"{experts}.gate_up_proj"] = torch.stack([torch.cat([gate, up]) for gate, up, _ in parts])
        tensors[f"{experts}.down_proj"] = torch.stack([down for _, _, down in parts])
    out.mkdir()
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_bytes((directory / "config.json").read_bytes())
    return out


def quantize_all(sources, out):
    """Every case in turn; the tokens are few, so that experts see few of them, on one rank or the other none."""
    torch.set_num_threads(1)
    walk_block.BATCH_TOKENS = 16
    tokens = torch.randint(3, 128, (5, 16), generator=torch.Generator().manual_seed(0))
    for kind, (method, name, options) in CASES.items():
        fmt, folder = make_format(name, **options), out / kind
        source = Checkpoint.open(sources[kind])
        plan = plan_quantize(source, fmt, targets=("Linear",), ignore=("lm_head",), max_shard_size=1 << 40)
        folder.mkdir(parents=True, exist_ok=True)
        calibration = Calibration(method, tokens, out / f"{kind}.journal", iterations=7)
        reports = run_calibrated(plan, calibration, folder, torch.device("cpu"), lambda done: None)
        rank = dist.get_rank() if dist.is_initialized() else 0
        (folder / f"report{rank}.json").write_text(json.dumps(reports))


class Killed(Exception):
    """Stands for a kill: nothing is cleaned up."""


def go_on(source, out, advance):
    """A run of two blocks that continues from whatever journal there is."""
    tokens = torch.randint(3, 128, (2, 16), generator=torch.Generator().manual_seed(1))
    fmt = make_format("int8")
    plan = plan_quantize(Checkpoint.open(source), fmt, targets=("Linear",), ignore=("lm_head",), max_shard_size=1 << 40)
    out.mkdir(parents=True, exist_ok=True)
    calibration = Calibration("search", tokens, out / "journal")
    run_calibrated(plan, calibration, out, torch.device("cpu"), advance)


def leave_a_whole_journal(source, out):
    done = []

    def kill_at_the_last(amount):
        done.append(amount)
        if len(done) == 2:
            raise Killed

    with contextlib.suppress(Killed):
        go_on(source, out, kill_at_the_last)


def run_rank(rank, sources, out):
    rendezvous = f"file://{out / 'rendezvous'}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=PATIENCE)
    quantize_all(sources, out)
    go_on(sources["llama"], out / "resumed", lambda done: time.sleep(rank / 2))  # the first is done long before
    dist.destroy_process_group()


def test_two_ranks_write_the_bytes_of_one(tiny_models, tmp_path, monkeypatch):
    monkeypatch.setattr(walk_block, "BATCH_TOKENS", 16)
    sources = {kind: tiny_models(kind) for kind in CASES if kind != "fused"}
    sources["fused"] = fuse(tiny_models("qwen3-moe"), tmp_path / "fused-model")
    one, two = tmp_path / "one", tmp_path / "two"
    two.mkdir()
    other = mp.get_context("spawn").Process(target=run_rank, args=(1, sources, two), daemon=True)
    other.start()
    leave_a_whole_journal(sources["llama"], two / "resumed")  # while the other process starts
    quantize_all(sources, one)
    run_rank(0, sources, two)
    other.join(PATIENCE.total_seconds())
    assert other.exitcode == 0
    assert (two / "resumed" / "model.safetensors").exists() and not (two / "resumed" / "journal").exists()
    for kind in CASES:
        assert (one / kind / "model.safetensors").read_bytes() == (two / kind / "model.safetensors").read_bytes(), kind
        reports = [
            (folder / kind / f"report{rank}.json").read_text() for folder, rank in ((one, 0), (two, 0), (two, 1))
        ]
        assert reports[0] == reports[1] == reports[2], kind
