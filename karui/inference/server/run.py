"""`serve`: the application under uvicorn."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from karui.configs.errors import KaruiError
from karui.inference.server.loop import require_extra

logger = logging.getLogger(__name__)


def serve_model(model: str | Path, *, name: str | None = None, host: str = "127.0.0.1", port: int = 8000,
                api_key: str | None = None, **options: Any) -> None:
    """Load a bundle, model folder or catalogue name and serve it until interrupted; `options` are those of `Engine.load`."""
    require_extra()     # before a large model is read in vain
    from karui.inference.engine import Engine
    from karui.inference.server.warm_up import warm_up

    engine = Engine.load(model, **options)
    warm_up(engine)
    serve(engine, name or Path(str(model)).name, host=host, port=port, api_key=api_key)


def serve(engine: Any, name: str, *, host: str = "127.0.0.1", port: int = 8000, api_key: str | None = None,
          hang_s: float = 120.0) -> None:
    """Serve until interrupted. Binds to this machine only unless another host is given.

    Raises `KaruiError` when the extra `serve` is missing or the port is not usable.
    """
    require_extra()
    import uvicorn

    from karui.inference.server.app import create_app

    if not 1 <= port <= 65535:
        raise KaruiError(f"serve: port {port} is not within 1 and 65535.")
    if host not in ("127.0.0.1", "localhost", "::1") and api_key is None:
        logger.warning("serving on %s without an API key: everybody who reaches this machine can use the model", host)
    app = create_app(engine, name, api_key=api_key, hang_s=hang_s)
    config = uvicorn.Config(app, host=host, port=port, log_level="info", access_log=False)
    server = uvicorn.Server(config)
    try:
        server.run()
    except SystemExit:
        raise KaruiError(f"serve: {host}:{port} cannot be bound; is it in use? Choose another with --port.") from None
