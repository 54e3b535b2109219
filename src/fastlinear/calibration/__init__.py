"""Calibration: calls drawn at random, measured, and the prices of work that explain their times."""
