"""The rule of mlp: runs of linears with activations between them, as one call."""
