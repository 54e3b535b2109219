"""Choosing a backend for a Problem: records, pure selection, explicit tuning, a JSON cache."""
