"""The student's rollouts of TRL's GKDTrainer: tokens/s of its own call in `training_step`. Runs in TRL's own environment.

    python trl_gkd_rollouts.py MODEL_DIR QUESTIONS.json OUT.json [--batch 8] [--new-tokens 96] [--rounds 1] [--threads 0]

With TRL's defaults gradients are checkpointed, and its trainer then generates without a KV cache; `--cache` turns checkpointing off.
Every rollout has exactly `--new-tokens` tokens. The teacher takes no part in generation; the student stands in for it.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl.experimental.gkd import GKDConfig, GKDTrainer
from trl.models.utils import unwrap_model_for_generation

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("questions")
parser.add_argument("out", type=Path)
parser.add_argument("--batch", type=int, default=8)
parser.add_argument("--new-tokens", type=int, default=96)
parser.add_argument("--rounds", type=int, default=1)
parser.add_argument("--threads", type=int, default=0)
parser.add_argument("--cache", action="store_true")
args = parser.parse_args()
if args.threads:
    torch.set_num_threads(args.threads)
set_seed(0)
rows = [{"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": "?"}]} for q in json.loads(Path(args.questions).read_text())]
model = AutoModelForCausalLM.from_pretrained(args.model, dtype="float32")
trainer = GKDTrainer(
    model,
    teacher_model=model,
    args=GKDConfig(
        output_dir=tempfile.mkdtemp(), max_steps=1, per_device_train_batch_size=args.batch, max_length=512, report_to=[], save_strategy="no",
        use_cpu=True, bf16=False, seed=0, temperature=1.0, lmbda=1.0, max_new_tokens=args.new_tokens, disable_tqdm=True,
        **({"gradient_checkpointing": False} if args.cache else {}),
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(args.model),
)
trainer.generation_config.min_new_tokens = args.new_tokens
inputs = next(iter(trainer.get_train_dataloader()))
rates = []
for _ in range(args.rounds):
    begin = time.perf_counter()
    with torch.no_grad(), unwrap_model_for_generation(
        trainer.model_wrapped, trainer.accelerator, generation_kwargs=trainer.generation_kwargs,
        gradient_checkpointing_kwargs=trainer.args.gradient_checkpointing_kwargs,
    ) as student:
        tokens, _, _ = trainer.generate_on_policy_outputs(student, inputs, trainer.generation_config)
    written = len(tokens) * (tokens.shape[1] - inputs["prompts"].shape[1])
    assert written == len(tokens) * args.new_tokens
    rates.append(written / (time.perf_counter() - begin))
args.out.write_text(json.dumps({"tokens_per_s": rates, "use_cache": bool(trainer.generation_config.use_cache), "batch": len(tokens)}))
