"""Sketched multi-head attention."""
