"""What the HTTP side can be told: the server's part of `glm53.config.Settings`, where users find names and defaults."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Settings of one server. Seconds are wall clock; 0 turns a time limit off where noted.

    `api_keys` empty = no authentication. `max_queue` = requests that may wait beyond those the engine runs at once.
    `head_timeout_s` and `body_timeout_s` = how long a client may take to send a request's head and its body.
    `request_timeout_s` (0 = none) ends generation that long after the body has arrived. `write_timeout_s` = how long a
    client may take nothing before it is dropped. `ping_s` = longest silence in a stream. `cors_origins`: see `cors`; ()
    = none. `chat_template` = "builtin", "checkpoint" or the path of a Jinja file.
    """

    host: str = "127.0.0.1"
    port: int = 30000
    served_name: str = "glm-5.3-flash"
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * MIB
    head_timeout_s: float = 60.0
    body_timeout_s: float = 60.0
    max_queue: int = 64
    max_n: int = 8
    request_timeout_s: float = 3600.0
    drain_s: float = 30.0
    cors_origins: tuple[str, ...] = ("auto",)
    ping_s: float = 10.0
    write_timeout_s: float = 60.0
    chat_template: str = "builtin"
    log_requests: bool = True
