"""Experiments of comfetch on Flower."""
