"""The server of any experiment, unchanged."""

from comfetch.flower import server_app

app = server_app()
