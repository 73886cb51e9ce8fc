"""OpenAI-compatible HTTP over one engine: `serve(engine, "name")`. Needs the extra `karui[serve]`.

    loop.py       the engine's own thread: submit, cancel, health
    protocol.py   bodies in, objects out; every mistake becomes a 4xx with OpenAI's error object
    app.py        the routes
    metrics.py    Prometheus text
"""

from karui.inference.server.run import serve, serve_model

__all__ = ["serve", "serve_model"]
