"""A Flower app that runs one model under several strategies."""
