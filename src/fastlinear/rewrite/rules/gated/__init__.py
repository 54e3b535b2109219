"""The rule of gated_mlp: linears that compute a gated MLP, as one call."""
