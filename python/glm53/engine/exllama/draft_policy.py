"""Decides whether drafting pays: tokens a second with and without it, in alternating windows of decode steps.

States, for every number of streams that decode together: measuring (two pairs of windows, without and with drafts) ->
on or off, which holds for `again` steps -> measuring. A lost measurement doubles the time until the next one, a won one
starts it over. Costs: integers and one division a step; a measurement spends half its steps in the slower way.
"""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_ROWS = 8
"""Rows (streams x (drafted + 1)) that exllamav3's decode kernels and the expert cache take in one step."""


def draft_length(streams: int, wanted: int) -> int:
    """Tokens to draft for each of `streams`: what was asked for, as far as one decode step can verify it."""
    return max(0, min(wanted, MAX_ROWS // streams - 1)) if streams else 0


@dataclass(frozen=True, slots=True)
class PolicySettings:
    """Steps of a window; steps left out after each change (kernels warm up there); pairs of windows a measurement
    takes; gain that switches drafting on; steps until the next measurement, at first and at most."""

    window: int = 48
    skip: int = 3
    pairs: int = 2
    margin: float = 0.03
    again: int = 4096
    again_most: int = 65536


@dataclass(slots=True)
class _Track:
    """What is known for one number of streams. `tokens` and `seconds`: (without, with) drafts, this measurement's."""

    tokens: list[int] = field(default_factory=lambda: [0, 0])
    seconds: list[float] = field(default_factory=lambda: [0.0, 0.0])
    measuring: bool = True
    on: bool = False
    gain: float | None = None
    windows: int = 0
    steps: int = 0
    again: int = 0


class DraftPolicy:
    """Call `want` before a step and `observe` after it. One thread."""

    def __init__(self, settings: PolicySettings | None = None) -> None:
        self._settings = settings or PolicySettings()
        self._tracks: dict[int, _Track] = {}
        self._last: tuple[int, bool] | None = None
        self._to_skip = 0

    def want(self, streams: int) -> bool:
        """Whether the next step of `streams` streams is to draft."""
        track = self._track(streams)
        return bool(track.windows % 2) if track.measuring else track.on

    def observe(self, streams: int, drafted: bool, tokens: int, seconds: float) -> None:
        """One decode step of `streams` streams that did nothing else gave `tokens` tokens in `seconds`.

        A step that went the other way than asked (no draft could be made) counts for nothing.
        """
        wanted = self.want(streams)
        if self._last != (streams, drafted):
            self._last, self._to_skip = (streams, drafted), self._settings.skip
        if drafted != wanted:
            return
        if self._to_skip:
            self._to_skip -= 1
            return
        track = self._track(streams)
        track.steps += 1
        if not track.measuring:
            if track.steps >= track.again:
                track.tokens, track.seconds = [0, 0], [0.0, 0.0]
                track.measuring, track.windows, track.steps = True, 0, 0
            return
        track.tokens[drafted] += tokens
        track.seconds[drafted] += seconds
        if track.steps >= self._settings.window:
            track.steps, track.windows = 0, track.windows + 1
            if track.windows >= 2 * self._settings.pairs:
                self._decide(track)

    def _track(self, streams: int) -> _Track:
        return self._tracks.setdefault(streams, _Track(again=self._settings.again))

    def _decide(self, track: _Track) -> None:
        """On from 1 + margin times the speed, off below 1; between them as it was."""
        s = self._settings
        plain, drafting = (t / max(x, 1e-9) for t, x in zip(track.tokens, track.seconds, strict=True))
        track.gain = drafting / max(plain, 1e-9)
        track.on = track.gain >= (1.0 if track.on else 1.0 + s.margin)
        track.again = s.again if track.on else min(2 * track.again, s.again_most)
        track.measuring, track.windows, track.steps = False, 0, 0

    @property
    def lost(self) -> bool:
        """Every number of streams seen was measured, and drafting is off for all of them."""
        return bool(self._tracks) and not any(t.measuring or t.on for t in self._tracks.values())

    def start_over(self) -> None:
        """Forget all decisions: measure again."""
        self._tracks.clear()
        self._last = None

    def states(self) -> dict[str, dict[str, object]]:
        """By number of streams: measuring, on or off, and the last measured speed with drafts over without."""
        return {
            str(n): {
                "state": "measuring" if t.measuring else "on" if t.on else "off",
                "speedup": None if t.gain is None else round(t.gain, 3),
            }
            for n, t in sorted(self._tracks.items())
        }
