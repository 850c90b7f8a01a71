"""The HTTP server around an engine: OpenAI, Anthropic and SGLang routes over aiohttp.

`glm53.server.app` builds and runs it; `glm53.server.protocol` holds the wire formats as pure functions.
"""
