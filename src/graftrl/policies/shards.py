"""A model's weights and optimizer as files of parts, one file a rank, which any number of ranks can read.

    shards/shard-00001-model-00001-of-00002.safetensors    rank 0's part of the weights
    shards/shard-00001-model-00002-of-00002.safetensors    rank 0's part of AdamW's moments
    shards/shard-00002-...                                 rank 1's

These are PyTorch's distributed checkpoints in their safetensors form: where a part lies in its tensor stands as JSON in
the file's header. Nothing is pickled, so that reading a checkpoint runs no code of whoever wrote it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from graftrl.errors import ModelError

FOLDER = "shards"
BUFFERS = "buffers.safetensors"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW, each as large as its parameter


def is_sharded(folder: Path) -> bool:
    """Whether a model's folder holds parts, as `write` left them."""
    return (folder / FOLDER).is_dir()


def write(folder: Path, weights: Mapping[str, Tensor], moments: Mapping[str, Tensor], group: Any) -> Future[Any]:
    """Copy the tensors and start to write this rank's parts of them; all ranks call it together.

    Args:
        weights, moments: of distributed tensors the own part is written, of others one rank's copy.
        group: of processes that no other work uses meanwhile, on a host's backend.

    Returns:
        what ends when every rank's files are on the disk, or with the error of whichever rank had one. The tensors may
        change as soon as this returns.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # the import takes a second
    from torch.distributed.checkpoint.state_dict_saver import async_save

    index = dict.fromkeys(weights, 1) | dict.fromkeys(moments, 2)
    writer = HuggingFaceStorageWriter(str(folder / FOLDER), index, save_distributed=True)
    # What lies on a GPU is copied to the host by `async_save`; what lies there already would be written as it changes.
    copies = {name: _copied(value) for name, value in {**weights, **moments}.items()}
    found = async_save(copies, storage_writer=writer, process_group=group)
    assert isinstance(found, Future)
    return found


def write_buffers(folder: Path, causal_lm: nn.Module) -> None:
    """Those that no weights file holds too, such as rotary frequencies; one rank's, since all have the same."""
    save_file({name: value.contiguous().cpu() for name, value in causal_lm.named_buffers()}, folder / BUFFERS)


def read_buffers(folder: Path) -> dict[str, Tensor]:
    """Raises ModelError as `read`."""
    with _named_errors(folder):
        return load_file(folder / BUFFERS)


def finish(writing: Future[Any]) -> None:
    """Wait for what `write` began. Raises what went wrong on some rank, as a plain error."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        writing.result()
    except CheckpointException as error:  # no Exception by its class
        raise RuntimeError(str(_first(error))) from error


def signed_when_done(writing: Future[Any], folder: Path, rank: int) -> Future[Any]:
    """Leave word beside the parts when all are written, for a time when this rank cannot be asked any more.

    Returns:
        what is done once word is left: who waits for `writing` itself may be faster, and rename the folder.
    """
    signing: Future[Any] = Future()

    def sign(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            try:
                _signature(folder, rank).touch()
            except OSError as failed:
                error = failed
        if error is None:
            signing.set_result(None)
        else:
            signing.set_exception(error)

    writing.add_done_callback(sign)
    return signing


def signed(folder: Path, ranks: int) -> bool:
    """Whether all ranks left word, where this process can see it."""
    return all(_signature(folder, rank).is_file() for rank in range(ranks))


def _signature(folder: Path, rank: int) -> Path:
    return folder / FOLDER / f"written-{rank + 1:05d}"


def own_files(folder: Path, rank: int) -> list[str]:
    """What this rank wrote."""
    return sorted(file.name for file in (folder / FOLDER).glob(f"shard-{rank + 1:05d}-*.safetensors"))


def read(folder: Path, into: Mapping[str, Tensor], group: Any = None) -> None:
    """Fill tensors, whole or distributed, from the parts. Ranks with distributed ones call it together.

    Raises:
        ModelError: a file is missing, torn, or of another model.
    """
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
    from torch.distributed.checkpoint.state_dict_loader import load

    with _named_errors(folder):
        reader = HuggingFaceStorageReader(str(folder / FOLDER))
        _check_cover(reader.read_metadata(), into)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is all there is
            load(dict(into), storage_reader=reader, process_group=group, no_dist=group is None)


def moment(key: str, parameter: str) -> str:
    return f"optimizer.{key}.{parameter}"


def named(causal_lm: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, a shared one once."""
    return {name: parameter.detach() for name, parameter in causal_lm.named_parameters()}


def read_whole(folder: Path, skeleton: nn.Module) -> dict[str, Tensor]:
    """The weights of a model of this shape, as its `state_dict` names them, a shared one once; on the host.

    Raises:
        ModelError: as `read`.
    """
    weights = {name: torch.empty(p.shape, dtype=p.dtype) for name, p in named(skeleton).items()}
    read(folder, weights)
    kept = skeleton.state_dict().keys()
    return weights | {name: value for name, value in read_buffers(folder).items() if name in kept}


def _copied(value: Tensor) -> Tensor:
    return value.detach().clone() if value.device.type == "cpu" else value.detach()


def _check_cover(metadata: Any, into: Mapping[str, Tensor]) -> None:
    """The reader takes whatever files there are, and would leave holes where one is missing."""
    for name, tensor in into.items():
        saved = metadata.state_dict_metadata.get(name)
        if saved is None:
            raise ValueError(f"there is no {name}")
        covered = sum(math.prod(chunk.sizes) for chunk in saved.chunks)
        if tuple(saved.size) != tuple(tensor.shape) or covered != tensor.numel():
            raise ValueError(
                f"{name} has {covered} of {tensor.numel()} numbers, in the shape {tuple(saved.size)} for "
                f"{tuple(tensor.shape)}"
            )


@contextmanager
def _named_errors(folder: Path) -> Iterator[None]:
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:  # no Exception by its class
        raise _torn(folder, _first(error)) from error
    except (OSError, ValueError, KeyError, RuntimeError, AssertionError, SafetensorError) as error:
        raise _torn(folder, error) from error


def _first(error: Any) -> BaseException:
    found: BaseException = next(iter(error.failures.values()))[0]
    return found


def _torn(folder: Path, error: BaseException) -> ModelError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return ModelError(f"{folder / FOLDER}: the checkpoint's parts cannot be read: {reason}; take an older checkpoint")
