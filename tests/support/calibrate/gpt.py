"""A loop as in nanoGPT: batches from a tensor, accumulation, decay groups, tied weights, an evaluation now and then."""

import math

import torch
import torch.nn.functional as F
from torch import nn

STEPS, ACCUMULATE, BATCH, LENGTH, WIDTH, VOCABULARY = 15, 2, 4, 32, 64, 512


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x):
        q, k, v = (t.view(*x.shape[:2], 4, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.scale * self.out(y.transpose(1, 2).reshape(x.shape))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def get_batch():
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


model = GPT()
groups = [
    {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95))
for step in range(STEPS):
    if step % 5 == 0:
        model.eval()
        with torch.no_grad():
            losses = [model(*get_batch()).item() for _ in range(2)]
        model.train()
        assert math.isfinite(sum(losses))
    for _ in range(ACCUMULATE):
        (model(*get_batch()) / ACCUMULATE).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
