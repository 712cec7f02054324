"""Building blocks that model families share: packed inputs, attention, linear layers, heads."""
