"""``python deepspeed_writer.py OUT``: DeepSpeed trains the tiny model's connector with ZeRO 2, then 3, and saves as DeepSpeed saves."""

import sys
from pathlib import Path

import deepspeed
import torch
from tiny_run import tiny_run

from mmkit.data.loader import loader
from mmkit.models.build import image_transforms, tokenizer
from mmkit.training.loss import LanguageObjective
from mmkit.training.weights import build_model, prepare_model

MOMENTS = ("exp_avg", "exp_avg_sq")


def write(out: Path, stage: int, batch: dict) -> None:
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    run = tiny_run(out)
    torch.manual_seed(run.seed)
    model, stored, parts = build_model(run, None)
    prepare_model(model, run, parts.COMPONENTS, stored)
    module = LanguageObjective(model)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True}
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    for _ in range(3):
        engine.backward(engine(batch)["loss_sum"])
        engine.step()
    engine.save_checkpoint(str(out / f"zero{stage}"))
    held = {}
    for name, p in module.named_parameters():
        if p.requires_grad:
            whole = {"param": safe_get_full_fp32_param(p), **{m: safe_get_full_optimizer_state(p, m) for m in MOMENTS}}
            held[name.removeprefix("model.")] = {key: value.clone() for key, value in whole.items()}
    if torch.distributed.get_rank() == 0:
        torch.save(held, out / f"zero{stage}.pt")


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    given = tiny_run(folder)
    batch = next(loader(given.data, given.model, tokenizer(given.model), image_transforms(given.model), train=True, device_batch=2)).tensors
    deepspeed.init_distributed(dist_backend="gloo")
    for stage in (2, 3):
        write(folder, stage, batch)
