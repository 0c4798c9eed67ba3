"""Federated methods: one file each, all behind the same protocol."""

from comfetch.methods.base import Client, Message, Method, Server, Trained, Upload, check_upload
from comfetch.methods.comfetch import Comfetch
from comfetch.methods.fedavg import FedAvg
from comfetch.methods.local import Local

__all__ = [
    "Client",
    "Comfetch",
    "FedAvg",
    "Local",
    "Message",
    "Method",
    "Server",
    "Trained",
    "Upload",
    "check_upload",
]
