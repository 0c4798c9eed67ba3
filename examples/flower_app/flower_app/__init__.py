"""A Flower app with sketched clients."""
