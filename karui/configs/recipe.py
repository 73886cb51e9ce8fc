"""`Recipe`: one whole run as a frozen value; read from YAML, overridden by `key=value`, stored in every bundle.

A key that does not exist is an error that names the file, the key, the valid keys and the nearest spelling.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from karui.configs.errors import KaruiError, nearest
from karui.configs.objectives import ObjectiveSection, SftObjective
from karui.configs.precision import OptimizerName
from karui.configs.quantspec import QuantSpec
from karui.configs.section import Section, Seed
from karui.configs.steps import PrepareStep


class ModelSection(Section):
    """Which model. A bare string in the recipe is the same as `{name: ...}`."""

    name: str = Field(description="catalogue name, hub id or folder")
    dtype: Literal["float32", "bfloat16", "float16"] = Field("float32", description="dtype of the high-precision weights")

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        if not isinstance(value, Mapping) or "revision" not in value:
            return {"name": value} if isinstance(value, str) else value
        if value["revision"] is not None:  # a key of earlier versions, which no part of karui ever read
            raise ValueError("a revision cannot be chosen here; fetch it (hf download NAME --revision X --local-dir FOLDER) and "
                             "give that folder as model.name")
        return {k: v for k, v in value.items() if k != "revision"}


class MixPart(Section):
    """A further source beside `data.train`."""

    source: str = Field(description="as data.train")
    weight: float = Field(1.0, gt=0, description="share of the characters against data.weight and the other parts")
    repeat: int = Field(1, ge=1, description="times it may be read; the mix ends when a source is spent")


class DataSection(Section):
    """Where samples come from and how they become token sequences."""

    train: str = Field(description="a shipped sample, a .jsonl/.json/.parquet/.txt file or folder, or a hub data set")
    eval: str | None = Field(None, description="held-out samples, same forms; none: `holdout` rows are split off train")
    holdout: int = Field(0, ge=0, description="rows taken from the end of train for evaluation when eval is not given")
    format: Literal["auto", "chat", "prompt", "text"] = Field("auto", description="auto: decided by the columns, and printed")
    messages: str = Field("messages", description="column with the chat messages")
    prompt: str = Field("prompt", description="column with the prompt")
    completion: str = Field("completion", description="column with the completion")
    text: str = Field("text", description="column with raw text")
    system: str | None = Field(None, description="system message put before every prompt or chat that has none")
    max_length: int = Field(1024, ge=8, description="tokens per sample")
    overlong: Literal["drop", "truncate", "split", "error"] = Field(
        "drop", description="what happens to longer samples; always counted. split: raw text only, into consecutive pieces")
    packing: bool = Field(True, description="several samples in one sequence, isolated from one another")
    train_on: Literal["assistant", "all"] = Field("assistant", description="which tokens carry loss")
    limit: int | None = Field(None, ge=1, description="use only the first rows of train")
    tokens: int | None = Field(None, ge=1, description="stop taking rows of train once their samples hold this many tokens")
    mix: tuple[MixPart, ...] = Field((), description="further sources, read beside train in the shares of their weights")
    weight: float = Field(1.0, gt=0, description="share of train in the mix")
    repeat: int = Field(1, ge=1, description="times train may be read in a mix")
    dedup: bool = Field(False, description="leave out samples whose tokens came before; else they are only counted")
    workers: int = Field(0, ge=0, description="processes that render and tokenize; 0: this one, whose tokenizer uses all cores")
    shuffle: bool = True
    shuffle_window: int | None = Field(
        None, ge=1, description="shuffle within so many neighbours, and the order of those windows; null: over everything. "
        "For sets larger than memory on a slow disk")

    @model_validator(mode="after")
    def _fits(self) -> DataSection:
        if not self.mix and (self.weight != 1 or self.repeat != 1):
            raise ValueError("weight and repeat are of a mix, and there is none; optim.epochs reads train more than once")
        if self.shuffle_window is not None and not self.shuffle:
            raise ValueError("shuffle_window shuffles, and shuffle is false; leave one of them out")
        return self


class MoeSection(Section):
    """How a mixture of experts is kept balanced while it is trained: losses beside the objective's, or a bias. All of them are of
    the whole update, however it was cut."""

    balance: Literal["none", "switch", "sequence", "bias"] = Field(
        "none", description="switch: a loss over the update (arXiv 2101.03961); sequence: over each document (DeepSeek-V3, "
        "2412.19437); bias: no loss, the routers' correction bias is moved (2408.15664), where the model has one")
    weight: float | None = Field(
        None, ge=0, description="of the loss, which is added up over layers; null: switch 0.01, sequence 0.0001, and beside bias "
        "no loss (a weight there is of sequence's)")
    speed: float = Field(0.001, gt=0, description="bias: what it moves with each update")
    z_loss: float = Field(0.0, ge=0, description="weight of the router z-loss (arXiv 2202.08906, which takes 0.001)")

    @model_validator(mode="after")
    def _fits(self) -> MoeSection:
        if self.balance == "none" and self.weight is not None:
            raise ValueError("weight belongs to balance: switch, sequence or bias")
        if self.balance != "bias" and self.speed != 0.001:
            raise ValueError("speed belongs to balance: bias")
        return self

    @property
    def active(self) -> bool:
        """Whether anything is asked for."""
        return self.balance != "none" or self.z_loss > 0

    @property
    def loss_weight(self) -> float:
        """Of the balancing loss."""
        return {"none": 0.0, "switch": 0.01, "sequence": 1e-4, "bias": 0.0}[self.balance] if self.weight is None else self.weight


Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimSection(Section):
    """How it is minimised. Batches are counted in samples per optimizer step over all ranks."""

    name: OptimizerName = Field("adamw", description="8 bits or fp8: states of one byte; paged: states in main memory")
    lr: float = Field(2e-4, gt=0, le=10)
    weight_decay: float = Field(0.0, ge=0)
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    eps: float = Field(1e-8, ge=0)
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup: float = Field(0.03, ge=0, description="below 1: share of all steps, else steps")
    final_lr: float = Field(0.0, ge=0, le=1, description="share of lr at the end of cosine and linear")
    clip: float | None = Field(1.0, gt=0, description="largest gradient norm; null: no clipping")
    epochs: float | None = Field(None, gt=0)
    steps: int | None = Field(None, ge=1, description="optimizer steps; wins over epochs")
    batch: int = Field(16, ge=1, description="samples per optimizer step, over all ranks")
    micro_tokens: int = Field(4096, ge=8, description="tokens in one forward pass; the batch is cut to fit")

    @model_validator(mode="after")
    def _length(self) -> OptimSection:
        if self.epochs is None and self.steps is None:
            object.__setattr__(self, "epochs", 1.0)
        return self


class RunSection(Section):
    """Where and how the run is executed."""

    output: str = Field("runs/{name}", description="folder of the run; {name} is the recipe's name")
    seed: Seed = 0
    checkpoint_every: int | None = Field(None, ge=1, description="steps; null: only at the end and on Ctrl-C")
    keep: int = Field(2, ge=1, description="checkpoints kept")
    eval_every: int | None = Field(None, ge=1, description="steps; null: before and after training")
    log_every: int = Field(1, ge=1)
    precision: Literal["no", "bf16", "fp16", "fp8"] = Field(
        "no", description="autocast of the forward pass, as accelerate names it; fp8: a step fp8-current in prepare:"
    )
    matmul: Literal["fp32", "bf16x3", "bf16-backward", "bf16"] = Field(
        "fp32", description="on a CPU, operands of products rounded to bf16, sums in fp32. bf16-backward: those of the backward "
        "pass (losses of the same weights stay those of fp32); bf16: all. Such a product is twice as fast with AVX512-BF16, four "
        "times with AMX, else no faster. bf16x3: bf16-backward, and with AMX the forward pass in three bf16 products that make "
        "up nearly all of the fp32 one, in half of the time"
    )
    recompute: Literal["none", "full"] = Field("none", description="recompute activations in the backward pass")
    threads: int | None = Field(None, ge=1, le=4096, description="CPU threads; null: all cores")
    sharding: Literal["auto", "none", "fsdp2", "zero1", "zero2", "zero3"] = Field(
        "auto", description="of parameters and states over ranks; auto: as it was launched. zero: DeepSpeed's stages")
    context_parallel: int = Field(1, ge=1, description="ranks that share the tokens of each batch, for samples too long for one")
    checkpoint: Literal["whole", "sharded"] = Field(
        "whole", description="whole: the first rank writes whole tensors; sharded: every rank writes its part")
    timeout: int = Field(1800, ge=1, le=10_000_000, description="seconds that ranks wait for one another before the run is ended")

    @field_validator("output")
    @classmethod
    def _fields(cls, value: str) -> str:
        return _fillable(value, "name")


class TrackSection(Section):
    """Where metrics go, through accelerate's trackers."""

    to: Literal["wandb", "tensorboard", "trackio", "none"] = Field("wandb", description="wandb runs offline without a login")
    project: str = "karui"
    name: str | None = Field(None, description="run name; null: the recipe's")
    tags: tuple[str, ...] = ()
    artifact: bool = Field(True, description="exported bundles become artifacts of a W&B run")


class ExportSection(Section):
    """One bundle to write after training."""

    spec: QuantSpec = Field(default_factory=lambda: QuantSpec.parse("w4g32"), description="grid of the block linears")
    embedding: QuantSpec = Field(default_factory=lambda: QuantSpec.parse("w8"), description="grid of embedding and head")
    method: str = Field("rtn", description="how the codes are found, see `karui quantize --list`; rtn needs no data")
    samples: int = Field(32, ge=1, description="calibration rows, cut from the training samples")
    length: int = Field(256, ge=8, description="tokens per calibration row")
    merge: Literal["auto", "trained", "original"] = Field(
        "auto", description="base that an adapter over a quantized one is merged into; auto: the one nearer to what was trained")
    format: Literal["karui"] = "karui"
    output: str = Field("{run}/bundle-{spec}", description="{run}: the run's folder, {spec}: the grid's spelling")

    @field_validator("output")
    @classmethod
    def _fields(cls, value: str) -> str:
        return _fillable(value, "run", "spec")

    def target(self, run: Path) -> Path:
        """Where the bundle of the run in this folder goes."""
        return Path(self.output.format(run=run, spec=str(self.spec).replace(":", "-")))


class EvalSection(Section):
    """What is compared after training."""

    perplexity: str | None = Field(None, description="a text file; protocol: windows of 1024, printed beside the number")
    windows: int | None = Field(None, ge=1, description="only the first windows")
    held_out: bool = Field(True, description="loss on the held-out samples")
    speed: bool = Field(True, description="prefill and decode tokens/s")
    questions: tuple[str, ...] = Field((), description="answered aloud after training")


class Recipe(Section):
    """One whole run: model -> data -> prepare -> objective -> moe -> optim -> run -> track -> export -> eval."""

    name: str = "run"
    model: ModelSection
    data: DataSection
    prepare: tuple[PrepareStep, ...] = ()
    objective: ObjectiveSection = SftObjective()
    moe: MoeSection = MoeSection()
    optim: OptimSection = OptimSection()
    run: RunSection = RunSection()
    track: TrackSection = TrackSection()
    export: tuple[ExportSection, ...] = ()
    eval: EvalSection = EvalSection()

    @model_validator(mode="after")
    def _one_place_each(self) -> Recipe:
        targets = [item.target(self.output) for item in self.export]
        if twice := [str(t) for i, t in enumerate(targets) if t in targets[:i]]:
            raise ValueError(f"export: two bundles would go to {twice[0]}; give one of them an output of its own")
        return self

    @classmethod
    def load(cls, source: str | Path, overrides: Sequence[str] = ()) -> Recipe:
        """Read a recipe from a YAML file or by the name of a shipped one; `overrides` are `dotted.key=value`.

        Raises:
            KaruiError: the file is missing or malformed, or a key or value is wrong; names file, key and remedy.
        """
        path = find_recipe(source)
        try:
            values = yaml.safe_load(path.read_text(encoding="utf-8"))
        except UnicodeDecodeError as error:
            raise KaruiError(
                f"{path}: not a text file ({error.reason} at byte {error.start}); a recipe is YAML in UTF-8."
            ) from error
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            where = f"{path}:{mark.line + 1}:{mark.column + 1}" if mark else str(path)
            raise KaruiError(f"{where}: malformed YAML: {getattr(error, 'problem', None) or error}. Mend that line.") from error
        if not isinstance(values, dict):
            raise KaruiError(
                f"{path}: a recipe is a mapping with the keys {', '.join(cls.model_fields)}; "
                f"this file holds {'nothing' if values is None else type(values).__name__}."
            )
        values.setdefault("name", path.stem)
        for item in overrides:
            _override(values, item)
        return cls.build(values, str(path))

    @classmethod
    def build(cls, values: Mapping[str, Any], source: str = "recipe") -> Recipe:
        """Validate a mapping; `source` names it in errors."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise KaruiError(explain(cls, source, error)) from error

    def dump(self) -> dict[str, Any]:
        """JSON-able mapping that `build` turns back into an equal recipe; specs in their short spelling."""
        return _plain(self)

    @property
    def output(self) -> Path:
        return Path(self.run.output.format(name=self.name))


def _fillable(text: str, *names: str) -> str:
    """A path whose braces hold nothing but these names."""
    try:
        text.format(**dict.fromkeys(names, ""))
    except (KeyError, IndexError, ValueError, AttributeError):
        raise ValueError(f"braces hold {' or '.join('{' + n + '}' for n in names)} and nothing else") from None
    return text


def shipped_recipes() -> dict[str, Path]:
    """The recipes in the package, by name."""
    return {p.stem: p for p in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))}


def find_recipe(source: str | Path) -> Path:
    path = Path(source)
    shipped = shipped_recipes()
    if path.is_file():
        return path
    if str(source) in shipped:
        return shipped[str(source)]
    raise KaruiError(
        f"recipe {str(source)!r}: no such file, and no shipped recipe of that name; "
        f"shipped: {', '.join(shipped)}.{nearest(path.stem, shipped)}"
    )


def _plain(value: Any) -> Any:
    if isinstance(value, QuantSpec):
        return str(value)
    if isinstance(value, BaseModel):
        return {k: _plain(getattr(value, k)) for k in type(value).model_fields}
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    return value


def _override(values: dict[str, Any], item: str) -> None:
    key, equals, text = item.partition("=")
    if not equals or not key.strip():
        raise KaruiError(f"--set {item!r}: expected key=value, e.g. --set optim.lr=1e-4.")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise KaruiError(f"--set {item!r}: the value is malformed YAML: {error}") from error
    if isinstance(value, str) and re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+", value):  # YAML 1.1 reads 1e-4 as a string
        value = float(value)
    parts, node = key.strip().split("."), values
    for depth, part in enumerate(parts):
        last = depth == len(parts) - 1
        if isinstance(node, list):
            if not part.isdigit() or int(part) >= len(node):
                raise KaruiError(
                    f"--set {item!r}: {'.'.join(parts[:depth])} is a list of {len(node)}; {part!r} is not an index in it."
                )
            if last:
                node[int(part)] = value
            node = node[int(part)]
        else:
            if isinstance(node.get(part), str) and not last:  # a bare `model: name`
                node[part] = {"name": node[part]}
            if last:
                node[part] = value
            else:
                if node.get(part) is None:
                    node[part] = {}
                node = node[part]
                if not isinstance(node, (dict, list)):
                    raise KaruiError(
                        f"--set {item!r}: {'.'.join(parts[: depth + 1])} is a plain value, it has no {parts[depth + 1]!r}."
                    )


def _grouped(errors: Sequence[Any]) -> list[list[Any]]:
    """Errors in lists of one, and in one list what each member of a union said of the same value."""
    groups: dict[Any, list[Any]] = {}
    for number, error in enumerate(errors):
        loc = [str(p) for p in error["loc"]]
        at = next((i for i, part in enumerate(loc) if _names_type(part)), None)
        groups.setdefault(number if at is None else tuple(loc[:at]), []).append(error)
    return list(groups.values())


def _names_type(part: str) -> bool:
    """Whether a part of a location is the name pydantic gives a member of a union: float, tuple[str, ...], literal['a','b']."""
    return part in ("float", "str", "int", "bool", "constrained-float") or "[" in part


def explain(model: type[BaseModel], source: str, error: ValidationError) -> str:
    """What is wrong with values for this section, a line per key; `source` names where they stand."""
    return "\n".join(_explain(model, source, group) for group in _grouped(error.errors()))


def _explain(model: type[BaseModel], source: str, group: Sequence[Any]) -> str:
    error = group[0]
    full = [str(p) for p in error["loc"]]
    loc, section = _without_tags(model, full)
    key = ".".join(loc)
    if error["type"] == "union_tag_invalid":
        context = error["ctx"]
        name, tag = context["discriminator"].strip("'"), context["tag"]
        tags = [t.strip(" '") for t in context["expected_tags"].split(",")]
        return f"{source}: {key}: {name} {tag!r} is not known; valid: {', '.join(tags)}.{nearest(tag, tags)}"
    if error["type"] == "union_tag_not_found":
        name = error["ctx"]["discriminator"].strip("'")
        return f"{source}: {key}: the key {name} is missing; it says what this step is."
    if error["type"] == "extra_forbidden":
        names = keys_of(section) if section else []
        return f"{source}: unknown key {key!r}; valid here: {', '.join(names)}.{nearest(loc[-1], names)}"
    if error["type"] == "missing":
        return f"{source}: key {key!r} is required and missing; add it."
    message = ", or ".join(dict.fromkeys(_said(item["msg"], first=item is error) for item in group))
    return f"{source}: {key or 'recipe'}: {message} (given: {_short(error.get('input'))})."


def _said(message: str, *, first: bool) -> str:
    """Pydantic's words in those of YAML."""
    message = re.sub(r"valid dictionary or instance of \w+", "valid mapping", message.removeprefix("Value error, "))
    message = message.replace("a valid tuple", "a list")
    return message if first else message.removeprefix("Input should be ")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _without_tags(model: type[BaseModel], loc: list[str]) -> tuple[list[str], type[Any] | None]:
    """A location without the tags pydantic puts into it for discriminated unions, and the section its last key is in."""
    kept: list[str] = []
    options: list[type[Any]] = [model]
    for i, part in enumerate(loc):
        if _names_type(part):
            break
        if len(options) > 1 and (tagged := [m for m in options if part in tags_of(m)]):
            options = tagged
            continue
        kept.append(part)
        if part.isdigit() or i == len(loc) - 1:
            continue
        options = sections_in(next((m.model_fields[part].annotation for m in options if part in m.model_fields), None))
    return kept, options[0] if options else None


def keys_of(section: type[Any]) -> list[str]:
    """The keys of a section, or of a grid that is written as a mapping."""
    return [f.name for f in dataclasses.fields(section)] if dataclasses.is_dataclass(section) else list(section.model_fields)


def tags_of(section: type[BaseModel]) -> tuple[str, ...]:
    """The values of `method` or `kind` that choose this section in a union."""
    return tuple(str(v) for key in ("method", "kind") if key in section.model_fields
                 for v in typing.get_args(section.model_fields[key].annotation))


def sections_in(annotation: Any) -> list[type[Any]]:
    """The sections and grids an annotation holds, through lists and unions."""
    if isinstance(annotation, type) and (issubclass(annotation, BaseModel) or annotation is QuantSpec):
        return [annotation]
    if typing.get_origin(annotation) in (tuple, list, Annotated, typing.Union, types.UnionType):
        return [m for a in typing.get_args(annotation) for m in sections_in(a)]
    return []
