"""Train with your own loop and the stoker loader, with resume and heartbeats: `stoker job run own_loop.yaml`.

It also runs without a job: `STOKER_DATA_TRAIN=shards/train torchrun --nproc-per-node 2 own_loop.py`.
"""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from stoker.load.torch import Dataset, normalize
from stoker.telemetry import recorder

EPOCHS, BATCH, SIZE = 2, 64, 32


def main() -> None:
    """Train, write a checkpoint after each epoch, and resume from an existing checkpoint."""
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    record = recorder()

    dataset = Dataset(
        os.environ["STOKER_DATA_TRAIN"], global_batch=BATCH, size=SIZE, transform="small-train", seed=1, device=device
    )
    classes = len(dataset.loader.shard_set.manifest.classes)
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
            logits = model(normalize(batch.images))
            # Divide the sum by the global batch size: correct even if a rank has few or no samples in the last batch.
            loss = cross_entropy(logits, batch.labels, reduction="sum") * world_size / BATCH
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            record.heartbeat(step)  # progress for `stoker job status` and hang detection
        if rank == 0:
            record.scalar("loss", loss.item(), step)
            print(f"epoch {dataset.state_dict()['epoch']} of {EPOCHS} finished at step {step}", flush=True)
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({**state, "data": dataset.state_dict(), "step": step}, path.with_suffix(".new"))
            path.with_suffix(".new").replace(path)  # atomic: a kill leaves the old or the new checkpoint
    dataset.close()
    dist.barrier()  # Gloo may abort a rank that exits right after its last all-reduce
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
