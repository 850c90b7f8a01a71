"""A whole checkpoint folder, verified by its headers, then read tensor by tensor.

States: open (every tensor present, known, of the right type and shape) -> closed. Nothing is allocated for weights
before the folder is verified, so a bad checkpoint never starts partially. Cost of opening the real model
(148,024 tensors, 15 files): the headers, and one 4-byte read per codebook marker.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import CheckpointError
from .layout import BASE, EXPERT_LINEARS, Linear, Plain, expected, expected_mtp, expert_key, unused
from .model_config import EXAMPLE, ModelConfig
from .safetensors_file import SafetensorsFile, TensorInfo, open_folder

F32 = npt.NDArray[np.float32]
MARKERS = {"mul1": 0x83DCD12D, "mcg": 0xCBAC1FED}
_FLOATS = ("BF16", "F16", "F32")
_NUMPY: dict[str, Any] = {"BF16": np.uint16, "F16": np.float16, "F32": np.float32, "I16": np.int16, "I32": np.int32}
_HALF_BITS = (1.5, 2.5, 3.5)


@dataclass(frozen=True, slots=True)
class Exl3Linear:
    """One EXL3 linear in memory: trellis int16 (in/16, out/16, 16 K), suh float16 (in,), svh float16 (out,).

    `in_features` and `out_features` are the real sizes; the arrays are padded up to multiples of 128.
    """

    key: str
    in_features: int
    out_features: int
    bits: float
    codebook: str
    trellis: npt.NDArray[np.int16]
    suh: npt.NDArray[np.float16]
    svh: npt.NDArray[np.float16]


@dataclass(frozen=True, slots=True)
class ExpertLinear:
    """Where one linear of one routed expert lies on disk; `which` is gate, up or down."""

    expert: int
    which: str
    bits: int
    codebook: str
    trellis: TensorInfo
    suh: TensorInfo
    svh: TensorInfo


@dataclass(frozen=True, slots=True)
class _Kernels:
    """What the caller's expert kernels can decode."""

    codebooks: tuple[str, ...]
    bits: tuple[int, ...]


def _pad(n: int) -> int:
    return -(-n // 128) * 128


class Checkpoint:
    """Verified tensors of one folder. Use as a context manager, or call `close`."""

    def __init__(self, path: Path, config: ModelConfig, files: list[SafetensorsFile]) -> None:
        self.path = path
        self.config = config
        self.tensors: dict[str, TensorInfo] = {}
        self._files = {f.path: f for f in files}
        self._linears: dict[str, tuple[Linear, float, str]] = {}

    @classmethod
    def open(
        cls,
        model_dir: Path,
        *,
        expert_codebooks: tuple[str, ...] = ("mul1",),
        expert_bits: tuple[int, ...] = (2, 3, 4),
        mtp: bool = False,
    ) -> Checkpoint:
        """Verify a folder. Raises CheckpointError with what to do; nothing stays open then.

        `expert_codebooks` and `expert_bits` say what the caller's expert kernels can decode. `mtp`: the MTP layers are
        wanted too (exllamav3 alone runs those, at any whole bit rate); else they may be absent.
        """
        model_dir = Path(model_dir)
        _require_folder(model_dir)
        config = ModelConfig.load(model_dir)
        files: list[SafetensorsFile] = []
        try:
            files.extend(open_folder(model_dir))
            checkpoint = cls(model_dir, config, files)
            checkpoint._index(files)
            checkpoint._verify(_Kernels(expert_codebooks, expert_bits), mtp)
        except BaseException:
            for f in files:
                f.close()
            raise
        return checkpoint

    def _index(self, files: list[SafetensorsFile]) -> None:
        for f in files:
            for name, info in f.tensors.items():
                if name in self.tensors:
                    other = self.tensors[name].file.name
                    raise CheckpointError(f"{f.path}: {name}: also in {other}; remove the file that does not belong")
                self.tensors[name] = info
        if not self.tensors:
            raise CheckpointError(f"{self.path}: no *.safetensors files; point the model directory at {EXAMPLE}")
        if not any(name.endswith(".trellis") for name in self.tensors):
            raise CheckpointError(f"{self.path}: not quantised to EXL3 (no trellis tensors); use {EXAMPLE}")

    def _verify(self, kernels: _Kernels, mtp: bool) -> None:
        known = self._check_all(expected(self.config), kernels)
        if mtp:
            self._verify_mtp()
        for name, info in self.tensors.items():
            if name not in known and not unused(name, self.config):
                raise CheckpointError(f"{info.file}: {name}: unknown tensor, not part of GLM-5.3-Flash")

    def _check_all(self, items: Iterable[Plain | Linear], kernels: _Kernels) -> set[str]:
        """Check every tensor of `items`; returns their names."""
        known: set[str] = set()
        for item in items:
            if isinstance(item, Plain):
                info = self._check(item.name, _FLOATS, None if item.flat else item.shape)
                if item.flat and [n for n in info.shape if n != 1] != [n for n in item.shape if n != 1]:
                    raise _wrong_shape(info, item.shape)
                known.add(item.name)
            else:
                known.update(self._check_linear(item, kernels))
        return known

    def _verify_mtp(self) -> None:
        layers = self.config.mtp_layers
        if not layers:
            raise CheckpointError(
                f"{self.path}: no MTP layer (num_nextn_predict_layers is 0 in config.json), so nothing can be drafted; "
                "leave --mtp out"
            )
        first = f"{BASE}.layers.{layers[0]}."
        if not any(name.startswith(first) for name in self.tensors):
            raise CheckpointError(
                f"{self.path}: config.json names an MTP layer, but no file here holds a tensor {first}*; download the "
                "checkpoint's MTP file (mtp.safetensors) too, or leave --mtp out"
            )
        self._check_all(expected_mtp(self.config), _Kernels((*MARKERS, "3inst"), tuple(range(1, 9))))

    def _check(self, name: str, dtypes: tuple[str, ...], shape: tuple[int, ...] | None) -> TensorInfo:
        info = self.tensors.get(name)
        if info is None:
            files = ", ".join(sorted(p.name for p in self._files))
            raise CheckpointError(f"{self.path}: {name}: missing (looked in {files}); download the checkpoint again")
        if info.dtype not in dtypes:
            raise CheckpointError(f"{info.file}: {name}: dtype {info.dtype}, need {' or '.join(dtypes)}")
        if shape is not None and info.shape != shape:
            raise _wrong_shape(info, shape)
        return info

    def _check_linear(self, linear: Linear, kernels: _Kernels) -> list[str]:
        key, k, n = linear.key, _pad(linear.in_features), _pad(linear.out_features)
        trellis = self._check(f"{key}.trellis", ("I16",), None)
        if len(trellis.shape) != 3 or trellis.shape[:2] != (k // 16, n // 16):
            raise CheckpointError(
                f"{trellis.file}: {key}.trellis: shape {list(trellis.shape)}, need [{k // 16}, {n // 16}, 16 * K]"
            )
        bits = trellis.shape[2] / 16
        used = [f"{key}.trellis"]
        for name, legacy, size in (("suh", "su", k), ("svh", "sv", n)):
            if f"{key}.{name}" in self.tensors or f"{key}.{legacy}" not in self.tensors:
                self._check(f"{key}.{name}", ("F16",), (size,))
                used.append(f"{key}.{name}")
            else:
                self._check(f"{key}.{legacy}", ("I16",), (size // 16,))
                used.append(f"{key}.{legacy}")
        codebook = self._codebook(key, trellis)
        if codebook != "3inst":
            used.append(f"{key}.{codebook}")
        self._check_rate(linear, trellis, codebook, kernels)
        self._linears[key] = (linear, bits, codebook)
        return used

    def _codebook(self, key: str, trellis: TensorInfo) -> str:
        found = [name for name in MARKERS if f"{key}.{name}" in self.tensors]
        if len(found) > 1:
            raise CheckpointError(f"{trellis.file}: {key}: marked as both {' and '.join(found)}")
        for name in found:
            info = self._check(f"{key}.{name}", ("I32",), ())
            value = int(self.read(info.name).view(np.uint32)[()])
            if value != MARKERS[name]:
                raise CheckpointError(
                    f"{info.file}: {info.name}: codebook {value:#010x}, need {MARKERS[name]:#010x} for {name}"
                )
        return found[0] if found else "3inst"

    def _check_rate(self, linear: Linear, trellis: TensorInfo, codebook: str, kernels: _Kernels) -> None:
        bits = trellis.shape[2] / 16
        where = f"{trellis.file}: {trellis.name}"
        whole = bits.is_integer() and 1 <= bits <= 8
        if not whole and bits not in _HALF_BITS:
            raise CheckpointError(f"{where}: {bits:g} bits per weight is not an EXL3 rate (1..8, 1.5, 2.5, 3.5)")
        if not whole and codebook != "mul1":
            raise CheckpointError(f"{where}: {bits:g} bits per weight exists with codebook mul1 only, found {codebook}")
        if not linear.expert:
            return
        if bits not in kernels.bits:
            raise CheckpointError(
                f"{where}: routed experts at {bits:g} bits per weight are not supported "
                f"({', '.join(map(str, kernels.bits))} are); use {EXAMPLE}"
            )
        if codebook not in kernels.codebooks:
            raise CheckpointError(
                f"{where}: routed experts with codebook {codebook} are not supported "
                f"({', '.join(kernels.codebooks)} is); use {EXAMPLE}"
            )

    def read(self, name: str) -> npt.NDArray[Any]:
        """One tensor as stored; BF16 comes as its uint16 bits."""
        info = self.tensors[name]
        out = np.empty(info.shape, _NUMPY[info.dtype])
        if info.nbytes:
            self.read_into(info, out.reshape(-1).view(np.uint8).data)
        return out

    def read_into(self, info: TensorInfo, buffer: memoryview) -> None:
        """Read one tensor's bytes straight into a writable byte buffer of exactly its size."""
        self._files[info.file].read_into(info, buffer)

    def file_version(self, file: Path) -> tuple[int, int]:
        """(st_size, st_mtime_ns) a file had at `open`: what a reader of its own must find."""
        return self._files[file].version

    def f32(self, name: str) -> F32:
        """One plain tensor widened to float32."""
        raw = self.read(name)
        if self.tensors[name].dtype == "BF16":
            return (raw.astype(np.uint32) << 16).view(np.float32)
        return raw.astype(np.float32)

    def linear(self, key: str) -> Exl3Linear:
        """One EXL3 linear; legacy sign words are turned into suh / svh."""
        spec, bits, codebook = self._linears[key]
        return Exl3Linear(
            key, spec.in_features, spec.out_features, bits, codebook,
            self.read(f"{key}.trellis"), self._scales(key, "suh", "su"), self._scales(key, "svh", "sv"),
        )  # fmt: skip

    def _scales(self, key: str, name: str, legacy: str) -> npt.NDArray[np.float16]:
        if f"{key}.{name}" in self.tensors:
            return self.read(f"{key}.{name}")
        words = self.read(f"{key}.{legacy}").view(np.uint16)
        bits = (words[:, None] >> np.arange(16, dtype=np.uint16)) & 1
        return (1.0 - 2.0 * bits.reshape(-1)).astype(np.float16)

    def experts(self, layer: int) -> list[ExpertLinear]:
        """The routed experts' linears of one MoE layer with their file offsets, in (expert, gate/up/down) order."""
        out = []
        for expert in range(self.config.n_routed_experts):
            for which in EXPERT_LINEARS:
                key = expert_key(layer, expert, which)
                _, bits, codebook = self._linears[key]
                parts = [self.tensors.get(f"{key}.{n}") for n in ("trellis", "suh", "svh")]
                trellis, suh, svh = parts
                if trellis is None or suh is None or svh is None:
                    raise CheckpointError(f"{self.path}: {key}: legacy sign words are not supported for routed experts")
                out.append(ExpertLinear(expert, which, int(bits), codebook, trellis, suh, svh))
        return out

    def verify_unchanged(self) -> None:
        """Raise CheckpointError if any file was replaced or written since `open`; call it after the last read."""
        for f in self._files.values():
            f.verify_unchanged()

    def close(self) -> None:
        """Release the files; idempotent."""
        for f in self._files.values():
            f.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _wrong_shape(info: TensorInfo, shape: tuple[int, ...]) -> CheckpointError:
    return CheckpointError(f"{info.file}: {info.name}: shape {list(info.shape)}, need {list(shape)}")


def _require_folder(model_dir: Path) -> None:
    try:
        names = [p.name for p in model_dir.iterdir()] if model_dir.is_dir() else []
        exists = model_dir.exists()
    except OSError as e:
        raise CheckpointError(f"{model_dir}: cannot be read ({e.strerror}); give this user access to it") from e
    if not exists:
        raise CheckpointError(f"{model_dir}: no such directory; point the model directory at {EXAMPLE}")
    if not model_dir.is_dir():
        hint = "GGUF files are not supported" if model_dir.suffix == ".gguf" else "give the folder, not a file"
        raise CheckpointError(f"{model_dir}: not a directory ({hint}); use {EXAMPLE}")
    if not names:
        raise CheckpointError(f"{model_dir}: empty directory; download {EXAMPLE} into it")
    if any(n.endswith(".gguf") for n in names) and not any(n.endswith(".safetensors") for n in names):
        raise CheckpointError(f"{model_dir}: a GGUF checkpoint, which is not supported; use {EXAMPLE}")
