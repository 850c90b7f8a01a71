"""The strict reader on tensors and files that are not what they should be: each refusal is one line naming both."""

from __future__ import annotations

import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import EXPERT, edit, read_file, refuse, write_file
from cpu_engine_helpers import checkpoint_dir, golden_dir

from glm53.checkpoint import Checkpoint
from glm53.checkpoint.safetensors_file import ITEM_BYTES
from glm53.errors import CheckpointError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A private copy of a good checkpoint."""
    return Path(shutil.copytree(golden_dir(), tmp_path / "model"))


@pytest.fixture
def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


# ---------------------------------------------------------------- tensors


def test_missing_tensor(weights: Path) -> None:
    edit(weights, lambda t: t.pop(f"{EXPERT}.suh"))
    refuse(weights.parent, f"{EXPERT}.suh", "missing", "model.safetensors")


def test_unknown_tensor(weights: Path) -> None:
    name = "model.language_model.layers.1.mlp.experts.16.up_proj.suh"
    edit(weights, lambda t: t.update({name: ("F16", [1], b"xx")}))
    refuse(weights.parent, name, "unknown tensor", "model.safetensors")


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "part"),
    [
        ("model.language_model.norm.weight", "F64", [256], "dtype F64"),
        ("model.language_model.norm.weight", "F32", [255], "shape [255], need [256]"),
        (f"{EXPERT}.suh", "F32", [256], "dtype F32, need F16"),
        (f"{EXPERT}.svh", "F16", [256], "need [128]"),
        (f"{EXPERT}.trellis", "I32", [16, 8, 48], "dtype I32"),
        (f"{EXPERT}.trellis", "I16", [8, 16, 48], "need [16, 8, 16 * K]"),
        (f"{EXPERT}.trellis", "I16", [16, 8, 40], "up_proj.trellis: routed experts at 2.5 bits"),
        (f"{EXPERT}.trellis", "I16", [16, 8, 80], "routed experts at 5 bits"),
        (f"{EXPERT}.trellis", "I16", [16, 8, 50], "not an EXL3 rate"),
        (f"{EXPERT}.mul1", "I32", [1], "shape [1], need []"),
    ],
)
def test_wrong_dtype_shape_or_rate(weights: Path, name: str, dtype: str, shape: list[int], part: str) -> None:
    size = math.prod(shape) * ITEM_BYTES[dtype]
    edit(weights, lambda t: t.update({name: (dtype, shape, bytes(size))}))
    refuse(weights.parent, name.rpartition(".")[0], part, "model.safetensors")


def test_wrong_codebooks(weights: Path) -> None:
    good = weights.read_bytes()
    edit(weights, lambda t: t.update({f"{EXPERT}.mul1": ("I32", [], (0x83DCD12E).to_bytes(4, "little"))}))
    refuse(weights.parent, f"{EXPERT}.mul1", "codebook 0x83dcd12e, need 0x83dcd12d")
    weights.write_bytes(good)
    edit(weights, lambda t: t.update({f"{EXPERT}.mcg": ("I32", [], (0xCBAC1FED).to_bytes(4, "little"))}))
    refuse(weights.parent, EXPERT, "both mul1 and mcg")
    weights.write_bytes(good)
    edit(weights, lambda t: t.pop(f"{EXPERT}.mul1"))
    refuse(weights.parent, EXPERT, "codebook 3inst")


def test_half_rates_exist_with_one_codebook_only(weights: Path) -> None:
    def change(tensors: Any) -> None:
        tensors[f"{EXPERT}.trellis"] = ("I16", [16, 8, 40], bytes(2 * 16 * 8 * 40))
        tensors.pop(f"{EXPERT}.mul1")

    edit(weights, change)
    refuse(weights.parent, f"{EXPERT}.trellis", "2.5 bits per weight exists with codebook mul1 only, found 3inst")


def test_mcg_experts_are_refused_unless_the_caller_decodes_them() -> None:
    path = checkpoint_dir(esb=1.0, cb="mcg")
    refuse(path, "codebook mcg", "experts")
    with Checkpoint.open(path, expert_codebooks=("mcg",)) as ck:
        assert ck.experts(1)[0].codebook == "mcg"


# ---------------------------------------------------------------- files


def test_truncated_file(weights: Path) -> None:
    last = list(read_file(weights))[-1]
    weights.write_bytes(weights.read_bytes()[:-100])
    refuse(weights.parent, "model.safetensors", last, "truncated")
    weights.write_bytes(weights.read_bytes()[:1000])
    refuse(weights.parent, "model.safetensors", "truncated")
    weights.write_bytes(b"abc")
    refuse(weights.parent, "model.safetensors", "not a safetensors file or truncated")


def test_trailing_bytes(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes() + b"12345")
    refuse(weights.parent, "5 bytes beyond the last tensor")


def test_overlaps_and_holes(weights: Path) -> None:
    tensors = read_file(weights)
    a, b = list(tensors)[:2]

    def shift(by: int) -> Callable[[dict[str, Any]], None]:
        def change(header: dict[str, Any]) -> None:
            header[b]["data_offsets"] = [v + by for v in header[b]["data_offsets"]]

        return change

    write_file(weights, tensors, shift(-4))
    refuse(weights.parent, b, f"overlaps {a}")
    write_file(weights, tensors, shift(4))
    refuse(weights.parent, b, "hole of 4 bytes")


@pytest.mark.parametrize(
    ("entry", "part"),
    [({"dtype": "F99"}, "corrupt header entry"), ({"shape": [-1]}, "corrupt header entry"), ({"shape": "x"}, "corrupt"),
     ({"data_offsets": [0]}, "corrupt"), ({"shape": [3]}, "bytes stored"), ({"shape": [-1] * 9999}, "header entry"),
     ({"dtype": ["F16"]}, "corrupt"), ({"data_offsets": [0, 10**30]}, "bytes stored")],
)  # fmt: skip
def test_corrupt_header_entries(weights: Path, entry: dict[str, Any], part: str) -> None:
    write_file(weights, read_file(weights), lambda h: h["model.language_model.norm.weight"].update(entry))
    refuse(weights.parent, "model.safetensors", part)


def test_corrupt_header_json(weights: Path) -> None:
    raw = bytearray(weights.read_bytes())
    raw[8] = ord("?")
    weights.write_bytes(raw)
    refuse(weights.parent, "model.safetensors", "corrupt safetensors header")


def test_duplicates_in_one_file_and_in_two(folder: Path, weights: Path) -> None:
    tensors = read_file(weights)
    name = next(iter(tensors))
    write_file(folder / "extra.safetensors", {name: tensors[name]})
    refuse(folder, name, "model.safetensors", "extra.safetensors")
    (folder / "extra.safetensors").unlink()
    raw = weights.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    head = raw[8 : 8 + n].replace(
        b"model.language_model.layers.0.hc_attn_fn", b"model.language_model.layers.0.hc_ffn_fn", 1
    )
    weights.write_bytes(len(head).to_bytes(8, "little") + head + raw[8 + n :])
    refuse(folder, "twice in the header", "model.safetensors")


def test_a_duplicate_is_found_in_a_large_header_at_once(folder: Path) -> None:
    names = [f'"t{i}":0' for i in range(200_000)]
    head = ("{" + ",".join([*names, names[-1]]) + "}").encode()
    (folder / "extra.safetensors").write_bytes(len(head).to_bytes(8, "little") + head)
    started = time.process_time()
    refuse(folder, "'t199999' appears twice in the header")
    assert time.process_time() - started < 30, "one pass, not one per name"


def test_what_is_no_file_is_refused_by_name(folder: Path) -> None:
    other = folder / "other.safetensors"
    other.mkdir()
    refuse(folder, "other.safetensors", "not a regular file")
    other.rmdir()
    os.mkfifo(other)  # opening one without a writer would wait for ever
    refuse(folder, "other.safetensors", "not a regular file")
    other.unlink()
    other.symlink_to(other)
    refuse(folder, "other.safetensors", "cannot be opened", "symbolic links")


def test_folders_that_may_not_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", denied)
    refuse(folder, "cannot be read (Permission denied)")


def test_file_changed_while_reading(folder: Path, weights: Path) -> None:
    name = f"{EXPERT}.trellis"
    with Checkpoint.open(folder) as ck:
        ck.read(name)
        with weights.open("r+b") as f:
            f.seek(-1, os.SEEK_END)
            f.write(b"!")
        os.utime(weights, ns=(1, 1))
        with pytest.raises(CheckpointError, match=re.escape(name) + ".*changed while reading"):
            ck.read(name)


def test_file_replaced_or_shortened_while_reading(folder: Path, weights: Path) -> None:
    last = list(read_file(weights))[-1]
    with Checkpoint.open(folder) as ck:
        shutil.copy(weights, folder / "new")
        os.replace(folder / "new", weights)
        ck.read(last)  # the file that was opened is still whole
        with pytest.raises(CheckpointError, match="changed while reading"):
            ck.verify_unchanged()
    with Checkpoint.open(folder) as ck:
        os.truncate(weights, weights.stat().st_size - 10)
        with pytest.raises(CheckpointError, match=re.escape(last) + ".*shorter"):
            ck.read(last)
