"""A training loop of your own on stoker's loader. It resumes, and tells how far it is: `stoker job run own_loop.yaml`.

It also runs without a job: `STOKER_DATA_TRAIN=shards/train torchrun --nproc-per-node 2 own_loop.py`.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from stoker.load.torch import Dataset, normalise
from stoker.telemetry import recorder

EPOCHS, BATCH, SIZE = 2, 64, 32


def main() -> None:
    """Train, keep a checkpoint of each epoch, and go on from the one that is there."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    record = recorder()

    dataset = Dataset(
        os.environ["STOKER_DATA_TRAIN"], global_batch=BATCH, size=SIZE, transform="small-train", seed=1, device=device
    )
    classes = len(dataset.loader.set.manifest.classes)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(256, classes))
    model = DistributedDataParallel(net.to(device), device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    step = 0
    path = Path(os.environ.get("STOKER_CHECKPOINT_DIR", "checkpoints")) / "own_loop.pt"
    if path.exists():
        saved = torch.load(path, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dataset.load_state_dict(saved["data"])
        step = saved["step"]
    while dataset.state_dict()["epoch"] < EPOCHS:
        for batch in dataset:  # the rest of the epoch
            scores = model(normalise(batch.images))
            # A sum over a fixed number: right also where a rank's share of the last batch is small or empty.
            loss = cross_entropy(scores, batch.labels, reduction="sum") * world / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            record.heartbeat(step)  # `stoker job status` knows the step, and a rank that hangs is found
        if rank == 0:
            record.scalar("loss", loss.item(), step)
            print(f"epoch {dataset.state_dict()['epoch']} of {EPOCHS} is done, step {step}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "data": dataset.state_dict(), "step": step}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # a kill leaves the old one or the new one
    dataset.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
