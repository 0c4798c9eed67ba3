"""Model, data, training and test: as in any Flower app for PyTorch."""

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    """Classify digits of 8 x 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(),
            nn.Linear(512, 10),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[DataLoader, DataLoader]:
    """Load this node's part of the digits: four fifths to train, one to test."""
    digits = load_digits()
    inputs = torch.tensor(digits.data, dtype=torch.float32) / 16
    targets = torch.tensor(digits.target)
    mine = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(0))[partition_id::num_partitions]
    cut = len(mine) // 5
    train, test = (TensorDataset(inputs[rows], targets[rows]) for rows in (mine[cut:], mine[:cut]))
    return DataLoader(train, batch_size, shuffle=True), DataLoader(test, batch_size)


def train(net: nn.Module, loader: DataLoader, epochs: int, lr: float, device: torch.device) -> float:
    """Train the model on the training set, and return the mean loss."""
    net.to(device).train()
    criterion, optimiser = nn.CrossEntropyLoss(), torch.optim.Adam(net.parameters(), lr=lr)
    total = 0.0
    for _ in range(epochs):
        for inputs, targets in loader:
            optimiser.zero_grad()
            loss = criterion(net(inputs.to(device)), targets.to(device))
            loss.backward()
            optimiser.step()
            total += loss.item()
    return total / (epochs * len(loader))


@torch.no_grad()
def test(net: nn.Module, loader: DataLoader, device: torch.device) -> tuple[float, float]:
    """Return loss and accuracy on the test set."""
    net.to(device).eval()
    loss = right = 0.0
    for inputs, targets in loader:
        outputs = net(inputs.to(device))
        loss += nn.functional.cross_entropy(outputs, targets.to(device), reduction="sum").item()
        right += (outputs.argmax(1) == targets.to(device)).sum().item()
    return loss / len(loader.dataset), right / len(loader.dataset)
