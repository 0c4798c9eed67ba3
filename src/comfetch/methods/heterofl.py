"""HeteroFL (Diao, Ding and Tarokh 2021): clients train the first channels of every layer, as many as they can hold."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from comfetch.methods.base import Client
from comfetch.methods.submodel import SubModel
from comfetch.widths import first_channels


@dataclass
class HeteroFL(SubModel):
    """Compress both directions, the client's memory and its work: a client holds, gets and sends a narrow sub-model.

    Its first ⌈r · channels⌉ channels of every hidden layer are the same in each round, r = 1/√compression: the levels
    a to e of the paper, r = 1, 1/2, 1/4, 1/8, 1/16, are the capacities 1, 4, 16, 64, 256. Channels that no client holds
    stay as they were drawn, so some clients should have the capacity 1; with one compression for all this is averaging
    of narrow nets, within a full one that is never trained.

    It differs from the paper in its batch norm: running statistics are tracked, and averaged within each width, since
    the paper's query of statistics after training needs clients that hold the full model. So the scaler works in a
    sub-model's evaluation, too. The paper counts every client once in the average: `Averaging("uniform")`. With
    `masked_loss`, the last layer is averaged by class, as in the authors' code.
    """

    down: ClassVar[str] = "first channels of every layer"
    up: ClassVar[str] = "first channels of every layer"
    holds: ClassVar[str] = "narrow sub-model"

    name: str = "heterofl"

    def channels(self, channels: int, width: int, round: int, client: Client) -> Tensor:
        """Keep the first."""
        return first_channels(channels, width)
