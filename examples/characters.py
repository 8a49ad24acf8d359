"""A small transformer that learns to write, a character at a time; killed at any point, it goes on bit for bit.

    python examples/characters.py                          one process, checkpoints in a temporary folder
    deepvm run plan.json -- examples/characters.py         the machines of a plan, which tell it the rest

It reads this project's LICENSE, or any other text: ``--text FILE``. The lines that deepvm needs are numbered.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

import deepvm
from deepvm.checkpoint import deterministic, with_final_buckets

LICENSE = Path(__file__).resolve().parent.parent / "LICENSE"
WINDOW = 48  # characters that it sees
WIDTH, HEADS, LAYERS = 64, 4, 2
WARM_UP = 20  # steps


class Windows(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Every stretch of a text, and the same one character further."""

    def __init__(self, text: str) -> None:
        self.letters = sorted(set(text))
        self.codes = torch.tensor([self.letters.index(letter) for letter in text])

    def __len__(self) -> int:
        return len(self.codes) - WINDOW

    def __getitem__(self, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.codes[start : start + WINDOW], self.codes[start + 1 : start + WINDOW + 1]


class Writer(nn.Module):
    def __init__(self, letters: int) -> None:
        super().__init__()
        self.letter, self.place = nn.Embedding(letters, WIDTH), nn.Embedding(WINDOW, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.1, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, letters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(WINDOW), persistent=False)

    def forward(self, codes: torch.Tensor) -> torch.Tensor:
        length = codes.shape[1]
        x = self.letter(codes) + self.place.weight[:length]
        x = self.layers(x, mask=self.mask[:length, :length], is_causal=True)
        return self.head(x)


def train(options: argparse.Namespace, store: str | None) -> None:
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    deterministic(options.seed, threads=1)
    data = Windows(options.text.read_text(encoding="utf-8"))
    model = Writer(len(data.letters))
    network = with_final_buckets(DistributedDataParallel(model)) if world_size > 1 else model
    share = deepvm.share_of_batch(options.batch)  # (1) however many processes there are
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: share.lr_factor * min(1.0, (step + 1) / WARM_UP)
    )
    sampler = deepvm.ResumableSampler(data, global_batch=share.global_batch, seed=options.seed)  # (2)
    loader = deepvm.resumable(DataLoader(data, batch_sampler=sampler))
    torch.manual_seed(options.seed + 1 + rank)  # dropout is another one on each rank

    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "loader": loader}
    with deepvm.Checkpointer(state, store) as ckpt:  # (3)
        step = ckpt.restore() or 0  # (4)
        tell(rank, f"begins after step {step} of {options.steps}, {world_size} x {share.per_rank} stretches each")
        while step < options.steps:
            for x, y in loader:
                ends = time.monotonic() + options.step_time
                loss = nn.functional.cross_entropy(network(x).flatten(0, 1), y.flatten())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                step += 1
                time.sleep(max(0.0, ends - time.monotonic()))
                ckpt.step(step)  # (5)
                if step % 50 == 0:
                    tell(rank, f"step {step}: loss {loss.item():.4f}")
                if step == options.steps:
                    break
    if rank == 0:
        tell(rank, f"it writes: {write(model, data, 'The License ', 60)!r}")
        keep_weights(model, options.save_weights)


@torch.no_grad()
def write(model: Writer, data: Windows, beginning: str, length: int) -> str:
    """Go on with a text, with the likeliest character each time."""
    model.eval()
    codes = [data.letters.index(letter) for letter in beginning if letter in data.letters]
    for _ in range(length):
        codes.append(int(model(torch.tensor([codes[-WINDOW:]]))[0, -1].argmax()))
    return "".join(data.letters[code] for code in codes)


def keep_weights(model: nn.Module, path: str | None) -> None:
    weights = model.state_dict()
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(name.encode() + weights[name].numpy().tobytes())
    print(f"weights: sha256 {digest.hexdigest()}", flush=True)
    if path:
        save_file(weights, path)


def tell(rank: int, line: str) -> None:
    if rank == 0:
        print(line, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to write.")
    parser.add_argument("--text", type=Path, default=LICENSE)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=32, help="stretches of text in a step, over all processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--step-time", type=float, default=0.0, help="seconds that a step takes at least")
    parser.add_argument("--save-weights", metavar="PATH", help="a safetensors file")
    options = parser.parse_args()
    if "RANK" in os.environ:  # started by a launcher
        dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory(prefix="characters-") as folder:
        alone = not os.environ.get("DEEPVM_STORE") and not dist.is_initialized()
        train(options, folder if alone else None)  # None: DEEPVM_STORE
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
