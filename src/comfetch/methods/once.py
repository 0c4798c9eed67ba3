"""What travels to each client once: the server notes who has it, and the client keeps it in its memory.

The server takes an accepted upload as proof that its client has it; until then it is sent again.
"""

import torch

from comfetch.errors import RunError
from comfetch.methods.base import Client, Server, State, Upload

HOLDERS = "holders"


def has_it(server: Server, client: Client) -> bool:
    """Tell whether a client has what is sent once."""
    return HOLDERS in server.extra and bool((server.extra[HOLDERS] == client.id).any())


def note_holders(server: Server, uploads: list[Upload]) -> State:
    """Return the server's notes with those who answered in this round among the holders."""
    before = server.extra[HOLDERS].tolist() if HOLDERS in server.extra else []
    return {**server.extra, HOLDERS: torch.tensor(sorted({*before, *(upload.client.id for upload in uploads)}))}


def part(state: State, prefix: str) -> State:
    """Return the tensors whose names start with a prefix, without it."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def keep(received: State, prefix: str, memory: State, own: State) -> State:
    """Take what is sent once from a download into the memory, or from there; `own` is what a server knows itself.

    Return it by name. Raise RunError if it is nowhere.
    """
    new = {name: tensor for name, tensor in received.items() if name.startswith(prefix)}
    memory.update({name: tensor.clone() for name, tensor in new.items()})
    kept = part(memory, prefix) or own
    if not kept:
        raise RunError(f"This client has lost its {prefix.rstrip('/')}, which is sent once. Give it a new client id.")
    return kept
