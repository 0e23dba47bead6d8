"""Stands in for timm's train.py, which its wheel does not ship: the same calls in the same order, on noise. Knows nothing of masks."""

import argparse
import os

import torch
from timm import utils
from timm.models import create_model, resume_checkpoint
from timm.optim import create_optimizer_v2, optimizer_kwargs


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind, default in (("--opt", str, "adamw"), ("--lr", float, 1e-3), ("--epochs", int, 1), ("--resume", str, ""), ("--output", str, "")):
        parser.add_argument(name, type=kind, default=default)
    parser.add_argument("--no-resume-opt", action="store_true")
    args = parser.parse_args()
    args.model, args.weight_decay, args.momentum, args.sched = "vit_tiny_patch16_224", 0.05, 0.9, "none"
    torch.manual_seed(0)
    model = create_model(args.model, pretrained=False, num_classes=10, img_size=32, embed_dim=48, depth=2, num_heads=3)
    model.to(device=torch.device("cpu"))
    optimizer = create_optimizer_v2(model, **optimizer_kwargs(cfg=args))
    start = 0
    if args.resume:
        start = resume_checkpoint(model, args.resume, optimizer=None if args.no_resume_opt else optimizer, log_info=False) or 0
    os.makedirs(args.output, exist_ok=True)
    saver = utils.CheckpointSaver(model=model, optimizer=optimizer, args=None, checkpoint_dir=args.output, recovery_dir=args.output, max_history=1)
    model.train()
    for epoch in range(start, args.epochs):
        for update in range(4):
            g = torch.Generator().manual_seed(100 * epoch + update)
            x, y = torch.randn(4, 3, 32, 32, generator=g), torch.randint(0, 10, (4,), generator=g)
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        saver.save_checkpoint(epoch, metric=float(epoch))


if __name__ == "__main__":
    main()
