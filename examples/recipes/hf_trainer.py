"""Masks under Hugging Face's `Trainer`: a callback that guards its optimiser, and saves and resumes the masks' state with its checkpoints.

    python examples/recipes/hf_trainer.py --steps 20 --out runs/hf
    python examples/recipes/hf_trainer.py --steps 40 --out runs/hf --resume

In your own script:

    model = fxmask.apply(model, ratio=0.8, block=(32, 32))
    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[MaskCallback()])
    trainer.train(resume_from_checkpoint=True)

Tested with one process and Trainer's default optimiser, fused AdamW. Under DDP nothing changes. Trainer's own FSDP and DeepSpeed are not tested.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import uuid
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchvision_shim import import_torchvision  # for a CPU build of torch beside torchvision's default wheel; leave it out elsewhere

with contextlib.suppress(ImportError):  # transformers does without
    import_torchvision()

try:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_callback import ExportableState
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"hf_trainer.py: {error}\n  fix: pip install 'fxmask[models]', or transformers and accelerate", file=sys.stderr)
    sys.exit(2)

import fxmask

FILE = "fxmask.pt"


class MaskCallback(TrainerCallback, ExportableState):
    """Guards the optimiser while training lasts; `fxmask.pt` in each checkpoint folder holds the masks' state.

    Trainer does not tell a callback which folder it resumes from. The file is looked for in the folder that `TrainingArguments.resume_from_checkpoint` names,
    then in `output_dir`; a mark in Trainer's own state and in the file shows that it is the right one. Arguments: those of `fxmask.guard`.
    """

    def __init__(self, masked_weights: str = "auto", returning: str = "keep") -> None:
        self.options = dict(masked_weights=masked_weights, returning=returning)
        self.mark = ""
        self.guard: Any = None

    def state(self) -> dict[str, Any]:
        """What Trainer writes into `trainer_state.json`, just before `on_save`: a new mark."""
        self.mark = uuid.uuid4().hex
        return {"args": dict(self.options), "attributes": {"mark": self.mark}}

    def on_train_begin(self, args, state, control, model=None, optimizer=None, **kwargs):
        """Weights and optimiser are loaded by now: take up the masks, then guard."""
        if self.guard is not None:
            self.guard.remove()
        if state.global_step:
            fxmask.load_state_dict(model, self._saved(args, state))
        self.guard = fxmask.guard(getattr(optimizer, "optimizer", optimizer), model, **self.options)  # accelerate's wrapper has no step hooks

    def on_save(self, args, state, control, model=None, **kwargs):
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            torch.save({"mark": self.mark, "masks": fxmask.state_dict(model)}, folder / FILE)

    def on_train_end(self, args, state, control, model=None, **kwargs):
        if self.guard is not None:
            self.guard.remove()
            self.guard = None
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:  # Trainer has put that checkpoint's weights there
            fxmask.load_state_dict(model, torch.load(Path(state.best_model_checkpoint) / FILE, weights_only=True)["masks"])

    def _saved(self, args, state) -> dict[str, Any]:
        mark = state.stateful_callbacks.get(type(self).__name__, {}).get("attributes", {}).get("mark")  # of the checkpoint that was loaded
        tried = [Path(args.resume_from_checkpoint)] if isinstance(args.resume_from_checkpoint, str) else []
        tried.append(Path(args.output_dir) / f"checkpoint-{state.global_step}")
        for folder in tried:
            if mark and (folder / FILE).exists():
                found = torch.load(folder / FILE, weights_only=True)
                if found["mark"] == mark:
                    return found["masks"]
        what = f"no masks' state for the checkpoint of step {state.global_step}: expected its {FILE} in {' or '.join(map(str, tried))}."
        raise FileNotFoundError(f"{what}\n  fix: name the checkpoint's folder in TrainingArguments, too: resume_from_checkpoint='...'.")


# ---- a demo: a Llama of two layers learns to count ----------------------------------------------------------------------------------------------------------


class Counting(Dataset):
    """Sequences t, t + 1, t + 2, ... modulo the vocabulary."""

    def __init__(self, vocabulary: int = 64, length: int = 16) -> None:
        self.vocabulary, self.length = vocabulary, length

    def __len__(self) -> int:
        return 256

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        if i >= len(self):  # ends a walk by indices, as `train_sampling_strategy="group_by_length"` takes
            raise IndexError(i)
        tokens = torch.arange(i, i + self.length) % self.vocabulary
        return {"input_ids": tokens, "labels": tokens}


def main(argv: list[str] | None = None) -> Trainer:
    """Train the demo; returns its Trainer."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps in all, those before a resume included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    parser.add_argument("--ratio", type=float, default=0.75)
    parser.add_argument("--save-steps", type=int, default=10)
    args = parser.parse_args(argv)
    if args.resume and not any(args.out.glob("checkpoint-*")):
        parser.error(f"--resume: expected a checkpoint in {args.out}, found none; leave --resume out to begin a run")
    try:
        fxmask.WeightMask(ratio=args.ratio, block=(16, 16))
        args.out.mkdir(parents=True, exist_ok=True)
    except (fxmask.FxMaskError, OSError) as error:
        parser.error(str(error).splitlines()[0])

    torch.manual_seed(0)
    sizes = dict(vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=32, tie_word_embeddings=False))
    model = fxmask.apply(model, ratio=args.ratio, block=(16, 16), exclude="lm_head", schedule=fxmask.Schedule("cubic", steps=15))
    options = TrainingArguments(
        output_dir=str(args.out),
        max_steps=args.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        weight_decay=0.05,
        save_steps=args.save_steps,
        logging_steps=10,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=0,
    )
    trainer = Trainer(model=model, args=options, train_dataset=Counting(), callbacks=[MaskCallback()])
    trainer.train(resume_from_checkpoint=args.resume or None)
    print(fxmask.explain(model))
    return trainer


if __name__ == "__main__":
    main()
