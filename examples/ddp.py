"""Train with DistributedDataParallel: `torchrun --nproc-per-node 2 ddp.py`. The script does not use stoker."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


def make_stripes(count: int, seed: int) -> TensorDataset:
    """Generate noisy images of 16×16 pixels with horizontal (class 0) or vertical (class 1) stripes."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(2, (count,), generator=generator)
    horizontal = torch.arange(16).remainder(4).lt(2).float().view(1, 1, 16, 1).expand(count, 1, 16, 16)
    images = torch.where(labels.view(-1, 1, 1, 1) == 0, horizontal, horizontal.transpose(2, 3))
    return TensorDataset(images + 0.5 * torch.randn(images.shape, generator=generator), labels)


def main() -> None:
    """Train, write a checkpoint after each epoch, and resume from an existing checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--save", type=Path, default=Path("ddp.pt"))
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    dataset = make_stripes(1024, seed=1)
    sampler: DistributedSampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=args.batch_size, sampler=sampler)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(128, 2))
    model = DistributedDataParallel(net.to(device), device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    start_epoch = 0
    if args.save.exists():
        saved = torch.load(args.save, map_location=device)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start_epoch = saved["epoch"] + 1
        if rank == 0:
            print(f"resuming from {args.save} at epoch {start_epoch}", flush=True)
    for epoch in range(start_epoch, args.epochs):
        sampler.set_epoch(epoch)
        correct = torch.zeros(1, device=device)
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            logits = model(images)
            optimizer.zero_grad()
            cross_entropy(logits, labels).backward()
            optimizer.step()
            correct += (logits.argmax(1) == labels).sum()
        dist.all_reduce(correct)
        if rank == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
            torch.save(state, args.save.with_suffix(".new"))
            args.save.with_suffix(".new").replace(args.save)
            print(f"epoch {epoch} on {world_size} ranks: accuracy {correct.item() / len(dataset):.1%}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
