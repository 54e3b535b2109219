"""The model families, one file a kind. Widths are typical of published ones, scaled down."""
