"""PrefixCache and the states in it: what is found, what goes first, and that entries stay as they were stored."""

from __future__ import annotations

import functools

from cpu_engine_helpers import golden_dir

from glm53.checkpoint import ModelConfig
from glm53.engine.cpu.prefix import PrefixCache
from glm53.engine.cpu.state import KdaState, MlaState, StreamState


@functools.cache
def config() -> ModelConfig:
    return ModelConfig.load(golden_dir())


def after(ids: list[int], mark: float = 0.0) -> StreamState:
    """A state of `ids`, fed; `mark` in its first KDA layer."""
    state = StreamState(config())
    state.length = len(ids)
    kda(state).recurrent.fill_(mark)
    return state


def kda(state: StreamState) -> KdaState:
    return next(x for x in state.layers if isinstance(x, KdaState))


def found(cache: PrefixCache, ids: list[int]) -> int | None:
    """Tokens of the prefix that is found."""
    state = cache.find(ids)
    return None if state is None else state.length


def test_the_longest_prefix_that_leaves_a_token_to_compute() -> None:
    cache = PrefixCache(1 << 30)
    for ids in ([1, 2], [1, 2, 3, 4], [1, 2, 9, 9, 9]):
        cache.store(ids, after(ids))
    assert found(cache, [1, 2, 3, 4, 5]) == 4
    assert found(cache, [1, 2, 3, 4]) == 2, "the model must be asked for what follows the last token"
    assert found(cache, [1, 2]) is None
    assert found(cache, [3, 1, 2]) is None
    assert (cache.hits, cache.misses) == (2, 2)


def test_what_was_not_used_longest_goes_first() -> None:
    one = PrefixCache(1 << 30)
    one.store([1], after([1]))
    cache = PrefixCache(2 * one.nbytes)
    for first in (1, 2):
        cache.store([first], after([first]))
    assert found(cache, [1, 7]) == 1
    cache.store([3], after([3]))
    assert [found(cache, [first, 7]) for first in (1, 2, 3)] == [1, None, 1]
    cache.store([1], after([1]))  # what is known already counts as used too
    cache.store([4], after([4]))
    assert [found(cache, [first, 7]) for first in (1, 3, 4)] == [1, None, 1]
    assert cache.evictions == 2
    assert cache.nbytes == 2 * one.nbytes


def test_an_entry_does_not_change_with_the_stream_nor_with_who_resumes_it() -> None:
    cache, state = PrefixCache(1 << 30), after([1, 2], 0.5)
    cache.store([1, 2, 3], state)
    kda(state).recurrent.fill_(7.0)
    state.length = 3
    for _ in range(2):
        resumed = cache.find([1, 2, 3])
        assert resumed is not None
        assert (resumed.length, float(kda(resumed).recurrent.max())) == (2, 0.5)
        kda(resumed).recurrent.fill_(9.0)


def test_a_buffer_that_grows_keeps_its_rows_and_leaves_the_old_one_as_it_was() -> None:
    state = MlaState(config(), 8)
    state.pools_done = 1
    for name in ("latent", "keys", "pools"):
        getattr(state, name).fill_(3.0)
    before = state.latent
    state.reserve(8, used=8)
    assert state.latent is before
    state.reserve(9, used=8)
    assert state.latent.shape[0] == 16
    assert bool((state.latent[:8] == 3.0).all()) and bool((state.keys[:8] == 3.0).all())
    assert bool((state.pools[:1] == 3.0).all())
    state.latent.fill_(9.0)
    assert bool((before == 3.0).all())


def test_a_budget_of_nothing_keeps_nothing() -> None:
    cache = PrefixCache(0)
    cache.store([1], after([1]))
    assert len(cache) == 0
