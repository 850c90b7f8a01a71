"""What the checkpoint's generation_config.json asks for: sampling of requests that do not say, and further end tokens.

Read as the other servers read it (vLLM's and SGLang's default): temperature, top_p, top_k, min_p and
repetition_penalty; `do_sample` and lengths are not for a server. Without the file the model card's values hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from glm53.chat.messages import type_name
from glm53.engine.protocol import SamplingParams
from glm53.errors import ConfigError, RequestError

from .protocol.fields import Fields
from .protocol.sampling import parse_ids, parse_sampling

KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """Defaults of every endpoint; `eos_ids` end an answer beside the chat format's own tokens."""

    sampling: SamplingParams = field(default_factory=SamplingParams)
    eos_ids: frozenset[int] = frozenset()


def read_generation_config(model_dir: Path, vocab_size: int) -> GenerationConfig:
    """The file's values. Raises ConfigError for one that is no JSON object or has a value out of range."""
    path = model_dir / "generation_config.json"
    try:
        raw = json.loads(path.read_bytes())
        if not isinstance(raw, dict):
            raise ConfigError(f"{path}: it holds {type_name(raw)}, not a JSON object")
        eos = raw.get("eos_token_id")
        ids = parse_ids(eos if isinstance(eos, list) else [] if eos is None else [eos], "eos_token_id", vocab_size)
        sampling = parse_sampling(Fields({k: raw.get(k) for k in KEYS}), SamplingParams(), None)
    except FileNotFoundError:
        return GenerationConfig()
    except OSError as e:
        raise ConfigError(f"{path}: cannot be read: {e.strerror}") from None
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path}: it is not JSON ({e}); it came with the checkpoint: download it again") from None
    except RequestError as e:
        raise ConfigError(f"{path}: {e}") from None
    return GenerationConfig(sampling, frozenset(ids))
