"""The server of the experiment in the run config."""

from comfetch.flower import server_app

app = server_app()
