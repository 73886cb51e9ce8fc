"""DeepSpeed ZeRO 1, 2 and 3 (arXiv 1910.02054): optimizer states, then gradients, then parameters split over the ranks.

Asked for by `run.sharding: zero1 | zero2 | zero3`, or by `accelerate launch` with a DeepSpeed configuration. As with FSDP2 the
module is wrapped here and not by accelerate, so that CPU ranks (gloo) take the path of GPUs and checkpoints hold whole tensors,
which any number of ranks and any way of launching goes on from.

The engine divides gradients by the number of ranks, as DDP does; it clips, leaves out a step whose gradient is not finite, and
steps the recipe's AdamW on flat fp32 partitions. In stage 3 a decoder layer is gathered as a whole while it computes.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from karui.configs.errors import KaruiError, UnsupportedError
from karui.configs.recipe import Recipe
from karui.configs.steps.lowprec import LowPrecisionStep

if TYPE_CHECKING:
    from collections.abc import Sequence

    from accelerate import Accelerator

    from karui.trainers.stages import Stage

logger = logging.getLogger(__name__)
USE = "ACCELERATE_USE_DEEPSPEED"
BUCKET = 50_000_000  # values that are summed over the ranks at once; deepspeed's own default takes 2 GB


def launched(environment: Mapping[str, str]) -> bool:
    """Whether `accelerate launch` was given a DeepSpeed configuration."""
    return environment.get(USE, "").lower() in ("true", "1")


def stage_of(recipe: Recipe, environment: Mapping[str, str]) -> int:
    """ZeRO's stage as recipe and launch say together; 0: no DeepSpeed.

    Raises:
        KaruiError: the recipe asks for another way than the launch.
    """
    asked = int(recipe.run.sharding[-1]) if recipe.run.sharding.startswith("zero") else 0
    if not launched(environment):
        return asked
    stage = int(_given(environment).get("zero_optimization", {}).get("stage", 0))
    if recipe.run.sharding in ("none", "fsdp2") or asked not in (0, stage):
        raise KaruiError(f"run.sharding is {recipe.run.sharding}, but the run was launched with DeepSpeed ZeRO {stage}; leave it "
                         "at auto, or launch another way.")
    if stage == 0:
        raise UnsupportedError("the DeepSpeed configuration has ZeRO stage 0, which splits nothing; launch with DDP, or set "
                               "zero_stage to 1, 2 or 3.")
    return stage


def check(recipe: Recipe, loss: nn.Module, stages: Sequence[Stage]) -> None:
    """Refuse, before anything is trained, what the engine cannot serve or is not there for.

    Raises:
        UnsupportedError: deepspeed is not installed, or a part of the recipe needs to see what its engine does by itself.
    """
    from karui.trainers.stages import Stage

    if find_spec("deepspeed") is None:
        raise UnsupportedError("DeepSpeed ZeRO is asked for and deepspeed is not installed; pip install 'karui[deepspeed]', or "
                               "use run.sharding: fsdp2, which splits what ZeRO 3 splits.")
    low = next((step for step in recipe.prepare if isinstance(step, LowPrecisionStep)), None)
    after = next((s for s in stages if type(s).after_step is not Stage.after_step), None)
    odd = next((n for n, p in loss.named_parameters() if p.requires_grad and p.dtype != torch.float32), None)
    reason = ""
    if recipe.optim.name != "adamw":
        reason = f"optim.name {recipe.optim.name} needs whole matrices and the engine steps flat partitions; use adamw"
    elif low is not None:
        reason = f"the scales of low-precision linears ({low.method}) follow a step that the engine makes by itself"
    elif after is not None:
        reason = f"prepare: {after.step.method} changes weights after a step, and the engine would write its own copy over them"
    elif recipe.objective.kind != "sft":
        reason = f"objective {recipe.objective.kind} runs the model outside of the engine"
    elif recipe.moe.active:
        reason = "balancing of experts (moe:) adds to gradients and moves biases beside the engine, which has not been tried"
    elif odd is not None:
        reason = f"{odd} is not in float32, which is what the engine steps; set model.dtype: float32 and run.precision: bf16"
    elif recipe.run.precision == "fp16":
        reason = "run.precision fp16 needs the engine's loss scale; use bf16"
    if reason:
        raise UnsupportedError(f"DeepSpeed ZeRO does not serve this recipe: {reason}, or launch with DDP or run.sharding: fsdp2.")


def configuration(recipe: Recipe, stage: int, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the engine is given: the launch's configuration, with batch, clipping and reports as the recipe has them."""
    given = _given(environment) if launched(environment) else {}
    zero = {"overlap_comm": False, "reduce_bucket_size": BUCKET, **given.get("zero_optimization", {}), "stage": stage}
    return {
        "zero_optimization": zero, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.optim.clip or 0.0, "steps_per_print": 1 << 40, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }  # fmt: skip


def _given(environment: Mapping[str, str]) -> dict[str, Any]:
    """The `zero_optimization` of the launcher: its JSON file, or its ACCELERATE_DEEPSPEED_* variables."""
    path = environment.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    if path.lower() not in ("", "none"):
        try:
            found = json.loads(Path(path).read_text(encoding="utf-8"))
            zero = dict(found.get("zero_optimization", {}))
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise KaruiError(f"the DeepSpeed configuration {path} cannot be read: {error}") from error
        if ignored := sorted(set(found) - {"zero_optimization"}):
            logger.warning("of the DeepSpeed configuration only zero_optimization counts; the recipe has %s", ", ".join(ignored))
        return {"zero_optimization": {k: v for k, v in zero.items() if v != "auto"}}
    zero = {"stage": int(environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2"))}
    for kind in ("optimizer", "param"):
        device = environment.get(f"ACCELERATE_DEEPSPEED_OFFLOAD_{kind.upper()}_DEVICE", "none").lower()
        if device == "nvme":
            raise UnsupportedError("DeepSpeed's offload to NVMe is not supported; offload to cpu.")
        if device == "cpu":
            zero[f"offload_{kind}"] = {"device": "cpu"}
    return {"zero_optimization": zero}


def spread(
    loss: nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe, accelerator: Accelerator, stage: int
) -> ZeroOptimizer:
    """Put an objective module under the engine; every rank holds the same values before."""
    if accelerator.device.type == "cpu":
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    import deepspeed

    if recipe.run.precision == "bf16":  # inside the engine, which ends an autocast around it
        loss.forward = torch.autocast(accelerator.device.type, torch.bfloat16)(loss.forward)
    if stage == 3:
        from karui.trainers.model import base_model
        from karui.trainers.sharding import decoder_layers

        inner: Any = base_model(loss.model)  # type: ignore[arg-type]
        # below frozen embeddings the engine takes the first layer's gradients for complete before there are any
        inner.get_input_embeddings().register_forward_hook(lambda module, given, out: _with_gradient(out))
        deepspeed.utils.set_z3_leaf_modules(loss, list({type(layer) for layer in decoder_layers(loss)}))
    engine, *_ = deepspeed.initialize(model=loss, optimizer=optimizer, config=configuration(recipe, stage, os.environ))
    if stage == 3:
        # the objective reads it without calling the head
        deepspeed.zero.register_external_parameter(loss, inner.get_output_embeddings().weight)
    return ZeroOptimizer(engine, optimizer, loss, stage)


def _with_gradient(hidden: torch.Tensor) -> torch.Tensor:
    return hidden if hidden.requires_grad or not torch.is_grad_enabled() else hidden.requires_grad_()


class ZeroOptimizer:
    """The engine as the loop and the checkpoints see it.

    Attributes:
        engine: what the loop calls as its module.
        param_groups: of the recipe's optimizer; learning rates set here count.
    """

    def __init__(self, engine: Any, inner: torch.optim.Optimizer, loss: nn.Module, stage: int) -> None:
        self.engine, self.inner, self.loss, self.stage = engine, inner, loss, stage
        # deepspeed links parameters with states after the first group's step, when the second group has none yet
        for flat in self._flat():
            moments = {kind: torch.zeros_like(flat) for kind in ("exp_avg", "exp_avg_sq")}
            inner.state[flat] = {"step": torch.zeros((), device=flat.device), **moments}
        if stage != 3:
            engine.optimizer._lazy_init_hp_params_optimizer_state()

    def _flat(self) -> list[torch.Tensor]:
        """This rank's fp32 partitions, which the recipe's optimizer steps."""
        optimizer = self.engine.optimizer
        return list(optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.inner.param_groups

    def backward(self, loss_sum: torch.Tensor, *, last: bool) -> None:
        """Add a micro-batch's gradient; with the `last` of a step they are complete."""
        self.engine.set_gradient_accumulation_boundary(last)
        self.engine.backward(loss_sum, scale_wrt_gas=False)
        if not last:
            self.engine.step()  # counts the micro-batch

    def update(self, *, usable: bool) -> float:
        """Clip and step, unless the step is not `usable` or its gradient not finite; the norm before clipping."""
        if not usable:
            self._spoil()
        self.engine.step()
        norm = float(self.engine.get_global_grad_norm())
        return math.inf if self.engine.optimizer.overflow or norm < 0 else norm

    def _spoil(self) -> None:
        """Make the gradient NaN on every rank: a step with such a one the engine leaves out and cleans up after."""
        for gradients in self.engine.optimizer.averaged_gradients.values():
            for gradient in gradients or ():
                gradient.fill_(math.nan)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The moments whole, by `KIND/parameter name`, on the CPU. A collective."""
        from deepspeed.utils import safe_get_full_optimizer_state

        step = self.inner.state[self._flat()[0]]["step"].cpu()
        found: dict[str, torch.Tensor] = {}
        for name, parameter in self._trained():
            for kind in ("exp_avg", "exp_avg_sq"):
                value = safe_get_full_optimizer_state(parameter, kind)
                found[f"{kind}/{name}"] = value.detach().cpu().reshape(self.shape(parameter)).clone()
            found[f"step/{name}"] = step.clone()
        return found

    def restore(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """The inverse of `tensors`."""
        from deepspeed.utils import safe_set_full_optimizer_state

        flats = self._flat()
        for flat in flats:
            self.inner.state[flat]["step"].copy_(next(v for k, v in tensors.items() if k.startswith("step/")))
        for name, parameter in self._trained():
            for kind in ("exp_avg", "exp_avg_sq"):
                value = tensors[f"{kind}/{name}"].to(flats[0].device)
                if self.stage == 3:
                    self._set_part(parameter, kind, value)
                else:
                    safe_set_full_optimizer_state(parameter, value, kind)

    def _set_part(self, parameter: torch.Tensor, kind: str, value: torch.Tensor) -> None:
        """This rank's piece of a whole value; the last piece is filled up with zeros."""
        from deepspeed.utils import safe_get_local_optimizer_state, safe_set_local_optimizer_state

        size = safe_get_local_optimizer_state(parameter, kind).numel()
        world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
        flat = torch.nn.functional.pad(value.flatten(), (0, size * world - value.numel()))
        safe_set_local_optimizer_state(parameter, flat[rank * size : (rank + 1) * size], kind)

    def _trained(self) -> list[tuple[str, nn.Parameter]]:
        return [(n, p) for n, p in self.loss.named_parameters() if p.requires_grad]

    @staticmethod
    def shape(parameter: Any) -> torch.Size:
        return torch.Size(getattr(parameter, "ds_shape", parameter.shape))

    @contextmanager
    def gathered(self, *, frozen: bool) -> Iterator[None]:
        """Within, modules hold whole parameters, frozen ones too if asked. A collective."""
        if self.stage != 3:
            yield
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([p for p in self.loss.parameters() if frozen or p.requires_grad]):
            yield
