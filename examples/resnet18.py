"""Sketch a ResNet-18, print its footprint, and train it for some steps."""

import time

import torch
import torch.nn.functional as F

import comfetch as cf
from comfetch.models import resnet18


def main() -> None:
    """Train ten steps on random images of ten colours."""
    torch.manual_seed(0)
    images, labels = torch.randn(64, 3, 32, 32), torch.randint(0, 10, (64,))
    images += torch.randn(10, 3, 1, 1)[labels]  # something to learn: each class has a colour
    model = cf.sketch(resnet18, compression=10)
    print(cf.footprint(model, batch=images))
    optimiser = torch.optim.Adam(model.parameters())
    for step in range(10):
        started = time.perf_counter()
        loss = F.cross_entropy(model(images), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        print(f"step {step}: loss {loss.item():.3f}, {time.perf_counter() - started:.2f} s")


if __name__ == "__main__":
    main()
