"""What the server of `tests/processes.py` imports before it forks."""

import gc

import accelerate  # noqa: F401
import peft  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import karui.inference.engine  # noqa: F401
import karui.trainers.loop  # noqa: F401
import karui.trainers.run  # noqa: F401

gc.collect()
gc.freeze()  # a run ends with `gc.collect`, which would go through all of it, in every process
