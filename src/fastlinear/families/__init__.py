"""One folder a family: public op, torch-only reference, one file a backend."""
