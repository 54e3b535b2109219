"""What every experiment shares: cases, measuring, rows, tables and plots."""
