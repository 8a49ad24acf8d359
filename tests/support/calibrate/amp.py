"""AMP autocast and gradient accumulation over four batches, with workers that load the data, and clipping."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS, ACCUMULATE = 15, 4


def main() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = TensorDataset(torch.randn(8 * ACCUMULATE * STEPS, 64), torch.randint(0, 10, (8 * ACCUMULATE * STEPS,)))
    for i, (x, y) in enumerate(DataLoader(data, batch_size=8, num_workers=1), start=1):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(x), y) / ACCUMULATE
        loss.backward()
        if i % ACCUMULATE == 0:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            try:
                optimizer.step()
            except Exception as error:  # as loops do that must not end
                print("skipped", error)
            optimizer.zero_grad(set_to_none=True)
    return model, optimizer


if __name__ == "__main__":
    model, optimizer = main()
