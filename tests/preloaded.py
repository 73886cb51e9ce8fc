"""What the server of `tests/processes.py` imports before it forks."""

import accelerate  # noqa: F401
import peft  # noqa: F401
import torch.distributed.tensor  # noqa: F401
import transformers.models.llama.modeling_llama  # noqa: F401

import karui.inference.engine  # noqa: F401
import karui.trainers.loop  # noqa: F401
import karui.trainers.run  # noqa: F401
