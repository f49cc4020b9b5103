"""Reading a checkpoint: every kind of damage is one sentence, found from headers."""

import json
import struct
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compress.checkpoint import INDEX, Checkpoint
from compress.errors import CheckpointError
from compress.tensor_file import DTYPES, read_header, read_tensor
from tests.conftest import build_tiny


def test_reads_what_the_library_wrote(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    expected = load_file(tiny / "model.safetensors")
    assert checkpoint.tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.read(name), tensor)
    assert checkpoint.nbytes == sum(tensor.nbytes for tensor in expected.values())


def test_reads_shards_and_index(tmp_path: Path) -> None:
    build_tiny("llama", tmp_path, max_shard_size="200KB")
    checkpoint = Checkpoint.open(tmp_path)
    assert len({info.path for info in checkpoint.tensors.values()}) > 1


@pytest.mark.parametrize("name", [name for name in DTYPES if name not in ("F8_E8M0",)])
def test_every_dtype(tmp_path: Path, name: str) -> None:
    tensor = torch.arange(6).reshape(2, 3).to(DTYPES[name])
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    read = read_tensor(read_header(tmp_path / "x.safetensors")["x"])
    assert read.dtype == tensor.dtype
    assert torch.equal(read.float(), tensor.float())


def test_rows_and_items_are_runs_of_the_file(tmp_path: Path) -> None:
    tensor = torch.randn(4, 6, 5)
    save_file({"x": tensor}, tmp_path / "x.safetensors")
    info = read_header(tmp_path / "x.safetensors")["x"]
    assert torch.equal(read_tensor(info.rows(1, 3)), tensor[1:3])
    assert torch.equal(read_tensor(info.item(2).rows(3, 6)), tensor[2, 3:6])


def test_empty_tensor(tmp_path: Path) -> None:
    save_file({"x": torch.empty(0, 3), "y": torch.ones(2)}, tmp_path / "x.safetensors")
    assert read_tensor(read_header(tmp_path / "x.safetensors")["x"]).shape == (0, 3)


def _raw(path: Path, header: str, data: bytes) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header.encode() + data)
    return path


ENTRY = '"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'


@pytest.mark.parametrize(
    ("header", "data", "says"),
    [
        pytest.param("{" + ENTRY + "}", bytes(4), "truncated or corrupt", id="truncated"),
        pytest.param("{" + ENTRY + "}", bytes(12), "truncated or corrupt", id="trailing"),
        pytest.param("{" + ENTRY + "," + ENTRY + "}", bytes(8), "the tensor 'x' twice", id="twice"),
        pytest.param("{" + ENTRY, bytes(8), "corrupt safetensors header", id="no-json"),
        pytest.param("[1]", bytes(8), "no object", id="no-object"),
        pytest.param('{"x":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}', bytes(8), "has dtype 'F99'", id="dtype"),
        pytest.param('{"x":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}', bytes(8), "has 8 bytes", id="shape"),
        pytest.param(
            '{"x":{"dtype":"F32","data_offsets":[0,8]}}', bytes(8), "corrupt entry for tensor 'x'", id="no-shape"
        ),
        pytest.param('{"x":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', bytes(12), "holes at byte", id="hole"),
    ],
)
def test_damaged_file(tmp_path: Path, header: str, data: bytes, says: str) -> None:
    path = _raw(tmp_path / "x.safetensors", header, data)
    with pytest.raises(CheckpointError, match=r"x\.safetensors") as error:
        read_header(path)
    assert says in str(error.value)


@pytest.mark.parametrize("data", [b"", b"short", b"\xff" * 64], ids=["empty", "short", "huge-header"])
def test_no_safetensors_file(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "x.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        read_header(tmp_path / "x.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return build_tiny("llama", tmp_path / "sharded", max_shard_size="200KB")


def test_missing_shard(sharded: Path) -> None:
    next(iter(sorted(sharded.glob("*.safetensors")))).unlink()
    with pytest.raises(CheckpointError, match=r"the index names the shard model-00001-.*, which is missing"):
        Checkpoint.open(sharded)


def _edit_index(directory: Path, edit) -> None:
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


def test_index_names_absent_tensor(sharded: Path) -> None:
    _edit_index(sharded, lambda weights: weights.update({"model.ghost.weight": next(iter(weights.values()))}))
    with pytest.raises(
        CheckpointError, match=r"names 1 tensors that are not in their shard, first 'model\.ghost\.weight'"
    ):
        Checkpoint.open(sharded)


def test_tensor_not_in_index(sharded: Path) -> None:
    _edit_index(sharded, lambda weights: weights.pop("model.norm.weight"))
    with pytest.raises(CheckpointError, match=r"1 tensors are in the shards but not in the index, first 'model\.norm"):
        Checkpoint.open(sharded)


def test_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("*.safetensors"))[:2]
    save_file(load_file(second) | load_file(first), second, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"is in model-00001-.* and in model-00002-.*: keep one of them"):
        Checkpoint.open(sharded)


def test_pickles_are_refused_with_the_way_out(tiny: Path) -> None:
    (tiny / "model.safetensors").rename(tiny / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pickled weights \(pytorch_model\.bin\).*convert them to safetensors"):
        Checkpoint.open(tiny)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json holds no JSON object"),
        ("model.safetensors", None, "holds no safetensors file"),
    ],
)
def test_missing_or_broken_file(tiny: Path, name: str, text: str | None, says: str) -> None:
    if text is None:
        (tiny / name).unlink()
    else:
        (tiny / name).write_text(text)
    with pytest.raises(CheckpointError, match=says):
        Checkpoint.open(tiny)


def test_no_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a directory"):
        Checkpoint.open(tmp_path / "nowhere")


def test_side_files_leave_weights_and_evidence_behind(tiny: Path) -> None:
    for name in ("chat_template.jinja", "evidence/gate.json", "sub/code.py", "optimizer.pt", "model.onnx"):
        (tiny / name).parent.mkdir(exist_ok=True)
        (tiny / name).write_text("x")
    carried = {str(file) for file in Checkpoint.open(tiny).side_files}
    assert {"tokenizer.json", "generation_config.json", "chat_template.jinja", "sub/code.py"} <= carried
    assert not carried & {"config.json", "model.safetensors", "evidence/gate.json", "optimizer.pt", "model.onnx"}
