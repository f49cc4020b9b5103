"""Writing shards by plan: what the library reads back is what went in, and an unfinished file never looks finished."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from compress.tensor_file import Spec
from compress.writer import ShardWriter, plan_shards

TENSORS = {
    "a.weight": torch.randn(300, 7).bfloat16(),
    "a.scale": torch.randn(3),
    "b.packed": torch.arange(33, dtype=torch.uint8),
    "b.count": torch.tensor([5, 6]),
    "c.codes": torch.randn(8, 8).to(torch.float8_e4m3fn),
    "d.empty": torch.empty(0, 4),
}
SPECS = {name: Spec(tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def write(directory: Path, limit: int) -> dict[str, torch.Tensor]:
    directory.mkdir()
    with ShardWriter(directory, plan_shards(SPECS, limit)) as writer:
        for name in reversed(TENSORS):
            writer.append(name, TENSORS[name])
    return {name: t for file in sorted(directory.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("limit", [10**9, 3000, 1], ids=["one-shard", "few-shards", "shard-each"])
def test_library_reads_it_back(tmp_path: Path, limit: int) -> None:
    read = write(tmp_path / "out", limit)
    assert read.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name].view(torch.uint8), tensor.view(torch.uint8))


def test_index_and_metadata(tmp_path: Path) -> None:
    write(tmp_path / "out", 3000)
    index = json.loads((tmp_path / "out/model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == TENSORS.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in TENSORS.values())
    with safe_open(tmp_path / "out" / index["weight_map"]["a.weight"], "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_golden_bytes(tmp_path: Path) -> None:
    with ShardWriter(tmp_path, plan_shards({"x": Spec(torch.int16, (2,))}, 100)) as writer:
        writer.append("x", torch.tensor([1, 2], dtype=torch.int16))
    header = b'{"__metadata__":{"format":"pt"},"x":{"dtype":"I16","shape":[2],"data_offsets":[0,4]}}'
    header += b" " * (-len(header) % 8)
    expected = len(header).to_bytes(8, "little") + header + b"\x01\x00\x02\x00"
    assert (tmp_path / "model.safetensors").read_bytes() == expected


def test_runs_of_rows_follow_each_other(tmp_path: Path) -> None:
    tensor = TENSORS["a.weight"]
    with ShardWriter(tmp_path, plan_shards({"x": SPECS["a.weight"]}, 10**6)) as writer:
        for start in range(0, 300, 128):
            writer.append("x", tensor[start : start + 128])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["x"], tensor)


def test_too_little_or_too_much_is_refused(tmp_path: Path) -> None:
    plan = plan_shards({"x": Spec(torch.float32, (4,))}, 100)
    with (
        pytest.raises(ValueError, match="1 planned tensors were not written whole, first 'x'"),
        ShardWriter(tmp_path, plan) as w,
    ):
        w.append("x", torch.zeros(3))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="does not fit the planned"), ShardWriter(tmp_path, plan) as w:
        w.append("x", torch.zeros(5))
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="does not fit the planned"), ShardWriter(tmp_path, plan) as w:
        w.append("x", torch.zeros(4, dtype=torch.float64))


def test_error_inside_leaves_no_index(tmp_path: Path) -> None:
    with pytest.raises(KeyError), ShardWriter(tmp_path, plan_shards(SPECS, 1)) as writer:
        writer.append("nobody", torch.zeros(1))
    assert not list(tmp_path.glob("*.index.json"))
