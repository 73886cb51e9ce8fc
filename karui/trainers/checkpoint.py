"""Checkpoints: everything a run needs to go on bit-identically, written whole or not at all.

    checkpoint-000012/
      adapter_model.safetensors, adapter_config.json, karui_adapter.json     or model.safetensors, config.json (full training)
      optimizer.safetensors     moments and step counts by parameter name: `exp_avg/NAME`, `exp_avg_sq/NAME`, `step/NAME`
      state.json                step, random number states, hashes of recipe, data, base and of the files above

A folder is filled under a temporary name and renamed last, so what bears the name `checkpoint-N` is complete; its files are
checked against their hashes before anything is resumed from them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.configs.errors import CorruptError, KaruiError
from karui.configs.recipe import Recipe
from karui.trainers import shards
from karui.trainers.sharding import split_like, whole

if TYPE_CHECKING:
    from accelerate import Accelerator

logger = logging.getLogger(__name__)
STATE, OPTIMIZER = "state.json", "optimizer.safetensors"
FORMAT = 1
_NAME = re.compile(r"checkpoint-(\d+)")
# what may change between a run and its continuation without changing what is computed
_FREE = {"name", "track", "export", "eval", "run.output", "run.checkpoint_every", "run.keep", "run.eval_every", "run.log_every",
         "run.checkpoint", "run.timeout", "data.workers"}
# what changes only the order of floating-point sums
_ROUNDING = {"optim.micro_tokens", "objective.chunk_tokens", "run.recompute", "run.threads", "run.matmul", "run.sharding",
             "run.context_parallel", "data.packing"}


_LIKE_ITS_PARAMETER = {"exp_avg", "exp_avg_sq", "exp_root", "momentum_buffer", "variance", "state1", "state2"}


def write_checkpoint(run: Path, step: int, state: Mapping[str, Any], optimizer: Mapping[str, torch.Tensor],
                     save_weights: Callable[[Path], None], keep: int) -> Path:
    """Write `run/checkpoint-N` and remove all but the newest `keep`.

    Args:
        state: JSON-able; `step`, `files` and `format` are added.
        save_weights: writes the weight files into the folder it is given.

    Raises:
        KaruiError: the disk is full or not writable; earlier checkpoints are as they were.
    """
    from safetensors.torch import save_file

    final = run / f"checkpoint-{step:06d}"
    scratch = run / f".{final.name}.tmp{os.getpid()}"
    with writing(run, f"checkpoint at step {step}", scratch):
        scratch.mkdir(parents=True)
        save_weights(scratch)
        save_file({k: v.detach().cpu().contiguous() for k, v in optimizer.items()}, str(scratch / OPTIMIZER))
        files = {p.relative_to(scratch).as_posix(): sha256(p) for p in sorted(scratch.rglob("*")) if p.is_file()}
        _complete(scratch, final, {"format": FORMAT, "step": step, "files": files, **state}, keep)
    return final


def write_sharded(run: Path, step: int, state: Mapping[str, Any], held: dict[str, torch.Tensor],
                  save_rest: Callable[[Path], None], keep: int, accelerator: Accelerator) -> None:
    """As `write_checkpoint`, every rank writing its part of `held` (`shards.tensors`); `run` is a folder that all ranks see."""
    from accelerate.utils import gather_object

    final = run / f"checkpoint-{step:06d}"
    scratch = run / f".{final.name}.tmp"
    main = accelerator.is_main_process
    if main:
        shutil.rmtree(scratch, ignore_errors=True)
    accelerator.wait_for_everyone()
    with writing(run, f"checkpoint at step {step}", scratch if main else None):
        (scratch / shards.FOLDER).mkdir(parents=True, exist_ok=True)
        shards.write(scratch, held)
        own = (scratch / shards.FOLDER).glob(f"shard-{accelerator.process_index + 1:05d}-*")
        parts = gather_object([{p.relative_to(scratch).as_posix(): sha256(p) for p in own}])
        if main:
            save_rest(scratch)
            files = {p.name: sha256(p) for p in sorted(scratch.glob("*")) if p.is_file()}
            for part in parts:
                files |= part
            _complete(scratch, final, {"format": FORMAT, "step": step, "files": files, **state}, keep)
    accelerator.wait_for_everyone()


def _complete(scratch: Path, final: Path, state: Mapping[str, Any], keep: int) -> None:
    """Write the state, give the folder its name, and remove what is older than the newest `keep`."""
    (scratch / STATE).write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
    if final.exists():
        shutil.rmtree(final)
    os.replace(scratch, final)
    for old in list_checkpoints(final.parent)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def writing(run: Path, what: str, scratch: Path | None = None) -> Iterator[None]:
    """Within, `what` is written into a run folder; if that fails `scratch` is removed, and a disk's error says how to go on.

    Raises:
        KaruiError: the disk is full or not writable.
    """
    try:
        yield
    except Exception as error:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
        if not _is_io(error):
            raise
        older = list_checkpoints(run)
        rest = f"{older[-1].name} is whole; make room and go on from it with --resume" if older else "make room and start again"
        raise KaruiError(f"{what} could not be written to {run}: {error}; {rest}.") from error


def list_checkpoints(run: Path) -> list[Path]:
    """The complete checkpoints of a run folder, oldest first."""
    found = [(int(m[1]), p) for p in run.glob("checkpoint-*") if (m := _NAME.fullmatch(p.name)) and p.is_dir()]
    return [p for _, p in sorted(found)]


def find_checkpoint(source: str | Path) -> Path:
    """A checkpoint folder itself, or the newest one of a run folder.

    Raises:
        KaruiError: there is none.
    """
    path = Path(source)
    if (path / STATE).is_file():
        return path
    if _NAME.fullmatch(path.name) and path.is_dir():
        raise CorruptError(f"{path}: {STATE} is missing; this is not a complete checkpoint.")
    found = list_checkpoints(path)
    if not found:
        raise KaruiError(f"nothing to resume in {path}: it holds no checkpoint-N folder. Start without --resume.")
    return found[-1]


def read_checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The state and the optimizer's tensors (none of a sharded checkpoint), after every file's hash was checked.

    Raises:
        CorruptError: a file is missing, cut short or changed, or the format is newer than this version reads.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    advice = "Resume from an earlier checkpoint of the run."
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        files = state["files"]
        number = state["format"]
    except (OSError, json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
        raise CorruptError(f"{folder / STATE} is not a checkpoint's state: {error!r}. {advice}") from error
    if number > FORMAT:
        raise CorruptError(f"{folder} has checkpoint format {number}, this version reads up to {FORMAT}; update karui.")
    for name, digest in files.items():
        path = folder / name
        if not path.resolve().is_relative_to(folder.resolve()):
            raise CorruptError(f"{folder / STATE} names a file outside of its folder: {name!r}.")
        if not path.is_file():
            raise CorruptError(f"{path} is missing. {advice}")
        if sha256(path) != digest:
            raise CorruptError(f"{path} was cut short or changed: its hash is not the one in {STATE}. {advice}")
    if (folder / shards.FOLDER).is_dir():
        return state, {}
    try:
        return state, load_file(str(folder / OPTIMIZER))
    except (SafetensorError, OSError) as error:
        raise CorruptError(f"{folder / OPTIMIZER} cannot be read: {error}. {advice}") from error


def as_written(recipe: Recipe) -> dict[str, Any]:
    """A recipe as its file reads."""
    written: dict[str, Any] = json.loads(json.dumps(recipe.dump()))
    return written


def as_of_now(stored: Mapping[str, Any]) -> Mapping[str, Any]:
    """A stored recipe with the defaults of keys that came later; as it is when this version cannot read it."""
    try:
        return as_written(Recipe.build(stored))
    except KaruiError:
        return stored


def check_belongs(state: Mapping[str, Any], recipe: Recipe, *, base: str, data: str, source: str) -> None:
    """Raise `KaruiError` when a checkpoint is of another run: other base, other data, other recipe (the keys are named)."""
    old, new = _leaves(as_of_now(state.get("recipe", {}))), _leaves(as_written(recipe))
    changed = [k for k in sorted(set(old) | set(new)) if old.get(k) != new.get(k) and not _free(k)]
    if serious := [k for k in changed if k not in _ROUNDING]:
        shown = "; ".join(f"{k}: {old.get(k)!r} there, {new.get(k)!r} now" for k in serious[:4])
        raise KaruiError(f"{source} belongs to another run ({shown}). Resume with the recipe it was started with, or start anew.")
    if state.get("base") != base:
        raise KaruiError(f"{source} was trained on another base (fingerprint {state.get('base')}, this model's is {base}). "
                         f"Restore that model, or start anew.")
    if state.get("data") != data:
        raise KaruiError(f"{source} was trained on other data: the samples' hash is {state.get('data')}, now it is {data}. "
                         f"Restore the files, or start anew.")
    if changed:
        logger.warning("resumed with %s changed: the same gradients up to rounding, not bit for bit", ", ".join(changed))


def optimizer_tensors(optimizer: torch.optim.Optimizer, module: nn.Module) -> dict[str, torch.Tensor]:
    """The optimizer's state by `KIND/parameter name`, whole; a collective when the parameters are split over ranks."""
    names = {id(p): n for n, p in module.named_parameters()}
    tensors = {f"{kind}/{names[id(p)]}": whole(torch.as_tensor(value))
               for p, kinds in optimizer.state.items() for kind, value in kinds.items()}
    # bitsandbytes shares its code tables between parameters, a file may not
    return {k: v.clone() if k.startswith("qmap") else v for k, v in tensors.items()}


def restore_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module, tensors: Mapping[str, torch.Tensor], source: str
) -> None:
    """Put the tensors back; every one must belong to a trained parameter of its shape, and none may lack its own.

    Raises:
        CorruptError: names or shapes do not fit the model.
    """
    trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
    later: Collection[str] = getattr(module, "unstarted", tuple)()
    by_name = by_parameter(tensors, {n: p.shape for n, p in trained.items()}, source, later)
    foreign = type(optimizer).__module__.startswith("bitsandbytes")  # it counts steps in a plain number
    # a fused kernel counts them on the parameter's device, the others on the host
    fused = {id(p) for group in optimizer.param_groups if group.get("fused") or group.get("capturable") for p in group["params"]}
    for name, kinds in by_name.items():
        parameter = trained[name]
        home = parameter.device if id(parameter) in fused else torch.device("cpu")
        optimizer.state[parameter] = {k: _placed(k, v, parameter, foreign, home) for k, v in kinds.items()}


def by_parameter(
    tensors: Mapping[str, torch.Tensor], shapes: Mapping[str, torch.Size], source: str, later: Collection[str] = ()
) -> dict[str, dict[str, torch.Tensor]]:
    """The optimizer's tensors by parameter and kind; see `restore_optimizer`. Those of `later` may be missing."""
    by_name: dict[str, dict[str, torch.Tensor]] = {}
    for key, value in tensors.items():
        kind, _, name = key.partition("/")
        if name not in shapes or (kind in _LIKE_ITS_PARAMETER and value.shape != shapes[name]):
            raise CorruptError(f"{source}: optimizer state {key!r} {tuple(value.shape)} fits no trained parameter of this model.")
        by_name.setdefault(name, {})[kind] = value
    if tensors and (missing := sorted(set(shapes) - set(by_name) - set(later))):
        raise CorruptError(f"{source}: {len(missing)} trained parameters have no optimizer state, first {missing[0]!r}.")
    return by_name


def _placed(kind: str, value: torch.Tensor, parameter: torch.Tensor, plain_step: bool, home: torch.device) -> Any:
    if kind == "step":
        return int(value) if plain_step else value.to(home, copy=True)
    return split_like(value, parameter) if value.shape == parameter.shape else value.to(parameter.device)


def load_full(model: nn.Module, folder: Path) -> None:
    """Load model.safetensors (or its shards) of a checkpoint into a whole model; tied tensors may be stored once.

    Raises:
        CorruptError: a tensor is missing, does not belong to the model or has another shape.
    """
    from safetensors.torch import load_file

    values: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        values |= load_file(str(path))
    own = model.state_dict()
    stored_at = {own[n].data_ptr() for n in values if n in own}
    missing = [n for n in own if n not in values and own[n].data_ptr() not in stored_at]
    if odd := [n for n in values if n not in own or own[n].shape != values[n].shape] + missing:
        raise CorruptError(f"{folder}: {len(odd)} tensors are missing or do not fit this model, first {odd[0]!r}.")
    with torch.no_grad():
        for name, value in values.items():
            own[name].copy_(value)


def rng_state() -> dict[str, str]:
    """torch's random number states of this process, base64."""
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {k: base64.b64encode(v.numpy().tobytes()).decode() for k, v in states.items()}


def set_rng_state(states: Mapping[str, str]) -> None:
    """The inverse of `rng_state`."""
    def tensor(text: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8).clone()

    torch.set_rng_state(tensor(states["cpu"]))
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensor(states["cuda"]))


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _is_io(error: Exception) -> bool:
    """Disk errors come as OSError from Python, as SafetensorError("I/O error ...") from the safetensors library, and within what
    torch.distributed.checkpoint gathered from the ranks."""
    foreign = type(error).__name__ in ("SafetensorError", "CheckpointException")
    return isinstance(error, OSError) or foreign and ("I/O" in str(error) or "No space left" in str(error))


def _leaves(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        value = dict(enumerate(value))
    if not isinstance(value, Mapping):
        return {prefix.removesuffix("."): value}
    return {k: v for key, inner in value.items() for k, v in _leaves(inner, f"{prefix}{key}.").items()}


def _free(key: str) -> bool:
    return key in _FREE or key.partition(".")[0] in _FREE
