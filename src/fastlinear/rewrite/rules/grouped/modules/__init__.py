"""Modules that are a grouped linear layer by themselves."""
