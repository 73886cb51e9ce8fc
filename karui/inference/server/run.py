"""`serve`: the application under uvicorn."""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from karui.configs.errors import KaruiError, UnsupportedError
from karui.inference.server.loop import require_extra

logger = logging.getLogger(__name__)


def serve_model(model: str | Path, *, name: str | None = None, host: str = "127.0.0.1", port: int = 8000,
                api_key: str | None = None, adapters: Mapping[str, str | Path] | None = None, drain_s: int = 30,
                **options: Any) -> None:
    """Load a bundle, model folder or catalogue name and serve it until interrupted.

    Args:
        adapters: peft LoRA folders by the names that clients ask for; one process only.
        options: those of `Engine.load`.
    """
    require_extra()     # before a large model is read in vain
    if options.get("parallel") is None:
        check_address(host, port)
    from karui.inference.engine import Engine
    from karui.inference.server.warm_up import warm_up

    served, adapters = name or Path(str(model)).name, adapters or {}
    if served in adapters:
        raise KaruiError(f"serve: {served!r} names both the model and an adapter; choose another name.")
    if options.get("parallel") is not None:
        if adapters:
            raise UnsupportedError("a model on several ranks serves no adapters; merge them into models of their own.")
        _serve_ranks(model, name=served, host=host, port=port, api_key=api_key, drain_s=drain_s, **options)
        return
    engine = Engine.load(model, **options)
    for adapter, folder in adapters.items():
        engine.load_adapter(adapter, folder)
    warm_up(engine)
    serve(engine, served, host=host, port=port, api_key=api_key, drain_s=drain_s)


def _serve_ranks(model: str | Path, *, name: str, host: str, port: int, api_key: str | None, drain_s: int,
                 device: str = "auto", **options: Any) -> None:
    """As `serve_model`, on every rank of a script that torchrun started: the first one serves, the others follow."""
    import os

    import torch
    import torch.distributed as dist

    from karui.inference.engine import Engine
    from karui.inference.server.ranks import LeadingEngine, control_group, follow

    if "RANK" not in os.environ:
        raise KaruiError("serving a model on several ranks: start it with torchrun, one process per rank, for instance "
                         "torchrun --nproc_per_node 2 -m karui serve MODEL --parallel tensor.")
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu and device in ("auto", "cuda"):
        device = f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    if on_gpu:
        torch.cuda.set_device(torch.device(device))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        group, engine = control_group(), Engine.load(model, device=device, **options)
        if dist.get_rank() != 0:
            follow(engine, group)
            return
        leading = LeadingEngine(engine, group)
        try:
            serve(leading, name, host=host, port=port, api_key=api_key, drain_s=drain_s)
        finally:
            leading.stop()
    finally:
        dist.destroy_process_group()


def serve(engine: Any, name: str, *, host: str = "127.0.0.1", port: int = 8000, api_key: str | None = None,
          drain_s: int = 30, hang_s: float = 120.0) -> None:
    """Serve until interrupted. Binds to this machine only unless another host is given.

    Args:
        drain_s: seconds that running requests get to end after SIGTERM or Ctrl-C; then they are aborted. New ones are refused.

    Raises `KaruiError` when the extra `serve` is missing or the port is not usable.
    """
    require_extra()
    import uvicorn

    from karui.inference.server.app import create_app

    check_address(host, port)
    if host not in ("127.0.0.1", "localhost", "::1") and api_key is None:
        logger.warning("serving on %s without an API key: everybody who reaches this machine can use the model", host)
    app = create_app(engine, name, api_key=api_key, hang_s=hang_s)
    config = uvicorn.Config(app, host=host, port=port, log_level="info", access_log=False, timeout_graceful_shutdown=drain_s)
    server = uvicorn.Server(config)
    try:
        server.run()
    except SystemExit:
        raise _unusable(host, port, "in use by now") from None


def check_address(host: str, port: int) -> None:
    """Raise `KaruiError`, with the reason, where a server could not listen."""
    if not 1 <= port <= 65535:
        raise KaruiError(f"serve: port {port} is not within 1 and 65535.")
    missing = None
    try:
        for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as tried:
                    tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    tried.bind(address)
                return
            except OSError as error:
                if error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                    raise
                missing = error  # a name's IPv6 address need not be this machine's
    except (OSError, UnicodeError) as error:
        raise _unusable(host, port, getattr(error, "strerror", None) or error) from None
    raise _unusable(host, port, missing.strerror if missing else "it has no address")


def _unusable(host: str, port: int, reason: object) -> KaruiError:
    return KaruiError(f"serve: {host}:{port} cannot be bound: {reason}. Choose others with --host and --port.")
