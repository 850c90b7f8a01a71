"""Wire formats as pure functions: bytes and dicts in, frozen dataclasses, events and bytes out. No I/O."""
