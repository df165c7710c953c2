"""Safetensors files one tensor at a time: what is written is what the library reads, and nothing half-written appears."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from meshcee.errors import UsageError
from meshcee.files.tensor_files import Checkpoint, TensorFile, byte_view, flat_bytes
from tests.rig.strides import ODD

TENSORS = {
    "b.flag": torch.tensor([True, False, True]),
    "a.weight": torch.randn(3, 5),
    "half": torch.randn(7).bfloat16(),
    "wide": torch.randn(2, 3, dtype=torch.float64),
    "scalar": torch.tensor(4),
    "empty": torch.empty(0, 4),
    "transposed": torch.randn(4, 6).T,
    "plane": torch.randn(4, 6, 2)[..., 0],
}
LAYOUT = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in TENSORS.items()}


def assert_same(found: dict[str, torch.Tensor]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name


def shards(folder: Path) -> Path:
    """As `save_pretrained` leaves a large model."""
    parts = {"model-00001-of-00002.safetensors": ["a.weight", "half", "b.flag"], "model-00002-of-00002.safetensors": []}
    parts["model-00002-of-00002.safetensors"] = [n for n in TENSORS if n not in next(iter(parts.values()))]
    for file, names in parts.items():
        safetensors.torch.save_file({n: TENSORS[n].contiguous() for n in names}, folder / file)
    index = {"metadata": {}, "weight_map": {n: file for file, names in parts.items() for n in names}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_the_library_reads_what_was_written_in_any_order(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    with TensorFile(path, LAYOUT) as file:
        for name in reversed(TENSORS):
            assert not path.exists()
            file.write(name, TENSORS[name])
    assert_same(safetensors.torch.load_file(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["out.safetensors"]


def test_a_file_that_is_not_whole_never_appears(tmp_path: Path) -> None:
    path = tmp_path / "out.safetensors"
    with pytest.raises(ValueError, match="never written"), TensorFile(path, LAYOUT) as file:
        file.write("half", TENSORS["half"])
    with pytest.raises(KeyError), TensorFile(path, LAYOUT):
        raise KeyError
    assert list(tmp_path.iterdir()) == []


def test_what_was_not_announced_is_not_written(tmp_path: Path) -> None:
    with TensorFile(tmp_path / "out.safetensors", {"a": (torch.float32, (2,))}) as file:
        for name, tensor in {"b": torch.zeros(2), "a": torch.zeros(3)}.items():
            with pytest.raises(ValueError, match="announced"):
                file.write(name, tensor)
        file.write("a", torch.ones(2))
        with pytest.raises(ValueError, match="twice"):
            file.write("a", torch.zeros(2))
    assert torch.equal(Checkpoint.at(tmp_path / "out.safetensors")["a"], torch.ones(2))


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot write .*nowhere"), TensorFile(tmp_path / "nowhere" / "x", LAYOUT):
        pass


def test_a_checkpoint_is_a_file_a_folder_or_shards(tmp_path: Path) -> None:
    single = tmp_path / "single"
    single.mkdir()
    with TensorFile(single / "model.safetensors", LAYOUT) as file:
        for name, tensor in TENSORS.items():
            file.write(name, tensor)
    sharded = tmp_path / "sharded"
    sharded.mkdir()
    for path in (single, single / "model.safetensors", shards(sharded), sharded / "model.safetensors.index.json"):
        found = Checkpoint.at(path)
        assert found.layout == LAYOUT
        assert_same(dict(found))


def test_what_is_no_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no weights at"):
        Checkpoint.at(tmp_path)
    (tmp_path / "damaged.safetensors").write_bytes(b"\xff" * 40)
    with pytest.raises(UsageError, match="cannot be read"):
        Checkpoint.at(tmp_path / "damaged.safetensors")
    index = shards(tmp_path) / "model.safetensors.index.json"
    for text in ("[]", "{", '{"weight_map": {"a": "../a"}}', '{"weight_map": {"a": 3}}'):
        index.write_text(text)
        with pytest.raises(UsageError, match="not an index"):
            Checkpoint.at(tmp_path)
    index.write_text('{"weight_map": {"absent": "model-00001-of-00002.safetensors"}}')
    with pytest.raises(UsageError, match="does not hold 'absent'"):
        Checkpoint.at(tmp_path)


@pytest.mark.parametrize("name", TENSORS | ODD)
def test_a_tensors_bytes_are_those_of_its_elements_in_their_order(name: str) -> None:
    tensor = (TENSORS | ODD)[name]
    assert bytes(byte_view(tensor)) == bytes(tensor.clone(memory_format=torch.contiguous_format).untyped_storage())


def test_flat_bytes_are_the_tensors_own_memory_where_it_is_contiguous() -> None:
    for tensor in (torch.randn(3, 5), *ODD.values()):
        flat = flat_bytes(tensor)
        assert (flat.shape, flat.stride()) == ((tensor.nbytes,), (1,))
        assert not tensor.numel() or flat.data_ptr() == tensor.data_ptr()
    turned = torch.randn(4, dtype=torch.complex64)
    assert bytes(byte_view(turned.conj())) == bytes(byte_view(turned.conj().resolve_conj().clone()))


def test_a_file_holds_tensors_of_any_strides(tmp_path: Path) -> None:
    layout = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in ODD.items()}
    with TensorFile(tmp_path / "odd.safetensors", layout) as file:
        for name, tensor in ODD.items():
            file.write(name, tensor)
    found = safetensors.torch.load_file(tmp_path / "odd.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in ODD.items())
