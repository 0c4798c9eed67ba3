"""Federated methods: one file each, all behind the same protocol."""

from typing import Any

from comfetch.methods.artemis import Artemis
from comfetch.methods.averaging import Averaging
from comfetch.methods.base import Client, Message, Method, Server, Trained, Upload, check_upload
from comfetch.methods.blockwise import Blockwise
from comfetch.methods.comfetch import Comfetch
from comfetch.methods.docofl import DoCoFL
from comfetch.methods.doublesqueeze import DoubleSqueeze
from comfetch.methods.ef21 import EF21
from comfetch.methods.fedavg import FedAvg
from comfetch.methods.fedrolex import FederatedDropout, FedRolex
from comfetch.methods.fetchsgd import FetchSGD
from comfetch.methods.flocora import FLoCoRA
from comfetch.methods.heterofl import HeteroFL
from comfetch.methods.local import Local
from comfetch.methods.lowrank import LowRank
from comfetch.methods.mask import Mask
from comfetch.methods.narrow import Narrow
from comfetch.methods.qsgd import QSGD
from comfetch.methods.sketched_sgd import SketchedSGD
from comfetch.methods.topk import LocalTopK, TrueTopK

METHODS: dict[str, type[Any]] = {
    kind.name: kind
    for kind in (
        Comfetch, FedAvg, FetchSGD, SketchedSGD, TrueTopK, LocalTopK, QSGD, DoubleSqueeze, Blockwise, Artemis, EF21,
        DoCoFL, Narrow, Mask, HeteroFL, FedRolex, FederatedDropout, LowRank, FLoCoRA,
    )
}  # fmt: skip
"""Every method by its name."""

__all__ = [
    "EF21", "METHODS", "QSGD", "Artemis", "Averaging", "Blockwise", "Client", "Comfetch", "DoCoFL", "DoubleSqueeze",
    "FLoCoRA", "FedAvg", "FedRolex", "FederatedDropout", "FetchSGD", "HeteroFL", "Local", "LocalTopK", "LowRank",
    "Mask", "Message", "Method", "Narrow", "Server", "SketchedSGD", "Trained", "TrueTopK", "Upload", "check_upload",
]  # fmt: skip
