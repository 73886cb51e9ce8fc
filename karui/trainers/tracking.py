"""Where metrics go besides the run folder: W&B, TensorBoard, trackio or nowhere, through accelerate's trackers.

W&B also gets the preflight, samples of generated text and the exported bundles as artifacts.

Tracking never stops training: W&B records offline without a login (no prompt, ever) and also when it cannot be reached, which
is logged once.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from karui.configs.errors import UnsupportedError
from karui.configs.recipe import Recipe

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)


def tracker_names(recipe: Recipe) -> list[str]:
    """What `Accelerator(log_with=...)` takes; raises `UnsupportedError` when the package is not installed."""
    from importlib.util import find_spec

    name = recipe.track.to
    if name == "none":
        return []
    if find_spec(name) is None:
        raise UnsupportedError(f"track.to is {name}, which is not installed; pip install {name}, or set track.to: none.")
    return [name]


def start(accelerator: Accelerator, recipe: Recipe, folder: Path) -> str:
    """Open the trackers; returns a sentence that says where the metrics go. Call it on every rank.

    Env (WANDB_MODE, WANDB_DIR, ...) that is already set wins.
    """
    name = recipe.track.to
    if name == "none":
        return "metrics: the run folder only"
    if name == "tensorboard":
        accelerator.init_trackers(recipe.track.project, config=flatten(recipe.dump()))
        return f"metrics: TensorBoard, tensorboard --logdir {folder}"
    if name == "trackio":
        accelerator.init_trackers(recipe.track.project, config=flatten(recipe.dump()))
        return "metrics: trackio, `trackio show`"
    os.environ.setdefault("WANDB_SILENT", "true")
    where = Path(os.environ.get("WANDB_DIR", folder))
    mode, reason = os.environ.get("WANDB_MODE", ""), ""
    if not mode:
        mode, reason = ("online", "") if logged_in() else ("offline", " (no login)")
    error = _init_wandb(accelerator, recipe, where, mode)
    if error and mode != "offline":
        logger.warning("W&B cannot be reached (%s); recording offline, send it later with wandb sync", error)
        mode, reason = "offline", " (not reachable)"
        error = _init_wandb(accelerator, recipe, where, mode)
    if error:
        logger.warning("W&B cannot be used (%s); metrics go to the run folder only", error)
        return "metrics: the run folder only (W&B failed)"
    return f"metrics: W&B {mode}{reason}" + (f", {where / 'wandb'}; wandb sync sends it" if mode == "offline" else "")


def _init_wandb(accelerator: Accelerator, recipe: Recipe, folder: Path, mode: str) -> Exception | None:
    """Start W&B; what went wrong, whatever it was: training goes on without it.

    Folder and mode are given and not left to the environment, which W&B reads once per process.
    """
    track = recipe.track
    try:
        import wandb

        options = {"name": track.name or recipe.name, "tags": list(track.tags), "dir": str(folder), "mode": mode,
                   "settings": wandb.Settings(init_timeout=30, console="off")}
        accelerator.init_trackers(track.project, config=recipe.dump(), init_kwargs={"wandb": options})
    except Exception as error:
        accelerator.trackers = []  # the one that failed is among them, and would be started again
        return error
    return None


def logged_in() -> bool:
    """Whether W&B has a key: in the environment or in the netrc file."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    import netrc
    from urllib.parse import urlparse

    host = urlparse(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class Tracker:
    """Guards `accelerator.log`: the first failure is reported and ends tracking, not training."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.alive = True

    def log(self, values: Mapping[str, Any], step: int) -> None:
        self._guard(lambda: self.accelerator.log(dict(values), step=step))

    def config(self, values: Mapping[str, Any]) -> None:
        """Further facts about the run, beside its recipe."""
        for tracker in self._mains():
            if tracker.name == "wandb":
                self._guard(lambda run=tracker.tracker: run.config.update(dict(values), allow_val_change=True))
            else:
                self._guard(lambda t=tracker: t.store_init_configuration(flatten(values)))

    def texts(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Generated text, as a table."""
        for tracker in self._mains():
            if tracker.name == "wandb":
                self._guard(lambda t=tracker: t.log_table(name, columns=list(columns), data=[list(r) for r in rows]))
            elif tracker.name == "trackio":
                self._guard(lambda t=tracker: t.log({name: _trackio_table(columns, rows)}))
            elif tracker.name == "tensorboard":
                lines = [" | ".join(columns), " | ".join("---" for _ in columns)]
                text = "\n".join([*lines, *(" | ".join(" ".join(cell.split()) for cell in row) for row in rows)])
                self._guard(lambda t=tracker, text=text: t.writer.add_text(name, text))

    def artifact(self, folder: Path, *, kind: str, metadata: Mapping[str, Any]) -> None:
        """A folder as an artifact of the run, where the tracker has such things (W&B)."""
        for tracker in self._mains():
            if tracker.name != "wandb":
                continue

            def log(run: Any = tracker.tracker) -> None:
                import wandb

                artifact = wandb.Artifact(f"{folder.name}-{run.id}", type=kind, metadata=dict(metadata))
                artifact.add_dir(str(folder), policy="immutable")
                run.log_artifact(artifact)

            self._guard(log)

    def leave(self) -> None:
        """End the process group and let go of the model: what follows is the first rank's alone."""
        self.accelerator.free_memory()
        self.accelerator.state.destroy_process_group()

    def finish(self) -> None:
        """Close the trackers."""
        for tracker in self.accelerator.trackers:
            self._guard(tracker.finish)

    def _mains(self) -> list[Any]:
        return list(self.accelerator.trackers) if self.accelerator.is_main_process else []

    def _guard(self, call: Any) -> None:
        if not self.alive:
            return
        try:
            call()
        except Exception as error:  # a tracker must not stop a run
            self.alive = False
            logger.warning("tracking stopped: %s; metrics still go to log.jsonl", error)


def _trackio_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Any:
    import trackio

    return trackio.Table(columns=list(columns), data=[list(row) for row in rows])


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"optim": {"lr": 1}}` -> `{"optim.lr": 1}`; what is not a number, text or truth value becomes text."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value if isinstance(value, (int, float, str, bool)) else str(value)
    return flat
