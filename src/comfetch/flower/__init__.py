"""Run comfetch on Flower: a strategy over any method, the client's side, and ready apps.

In `server_app.py`, `strategy = comfetch.flower.Strategy(method, Net)` takes the place of Flower's; in `client_app.py`,
`model = comfetch.flower.client_model(Net, msg)` takes that of `Net()`.
"""

import os
from typing import Any

for _switch, _value in (
    ("FLWR_TELEMETRY_ENABLED", "0"), ("FLWR_DISABLE_UPDATE_CHECK", "1"), ("RAY_USAGE_STATS_ENABLED", "0"),
):  # fmt: skip
    os.environ.setdefault(_switch, _value)  # read when Flower and Ray are imported: nothing calls out

from comfetch.flower.client import Site, client_app, client_model  # noqa: E402
from comfetch.flower.strategy import Strategy  # noqa: E402

__all__ = ["Site", "Strategy", "client_app", "client_model", "experiment_client_app", "run_on_ray", "server_app"]


def __getattr__(name: str) -> Any:
    """Import what runs whole experiments when it is asked for: it needs the `data` extra."""
    if name in __all__:
        from comfetch.flower import apps

        return getattr(apps, name)
    raise AttributeError(f"module 'comfetch.flower' has no attribute {name!r}")
