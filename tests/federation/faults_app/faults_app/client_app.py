"""The client of any experiment, which waits in training as long as a file of the test says so.

The files are beside the run's folder: `OUT-signals/client-2-round-1.began` is made when training begins, and while
there is `….hold` it goes no further. So tests act at a known moment of a round, however long anything takes.
"""

import time
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from comfetch.flower import Site, client_app
from comfetch.flower.apps import read_config, site_of


def hold(msg: Message, context: Context, call_next: Any) -> Message:
    """Say that training has begun, and wait until the test lets it go on."""
    client, number = context.node_config["partition-id"], msg.content["config"]["server-round"]
    signal = Path(f"{context.run_config['out']}-signals") / f"client-{client}-round-{number}"
    signal.with_suffix(".began").touch()
    while signal.with_suffix(".hold").exists():
        time.sleep(0.1)
    reply: Message = call_next(msg, context)
    return reply


def site(context: Context) -> Site:
    """Give the node the part of the task's examples that its partition-id says."""
    experiment, running = read_config(context.run_config)
    return site_of(experiment, context, None, running["device"])


app = client_app(site, mods=[hold])
