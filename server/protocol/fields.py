"""Typed reading of optional JSON fields. null is the same as absent; every refusal names the field."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from glm53.chat.messages import type_name
from glm53.errors import RequestError


def refuse(param: str, message: str, code: str = "invalid_value") -> NoReturn:
    """Raise RequestError for `param`."""
    raise RequestError(message, param=param, code=code)


def wrong_type(param: str, expected: str, got: object) -> NoReturn:
    """Raise RequestError for a value of another JSON type."""
    refuse(param, f"Invalid type for '{param}': expected {expected}, but got {type_name(got)} instead.", "invalid_type")


def missing(param: str) -> NoReturn:
    """Raise RequestError for a required field."""
    refuse(param, f"Missing required parameter: '{param}'.", "missing_required_parameter")


def as_int(value: object, param: str, low: int | None = None, high: int | None = None) -> int:
    """An integer; 5.0 counts as 5."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        wrong_type(param, "an integer", value)
    check_range(value, param, low, high, "integer")
    return value


def check_range(value: float, param: str, low: float | None, high: float | None, kind: str) -> None:
    """Raise RequestError unless low <= value <= high."""
    if low is not None and value < low:
        message = f"Invalid '{param}': {kind} below minimum value. Expected a value >= {low}, but got {value} instead."
        refuse(param, message, f"{kind}_below_min_value")
    if high is not None and value > high:
        message = f"Invalid '{param}': {kind} above maximum value. Expected a value <= {high}, but got {value} instead."
        refuse(param, message, f"{kind}_above_max_value")


class Fields:
    """One JSON object of a request; `prefix` is put before names in errors ("sampling_params.")."""

    def __init__(self, raw: Mapping[str, Any], prefix: str = "") -> None:
        self.raw = raw
        self._prefix = prefix

    def name(self, key: str) -> str:
        """The field as errors call it."""
        return self._prefix + key

    def get(self, key: str) -> Any:
        """The raw value; None if absent."""
        return self.raw.get(key)

    def given(self, *keys: str) -> str | None:
        """The first of `keys` that is present and not null."""
        return next((k for k in keys if self.raw.get(k) is not None), None)

    def number(self, key: str, default: float, low: float | None = None, high: float | None = None) -> float:
        """A number within [low, high]."""
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            wrong_type(self.name(key), "a number", value)
        check_range(value, self.name(key), low, high, "decimal")
        return float(value)

    def integer(self, key: str, low: int | None = None, high: int | None = None) -> int | None:
        """An integer within [low, high], or None."""
        value = self.get(key)
        return None if value is None else as_int(value, self.name(key), low, high)

    def boolean(self, key: str, default: bool = False) -> bool:
        """true or false; no other value stands for them."""
        value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            wrong_type(self.name(key), "a boolean", value)
        return value

    def text(self, key: str) -> str | None:
        """A string, or None."""
        value = self.get(key)
        if value is not None and not isinstance(value, str):
            wrong_type(self.name(key), "a string", value)
        return value

    def choice(self, key: str, choices: Sequence[str]) -> str | None:
        """One of `choices`, in any case, or None."""
        value = self.text(key)
        if value is None:
            return None
        if value.lower() not in choices:
            supported = ", ".join(f"'{c}'" for c in choices)
            message = f"Invalid value for '{self.name(key)}'. Supported values are: {supported}."
            refuse(self.name(key), message)
        return value.lower()

    def fields(self, key: str) -> Fields:
        """An object; empty if absent."""
        value = self.get(key)
        if value is None:
            value = {}
        if not isinstance(value, dict):
            wrong_type(self.name(key), "an object", value)
        return Fields(value, f"{self.name(key)}.")
