"""TRL's SFTTrainer with a LoRA on prompt-completion rows: speed, peak memory, losses. Runs in TRL's own environment.

    python trl_sft_speed.py MODEL_DIR ROWS.json OUT_DIR [--steps 10] [--batch 4] [--gradient-checkpointing]

ROWS.json is a list of {"prompt": [messages], "completion": [messages]}. OUT_DIR receives what the other side needs to do the
same work: samples.json (token ids and completion masks as TRL made them), init/ (the adapter before training) and result.json.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoTokenizer, set_seed
from trl import SFTConfig, SFTTrainer


class InOrder(SFTTrainer):
    """The samples in the order of the file, so that both sides see the same ones in every step."""

    def _get_train_sampler(self, *args, **kwargs):
        return SequentialSampler(self.train_dataset)


parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("rows")
parser.add_argument("out", type=Path)
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--threads", type=int, default=0)
parser.add_argument("--gradient-checkpointing", action="store_true")
args = parser.parse_args()
if args.threads:
    torch.set_num_threads(args.threads)
args.out.mkdir(parents=True, exist_ok=True)
rows = json.loads(Path(args.rows).read_text())[: args.steps * args.batch]
set_seed(0)
trainer = InOrder(
    AutoModelForCausalLM.from_pretrained(args.model, dtype="float32"),
    args=SFTConfig(
        output_dir=tempfile.mkdtemp(), max_steps=args.steps, per_device_train_batch_size=args.batch, max_length=512,
        learning_rate=2e-4, report_to=[], logging_steps=1, save_strategy="no", use_cpu=True, bf16=False, seed=0,
        gradient_checkpointing=args.gradient_checkpointing, disable_tqdm=True,
    ),
    train_dataset=Dataset.from_list(rows),
    processing_class=AutoTokenizer.from_pretrained(args.model),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
samples = [
    {"ids": list(s["input_ids"]), "mask": [bool(m) for m in s.get("completion_mask") or [x != -100 for x in s["labels"]]]}
    for s in trainer.train_dataset
]
(args.out / "samples.json").write_text(json.dumps(samples))
trainer.model.save_pretrained(str(args.out / "init"))
start = time.perf_counter()
trainer.train()
seconds = time.perf_counter() - start
log = [h for h in trainer.state.log_history if "loss" in h]
result = {
    "tokens": sum(len(s["ids"]) for s in samples),
    "seconds": seconds,
    "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    "losses": [h["loss"] for h in log],
    "num_tokens_reported": log[-1].get("num_tokens"),
    "threads": torch.get_num_threads(),
}
(args.out / "result.json").write_text(json.dumps(result))
