"""On-policy distillation: the student writes, the teacher judges every token it wrote.

    rollout    what was drawn, from whom, and which tokens carry loss; conversations of several turns
    schedule   whose text a sample carries at a step: the data's or the student's
    buffer     rollouts that wait for their step, with the version of the weights they came from
    drift      how far the sampler's probabilities are from the trainer's

The engine comes in as a `Sampler`; `karui.trainers.objectives.on_policy` wires one.
"""
