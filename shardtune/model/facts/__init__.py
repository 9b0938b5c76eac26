"""What a model is, read once: facts, which meshes and settings they allow, and a trial."""
