"""The embedding that the GPU reads in host memory: page-locked once, looked up where the ids are, let go in the end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from exllama_helpers import make_settings, use_fakes
from tiny_checkpoint import TINY

from glm53 import hooks
from glm53.engine.exllama import loader
from glm53.engine.exllama.token_table import TokenTable, plain_rows


class Embedding:
    """What exllamav3's keeps, and what it does with ids; its device is the CPU."""

    def __init__(self, rows: torch.Tensor, **changes: Any) -> None:
        self.embedding, self.normalize, self.multiplier = SimpleNamespace(weight=rows), False, 1.0
        self.out_dtype, self.looked_up = torch.float, 0
        vars(self).update(changes)

    def __iter__(self) -> Iterator[Any]:
        yield self

    def prepare_for_device(self, x: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        return x.to("cpu")

    def forward(self, x: torch.Tensor, params: dict[str, Any], out_dtype: Any = None) -> torch.Tensor:
        self.looked_up += 1
        return self.embedding.weight[x].to(self.out_dtype)


@pytest.fixture
def locked(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Page-locked ranges by address; `status` is what the next registration gives."""
    use_fakes(monkeypatch)
    from exllamav3.ext import exllamav3_ext

    driver = SimpleNamespace(ranges={}, status=0)

    def register(address: int, size: int, flags: int) -> int:
        if driver.status == 0:
            driver.ranges[address] = (size, flags)
        return int(driver.status)

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=driver.ranges.pop)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(exllamav3_ext, "pinned_cuda_view", lambda host, gpu: host.to("meta"), raising=False)
    return driver


def rows(count: int = 11) -> torch.Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(1)).half()


def test_a_table_is_page_locked_whole_until_it_is_closed(locked: Any) -> None:
    weight = rows()
    table = TokenTable.open(SimpleNamespace(modules=[Embedding(weight)]), 0)
    assert table is not None
    assert locked.ranges == {weight.data_ptr(): (11 * 8 * 2, 3)}
    found = table(torch.zeros((2, 1), dtype=torch.long, device="meta"))
    assert (found.shape, found.dtype, found.device.type) == ((2, 1, 8), torch.float, "meta")
    table.close()
    table.close()
    assert locked.ranges == {}


def test_rows_are_those_the_embedding_gives() -> None:
    weight, ids = rows(), torch.tensor([[3], [10]])
    assert torch.equal(TokenTable(weight, weight, torch.float)(ids), Embedding(weight).forward(ids, {}))


def test_where_it_cannot_be_page_locked_steps_wait_for_the_host_and_the_log_says_so(
    locked: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reported = []

    def launch(*args: Any, **kwargs: Any) -> None:
        reported.append(kwargs)
        raise RuntimeError("CUDA error: out of memory")

    locked.status = 2
    module = Embedding(rows())
    monkeypatch.setattr(torch, "ones", launch)
    assert TokenTable.open(SimpleNamespace(modules=[module]), 0) is None
    assert reported == [{"device": "cuda:0"}]  # else the next kernel of the model would fail with it
    assert "decode steps wait for the host: the embedding (0.0 GB) was not page-locked: CUDA error 2" in caplog.text


def test_a_table_that_the_gpu_cannot_see_is_let_go(
    locked: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from exllamav3.ext import exllamav3_ext

    def refused(host: torch.Tensor, gpu: int) -> None:
        raise RuntimeError("pinned_cuda_view: tensor must be pinned")

    monkeypatch.setattr(exllamav3_ext, "pinned_cuda_view", refused)
    assert TokenTable.open(SimpleNamespace(modules=[Embedding(rows())]), 0) is None
    assert locked.ranges == {}
    assert "was not page-locked: pinned_cuda_view: tensor must be pinned" in caplog.text


@pytest.mark.parametrize(
    "changes", [{"normalize": True}, {"multiplier": 2.0}, {"out_dtype": None}, {"embedding": None}], ids=str
)
def test_embeddings_that_do_more_than_look_up_are_left_alone(locked: Any, changes: dict[str, Any]) -> None:
    assert TokenTable.open(SimpleNamespace(modules=[Embedding(rows(), **changes)]), 0) is None
    assert locked.ranges == {}
    assert plain_rows(Embedding(rows().t())) is None
    assert plain_rows(Embedding(rows().to("meta"))) is None


def test_ids_on_the_gpu_are_looked_up_there_and_others_as_ever(locked: Any) -> None:
    exllamav3 = hooks.import_exllamav3()
    model = exllamav3.Model.from_config(exllamav3.Config.from_directory(str(TINY)))
    embedding = Embedding(rows())
    model.modules = [embedding]
    table = TokenTable.open(model, 0)
    patch = hooks.Patch(model, [], lambda *a: None, lambda *a: None, lookup=table)  # type: ignore[arg-type]
    patch.install()
    there, here = torch.zeros((2, 1), dtype=torch.long, device="meta"), torch.tensor([[3]])
    assert embedding.prepare_for_device(there, {}) is there
    assert embedding.forward(there, {}).device.type == "meta"
    assert embedding.looked_up == 0
    assert torch.equal(embedding.forward(embedding.prepare_for_device(here, {}), {}), embedding.embedding.weight[here])
    assert embedding.looked_up == 1
    patch.undo()
    assert embedding.prepare_for_device(here, {}) is here
    assert not {"forward", "prepare_for_device"} & set(vars(embedding))


class Lookup:
    """Stands for a table; closed: how often."""

    closed = 0

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError("no ids are on a GPU here")

    def close(self) -> None:
        self.closed += 1


@pytest.mark.parametrize("fails", [False, True])
def test_a_load_keeps_a_table_until_it_is_closed_or_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fails: bool
) -> None:
    use_fakes(monkeypatch)
    opened: list[Lookup] = []

    def open_table(model: Any, gpu: int) -> Lookup:
        opened.append(Lookup())
        return opened[-1]

    monkeypatch.setattr(loader.TokenTable, "open", open_table)
    if fails:
        monkeypatch.setattr(loader.Patch, "install", lambda self: pytest.fail("no"))
    settings = make_settings(tmp_path)
    try:
        loaded = loader.load(settings, lambda stage, fraction: None, loader.LoadOptions(max_slots=6))
    except pytest.fail.Exception:
        assert fails
    else:
        assert loaded.tokens is opened[0]
        assert opened[0].closed == 0
        loaded.close()
    assert [table.closed for table in opened] == [1]
    if not fails:
        loaded = loader.load(settings, lambda stage, fraction: None, loader.LoadOptions(max_slots=6, run_ahead=False))
        assert (loaded.tokens, len(opened)) == (None, 1)
        loaded.close()


@pytest.mark.parametrize("on", [False, True])
def test_a_server_runs_ahead_where_the_setting_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    asked: list[loader.LoadOptions] = []
    monkeypatch.setattr(loader, "_load", lambda settings, progress, options: asked.append(options))
    settings = make_settings(tmp_path)
    assert not settings.run_ahead
    loader.load(replace(settings, run_ahead=on), lambda stage, fraction: None)
    loader.load(settings, lambda stage, fraction: None, loader.LoadOptions())
    assert [options.run_ahead for options in asked] == [on, True]
