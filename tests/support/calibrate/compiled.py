"""A compiled model, a folder of results and shared memory that only multiprocessing's resource tracker removes."""

import os
from multiprocessing import shared_memory

import torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters())
compiled = torch.compile(model, backend="eager")
shared = shared_memory.SharedMemory(name=f"deepvm-test-{os.getppid()}", create=True, size=100)
os.makedirs("results/today", exist_ok=True)
with open("results/today/log", "w") as log:
    log.write(shared.name)
for _ in range(100 if __name__ == "__main__" else 0):
    compiled(torch.randn(12, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
