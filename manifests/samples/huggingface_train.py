"""Hugging Face's Trainer as its examples have it: it saves every few steps, and goes on from the last checkpoint if there is one.

It knows nothing of Regroup. Start it with `torchrun` or `accelerate launch`. The Trainer reports step, loss and progress by itself.
"""

import argparse
import os
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output", default="huggingface", help="directory of the checkpoints, the same for all workers")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--every", type=int, default=50, help="steps between two checkpoints")
parser.add_argument("--pace", type=float, default=0.0, help="pretend that a step takes this many seconds")
options = parser.parse_args()


class Pace(TrainerCallback):
    """Says where the process begins, and makes a step of the tiny model take as long as one of a large model."""

    def on_train_begin(self, args, state, control, **kwargs):  # noqa: ARG002
        print(f"process {args.process_index} of {args.world_size} begins at step {state.global_step}", flush=True)

    def on_step_end(self, args, state, control, **kwargs):  # noqa: ARG002
        time.sleep(options.pace)


torch.manual_seed(0)
rows = (torch.arange(16) + torch.arange(960).unsqueeze(1)) % 64  # each row counts up from another number
data = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        output_dir=options.output,
        max_steps=options.steps,
        save_steps=options.every,
        save_total_limit=2,
        logging_steps=10,
        per_device_train_batch_size=4,
        learning_rate=0.01,
        report_to="none",
    ),
    train_dataset=data,
    callbacks=[Pace()],
)
last = get_last_checkpoint(options.output) if os.path.isdir(options.output) else None
result = trainer.train(resume_from_checkpoint=last)
trainer.save_model()
me, n = trainer.args.process_index, trainer.args.world_size
print(f"process {me} of {n} ends at step {result.global_step} with loss {result.training_loss:.4f}", flush=True)
