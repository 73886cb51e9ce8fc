"""From files to packed batches: sources, chat templates and masks, samples, packing, and the proof that packing isolates."""

from karui.trainers.data.dataset import load_samples, read_data
from karui.trainers.data.isolation import isolation_probe, prove_isolation
from karui.trainers.data.loader import StepLoader
from karui.trainers.data.packing import EpochPlan, collate, epoch_order, plan_epoch, total_steps
from karui.trainers.data.sources import shipped_samples
from karui.trainers.data.types import IGNORE, Counts, PackedBatch, Sample, SampleSet, documents_of_tokens

__all__ = ["IGNORE", "Counts", "EpochPlan", "PackedBatch", "Sample", "SampleSet", "StepLoader", "collate", "documents_of_tokens",
           "epoch_order", "isolation_probe", "load_samples", "plan_epoch", "prove_isolation", "read_data", "shipped_samples",
           "total_steps"]
