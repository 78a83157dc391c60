"""Division of a model's attention and MLPs over the ranks of a tensor-parallel group."""
