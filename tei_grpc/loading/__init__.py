"""From a model id to files, their description and their tensors."""
