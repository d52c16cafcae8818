"""An ordinary DistributedDataParallel training: `torchrun --nproc-per-node 2 ddp.py`. Nothing in it knows of stoker."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def stripes(count: int, seed: int) -> TensorDataset:
    """Make noisy images of 16×16 pixels: stripes that lie (class 0) or stand (class 1)."""
    random = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=random)
    lying = torch.arange(16).remainder(4).lt(2).float().view(1, 1, 16, 1).expand(count, 1, 16, 16)
    images = torch.where(labels.view(-1, 1, 1, 1) == 0, lying, lying.transpose(2, 3))
    return TensorDataset(images + 0.5 * torch.randn(images.shape, generator=random), labels)


def main() -> None:
    """Train, keep a checkpoint of each epoch, and go on from the one that is there."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save", type=Path, default=Path("ddp.pt"))
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    dataset = stripes(1024, seed=1)
    sampler: DistributedSampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2))
    model = DistributedDataParallel(net.to(device), device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    first = 0
    if args.save.exists():
        saved = torch.load(args.save, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["epoch"] + 1
        if rank == 0:
            print(f"going on from {args.save}, with epoch {first}", flush=True)
    for epoch in range(first, args.epochs):
        sampler.set_epoch(epoch)
        right = torch.zeros(1, device=device)
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            scores = model(images)
            optimizer.zero_grad()
            cross_entropy(scores, labels).backward()
            optimizer.step()
            right += (scores.argmax(1) == labels).sum()
        dist.all_reduce(right)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, args.save.with_suffix(".new"))
            args.save.with_suffix(".new").replace(args.save)
            print(f"epoch {epoch} on {world} ranks: {right.item() / len(dataset):.1%} right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
