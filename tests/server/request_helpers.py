"""Request bodies as calls, or as the one line that refuses them, for the tests of parsers."""

from __future__ import annotations

from typing import Any

import pytest

from glm53.errors import RequestError
from glm53.server.protocol.requests import (
    ChatCall,
    RequestDefaults,
    parse_chat,
)

DEFAULTS = RequestDefaults(vocab_size=2084)
U = [{"role": "user", "content": "x"}]


def chat(**body: Any) -> ChatCall:
    return parse_chat({"messages": U, **body}, DEFAULTS)


def refused(param: str | None = None, code: str | None = None, parse: Any = parse_chat, **body: Any) -> RequestError:
    with pytest.raises(RequestError) as e:
        parse({"messages": U, **body} if parse is parse_chat else body, DEFAULTS)
    assert "\n" not in str(e.value)
    assert len(str(e.value)) < 500
    if param is not None:
        assert e.value.param == param
    if code is not None:
        assert e.value.code == code
    return e.value
