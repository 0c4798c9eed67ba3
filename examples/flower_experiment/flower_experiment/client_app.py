"""A client of the experiment in the run config."""

from comfetch.flower import experiment_client_app

app = experiment_client_app()
