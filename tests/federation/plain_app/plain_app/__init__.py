"""Average a vector over the nodes: an app without torch, for tests of the federation itself."""
