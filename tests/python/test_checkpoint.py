"""The strict reader: what it reads, its configuration, and the check of RAM."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from checkpoint_files import Tensors, edit, read_file, refuse, write_file
from cpu_engine_helpers import BUNDLED, checkpoint_dir, golden_dir
from tiny_checkpoint import TINY, WEIGHTS

from glm53.checkpoint import Checkpoint, ModelConfig, available_ram, require_ram
from glm53.errors import CheckpointError, ResourceError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A private copy of a good checkpoint."""
    return Path(shutil.copytree(golden_dir(), tmp_path / "model"))


@pytest.fixture
def weights(folder: Path) -> Path:
    return folder / "model.safetensors"


def test_reads_what_safetensors_reads(weights: Path) -> None:
    from safetensors.numpy import load_file

    plain = {n: t for n, t in read_file(weights).items() if t[0] != "BF16"}
    write = weights.parent / "plain.st"
    write_file(write, plain)
    reference = load_file(write)
    with Checkpoint.open(weights.parent) as ck:
        for name in reference:
            assert np.array_equal(ck.read(name), reference[name]), name
        ck.verify_unchanged()


def test_bf16_and_f16_widen_exactly(folder: Path) -> None:
    import torch
    from safetensors.torch import load_file

    reference = load_file(folder / "model.safetensors")
    with Checkpoint.open(folder) as ck:
        for name in ("model.language_model.norm.weight", "model.language_model.layers.1.mlp.gate.weight"):
            assert torch.equal(torch.from_numpy(ck.f32(name)), reference[name].float())


def test_files_outside_the_index_are_read(folder: Path, weights: Path) -> None:
    tensors = read_file(weights)
    aux = {n: tensors.pop(n) for n in list(tensors) if "kpool" in n}
    assert aux
    write_file(weights, tensors)
    write_file(folder / "kpool_aux.safetensors", aux)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(tensors, weights.name)})
    )
    Checkpoint.open(folder).close()


def test_vision_and_mtp_tensors_are_known(weights: Path) -> None:
    edit(weights, lambda t: t.update({"model.visual.patch_embed.weight": ("F16", [2], b"abcd")}))
    Checkpoint.open(weights.parent).close()
    with Checkpoint.open(checkpoint_dir(esb=1.0, mtp=1)) as ck:
        assert ck.config.num_nextn_predict_layers == 1


def test_mtp_layers_are_verified_when_they_are_wanted(tmp_path: Path) -> None:
    with Checkpoint.open(checkpoint_dir(esb=1.0, mtp=1), mtp=True) as ck:
        (layer,) = ck.config.mtp_layers
        assert layer == ck.config.num_hidden_layers
        experts = ck.experts(layer)
        assert len(experts) == 3 * ck.config.n_routed_experts
        assert {x.bits for x in experts} == {4}
    folder = Path(shutil.copytree(checkpoint_dir(esb=1.0, mtp=1), tmp_path / "model"))
    whole, prefix = read_file(folder / "model.safetensors"), f"model.language_model.layers.{layer}."

    def refused(change: Callable[[Tensors], None], *parts: str) -> None:
        tensors = dict(whole)
        change(tensors)
        write_file(folder / "model.safetensors", tensors)
        Checkpoint.open(folder).close()
        with pytest.raises(CheckpointError) as caught:
            Checkpoint.open(folder, mtp=True)
        assert "\n" not in str(caught.value)
        for part in parts:
            assert part in str(caught.value), str(caught.value)

    refused(
        lambda t: [t.pop(n) for n in whole if n.startswith(prefix)], "names an MTP layer", "mtp.safetensors", prefix
    )
    for name in ("eh_proj.trellis", "shared_head.norm.weight", "mlp.experts.3.down_proj.suh", "enorm.weight"):
        refused(lambda t, name=name: t.pop(prefix + name) and None, prefix + name, "missing")
    refused(lambda t: t.update({prefix + "hnorm.weight": ("F16", [2], b"abcd")}), prefix + "hnorm.weight", "shape [2]")


def test_a_checkpoint_without_mtp_layer_says_so() -> None:
    with pytest.raises(CheckpointError, match=r"no MTP layer .*leave --mtp out"):
        Checkpoint.open(golden_dir(), mtp=True)


def test_expert_offsets_point_at_the_bytes(folder: Path) -> None:
    with Checkpoint.open(folder) as ck:
        linears = ck.experts(1)
        assert [(x.expert, x.which) for x in linears[:4]] == [(0, "gate"), (0, "up"), (0, "down"), (1, "gate")]
        assert len(linears) == 3 * ck.config.n_routed_experts
        x = linears[10]
        raw = x.trellis.file.read_bytes()[x.trellis.offset : x.trellis.offset + x.trellis.nbytes]
        assert raw == ck.read(x.trellis.name).tobytes()
        assert (x.bits, x.codebook) == (3, "mul1")


def test_axes_of_length_one_around_the_kda_decay_are_accepted(weights: Path) -> None:
    name = "model.language_model.layers.0.self_attn.A_log"
    edit(weights, lambda t: t.update({name: (t[name][0], [1, 1, 4, 1], t[name][2])}))
    Checkpoint.open(weights.parent).close()
    edit(weights, lambda t: t.update({name: (t[name][0], [2, 2], t[name][2])}))
    refuse(weights.parent, name, "shape [2, 2], need [4]")


def test_legacy_sign_words_become_scales(weights: Path) -> None:
    key = "model.language_model.layers.0.mlp.up_proj"
    bits = np.random.default_rng(0).integers(0, 2, 256)

    def change(t: Tensors) -> None:
        del t[f"{key}.suh"]
        words = (bits.reshape(16, 16) << np.arange(16)).sum(1).astype(np.uint16)
        t[f"{key}.su"] = ("I16", [16], words.tobytes())

    edit(weights, change)
    with Checkpoint.open(weights.parent) as ck:
        assert np.array_equal(ck.linear(key).suh, 1.0 - 2.0 * bits)


# ---------------------------------------------------------------- folders


def test_wrong_paths_say_what_to_do(tmp_path: Path) -> None:
    refuse(tmp_path / "nowhere", "no such directory", "nowhere", "turboderp/GLM-5.3-Flash-exl3")
    refuse(tmp_path, "empty directory", "download")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refuse(tmp_path, "GGUF", "not supported")
    refuse(tmp_path / "model.gguf", "not a directory", "GGUF")


def test_no_weights_and_no_config(folder: Path, weights: Path) -> None:
    weights.unlink()
    refuse(folder, "no *.safetensors")
    (folder / "config.json").unlink()
    refuse(folder, "no config.json")


def test_a_plain_checkpoint_is_refused(folder: Path, weights: Path) -> None:
    edit(weights, lambda t: [t.pop(n) for n in list(t) if n.split(".")[-1] in ("trellis", "suh", "svh", "mul1")])
    refuse(folder, "not quantised to EXL3", "turboderp/GLM-5.3-Flash-exl3")


@pytest.mark.parametrize(
    ("text", "part"),
    [("{", "not readable JSON"), ("[]", "not a JSON object"), ('{"model_type": "llama"}', "model_type is 'llama'"),
     ('{"model_type": "glm5_next"}', "text_config is None"), ("[" * 100_000, "not readable JSON")],
)  # fmt: skip
def test_bad_config_json(folder: Path, text: str, part: str) -> None:
    (folder / "config.json").write_text(text)
    refuse(folder, "config.json", part)


@pytest.mark.parametrize(
    ("name", "value", "part"),
    [
        ("hidden_size", "big", "text_config.hidden_size is 'big'"),
        ("hidden_size", 250, "multiple of 128"),
        ("num_hidden_layers", 0, "num_hidden_layers is 0"),
        ("layer_types", ["linear_attention"], "layer_types"),
        ("layer_types", ["mamba"] * 5, "layer_types"),
        ("n_group", 2, "n_group is 2, need 1"),
        ("scoring_func", "softmax", "scoring_func is 'softmax'"),
        ("index_topk", 63, "multiple of 4"),
        ("indexer_types", ["shared"] * 5, "indexer_types"),
        ("eos_token_id", "x", "eos_token_id"),
        ("linear_attn_config", {"num_heads": 4}, "linear_attn_config.head_dim"),
        ("layer_types", [[]] * 5, "layer_types"),
        ("layer_types", ["x" * 10_000] * 5, "layer_types"),
        ("indexer_types", 7, "indexer_types is 7"),
        ("rms_norm_eps", math.nan, "rms_norm_eps is nan, need a positive number"),
        ("rms_norm_eps", 0, "rms_norm_eps is 0"),
        ("swiglu_limit", math.inf, "swiglu_limit is inf"),
        ("routed_scaling_factor", 10**400, "routed_scaling_factor is 1000"),
        ("max_position_embeddings", 10**30, "and <= 2147483647"),
        ("hc_sinkhorn_iters", 10**6, "hc_sinkhorn_iters is 1000000, need an integer >= 1 and <= 1000"),
        ("norm_topk_prob", "false", "norm_topk_prob is 'false', need true or false"),
        ("eos_token_id", [True], "eos_token_id"),
    ],
)
def test_bad_fields_are_named(folder: Path, name: str, value: object, part: str) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"][name] = value
    (folder / "config.json").write_text(json.dumps(config))
    refuse(folder, "config.json", part)


@pytest.mark.parametrize("value", [0, 5.0])
def test_a_kda_decay_without_a_lower_bound_is_refused(folder: Path, value: float) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["linear_attn_config"]["gate_lower_bound"] = value
    (folder / "config.json").write_text(json.dumps(config))
    refuse(folder, f"linear_attn_config.gate_lower_bound is {value}, need a negative number")


def test_the_checkpoint_that_tests_make_is_the_one_that_stock_answered_with() -> None:
    """Fails where torch draws other numbers from the same seed: recorded answers then say nothing, all else does."""
    assert hashlib.sha256((TINY / "model.safetensors").read_bytes()).hexdigest() == WEIGHTS


def test_config_of_the_bundled_checkpoint() -> None:
    c = ModelConfig.load(BUNDLED)
    assert len(c.layer_types) == len(c.mlp_layer_types) == c.num_hidden_layers
    assert c.moe_layers and c.kda_dim == c.kda_num_heads * c.kda_head_dim
    assert "indexed_attention" in c.layer_types


# ---------------------------------------------------------------- memory


def test_ram_check_names_both_numbers() -> None:
    require_ram(5 << 30, "loading x", available=6 << 30)
    with pytest.raises(ResourceError, match=r"loading x needs 7\.0 GiB of RAM, 6\.0 GiB are available"):
        require_ram(7 << 30, "loading x", available=6 << 30)


def test_available_ram_knows_the_limit_of_the_process() -> None:
    code = (
        "import resource\n"
        "from glm53.checkpoint import available_ram\n"
        "free = available_ram()\n"
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20),) * 2)\n"
        "assert free > 64 << 20 >= available_ram(), (free, available_ram())\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_available_ram_is_the_least_of_machine_and_cgroups(tmp_path: Path) -> None:
    proc, cgroup = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (cgroup / "a/b").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemAvailable:   50 kB\n")
    (proc / "self/cgroup").write_text("0::/a/b\n")
    assert available_ram(proc, cgroup) == 50 * 1024
    (cgroup / "a/b/memory.max").write_text("max\n")
    (cgroup / "a/b/memory.current").write_text("7\n")
    (cgroup / "a/memory.max").write_text("30000\n")
    (cgroup / "a/memory.current").write_text("10000\n")
    (cgroup / "a/memory.stat").write_text("anon 5\ninactive_file 1000\nactive_file 2000\n")
    assert available_ram(proc, cgroup) == 23000
    (proc / "meminfo").unlink()
    (proc / "self/cgroup").unlink()
    assert available_ram(proc, cgroup) is None
    assert (available_ram() or 1) > 0
