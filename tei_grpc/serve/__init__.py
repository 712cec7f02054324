"""Front doors: each composes, none computes."""
