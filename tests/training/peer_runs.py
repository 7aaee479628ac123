"""What tests of stored and of live peers share."""

import polars as pl
import torch
from safetensors.torch import load_file

from graftrl.training.loop import train
from graftrl.training.progress import Silent
from graftrl.training.run_folder import RunFolder

COIN = {"kind": "function", "prompts": "toy_task:prompts", "verifier": "toy_task:coin"}


def run_recipe(recipe, root, display=None):
    run = RunFolder.create(root, recipe)
    train(run, recipe, display or Silent())
    return run


def weights_at(step, run, model):
    return load_file(run.checkpoints / f"step-{step:06d}" / model / "model.safetensors")


def same_weights(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def exchanged(run, **equal):
    frame = pl.concat([pl.read_parquet(file) for file in sorted((run.root / "exchange").glob("*.parquet"))])
    return frame.filter(*[pl.col(key) == value for key, value in equal.items()])
